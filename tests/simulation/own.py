"""Run a training function of your own on simulated ranks, and replay what it does.

    python -m tests.simulation.own my_training:train --ranks 3
    python -m tests.simulation.own my_training:train --ranks 3 --seed 17

The first line looks for a seed with which ranks wait for ever, collectives do not
belong together, a tensor in flight is written to, or the function raises. The second
one plays that seed again, and tells who did what, and when.

The function gets the rank, and does what it does on each rank under torchrun, on the
CPU. It may call init_process_group() and destroy_process_group(), or leave them out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minidp import world

from .faults import Kind
from .lines import line_of
from .play import Play, Rank
from .scenarios import warm_up
from .scheduler import Death, Finding, NotSimulatedError, of_the_system
from .tape import Tape

Function = Callable[[int], object]
_playing: Play | None = None
_TORCHS_SEED = 67280421310721  # with which torch's generator begins in each process


def play(
    train: Function,
    seed: int,
    *,
    ranks: int = 2,
    kinds: tuple[Kind, ...] = (Kind.NOTHING,),
) -> Play:
    """Run the function on each rank, in the order of events that belongs to a seed.

    Args:
        train: Gets the rank.
        seed: Makes all choices.
        ranks: How many ranks there are.
        kinds: What may go wrong with one of them, the mildest first.

    Returns:
        The run, whose `Play.tell` says who did what.

    Raises:
        Finding: Ranks hang or raise. Its attribute ``play`` is the run.
        NotSimulatedError: The function uses something that only real ranks have.
    """
    global _playing
    raised: list[tuple[int, BaseException, str]] = []

    def script(ctx: Rank) -> None:
        random.seed(f"{seed} {ctx.rank}")
        np.random.seed([seed % 2**32, ctx.rank])
        torch.manual_seed(_TORCHS_SEED)
        try:
            train(ctx.rank)
        except Death:
            raise
        except BaseException as error:
            raised.append((ctx.rank, error, line_of(error)))
            raise

    run = Play(script, Tape(seed), ranks, kinds=kinds, has_numbers=True, is_users=True)
    swap = run.scheduler.on_switch

    def on_switch(before: Any, after: Any) -> None:
        if swap is not None:
            swap(before, after)
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(after.rank)

    run.scheduler.on_switch = on_switch
    try:
        with _of_ranks(ranks), simulated_names():
            _playing = run
            run.run()
        if raised:
            raise Finding("; then ".join(_told(*each) for each in raised))
    except Finding as finding:
        for _, error, where in raised:
            if isinstance(error, NotSimulatedError):
                raise NotSimulatedError(f"{error}{where}") from None
        finding.play = run  # type: ignore[attr-defined]
        raise
    finally:
        _playing = None
    return run


def _told(rank: int, error: BaseException, where: str) -> str:
    return f"rank {rank} raised {type(error).__name__}{where}: {error}"


def find(train: Function, seeds: range, *, ranks: int = 2) -> int | None:
    """Return the first seed with which ranks hang or raise, or None."""
    found = _find(train, seeds, ranks)
    return None if found is None else found[0]


def _find(train: Function, seeds: range, ranks: int) -> tuple[int, Finding] | None:
    for seed in seeds:
        try:
            play(train, seed, ranks=ranks)
        except Finding as finding:
            return seed, finding
    return None


# ------------------------------------------- what a process has once, for each rank


@contextmanager
def _of_ranks(ranks: int) -> Iterator[None]:
    """Let the environment have what torchrun puts there; `play` adds the rank."""
    before = {**os.environ}
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    try:
        yield
    finally:
        for name in {*os.environ} - {*before}:
            del os.environ[name]
        os.environ |= before


@contextmanager
def simulated_names() -> Iterator[None]:
    """Let clocks, sleeps, futures and groups be simulated on threads of ranks.

    Elsewhere they are the real ones. It may be entered again inside.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (time, "sleep", _sleep),
        *((time, name, partial(_clock, getattr(time, name), 1)) for name in _SECONDS),
        *((time, name, partial(_clock, getattr(time, name), 1e9)) for name in _NANOS),
        (torch._C.Future, "wait", _method(torch._C.Future.wait)),
        (c10d, "_new_process_group_helper", _new_group),
        (c10d, "init_process_group", _init),
        (dist, "init_process_group", _init),
    ]
    if time.sleep is _sleep:
        replaced = []
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


_SECONDS = ("time", "monotonic", "perf_counter")
_NANOS = ("time_ns", "monotonic_ns", "perf_counter_ns")
_real_sleep, _real_helper = time.sleep, c10d._new_process_group_helper
_real_init = dist.init_process_group


def _here() -> Play | None:
    """Return the run that the present thread belongs to, if it is one of a rank."""
    run = _playing
    if run is None or run.scheduler.process is None:
        return None
    return run if run.scheduler.current.ident == threading.get_ident() else None


@of_the_system
def _sleep(seconds: float) -> None:
    if _here() is None:
        _real_sleep(seconds)
    else:
        world.sleep(seconds)


def _clock(real: Callable[[], float], unit: float) -> float:
    if _here() is None:
        return real()
    return world.now() if unit == 1 else round(unit * world.now())


def _method(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @of_the_system
    def wait(future: Any) -> Any:
        if _here() is not None and not future.done():
            event = world.event()
            future.add_done_callback(lambda _: event.set())
            event.wait()
        return real(future)

    return wait


@of_the_system
def _new_group(
    size: int, rank: int | None, ranks: list[int], *args: Any, **kwargs: Any
) -> Any:
    run = _here()
    if run is None:
        return _real_helper(size, rank, ranks, *args, **kwargs)
    _backend, _store, name = args[:3]
    if rank is None:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    group: Any = run.network.join(
        f"group {name} of ranks {ranks}", size, is_listed=True
    )
    return group, c10d._world.pg_map[group][1]


@of_the_system
def _init(*args: Any, **kwargs: Any) -> None:
    run = _here()
    if run is None:
        _real_init(*args, **kwargs)
        return
    process = run.scheduler.process
    assert process is not None
    run.scheduler.turn("calls init_process_group")
    if process.torchs.default_pg is None:
        raise NotSimulatedError("a default group after another one is not simulated")
    if process.owned.setdefault(_init, False):
        raise ValueError("trying to initialize the default process group twice!")
    process.owned[_init] = True


# ------------------------------------------------------------------ the command


def main() -> int:
    """Do what the command line says; return 1 for a finding, and 2 if it cannot."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.own",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="gets the rank")
    parser.add_argument("--ranks", type=int, default=2, help="how many (2)")
    parser.add_argument(
        "--runs", type=int, default=1000, help="how many seeds to try (1000)"
    )
    parser.add_argument("--seed", type=int, help="play this one, and tell all of it")
    parser.add_argument(
        "--watchdog", action="store_true", help="tell what minidp's own threads do, too"
    )
    given = parser.parse_args()
    if given.ranks < 1:
        parser.error(f"--ranks {given.ranks}: there is at least one rank")
    warm_up()  # a first run, which imports a lot, would not be like all others
    sys.path.insert(0, "")
    with simulated_names():
        train = _function(parser, given.function)
        first = 0 if given.seed is None else given.seed
        seeds = range(first, first + (given.runs if given.seed is None else 1))
        try:
            if given.seed is None:
                found = _find(train, seeds, given.ranks)
                told = found and found[1].play  # type: ignore[attr-defined]
            else:
                found, told = _play(train, given.seed, given.ranks)
        except NotSimulatedError as error:
            print(f"cannot be played: {error}. See tests/README.md, Simulated ranks")
            return 2
    if told is not None:
        hidden = () if given.watchdog else ("minidp watchdog",)
        print(told.tell(without=hidden))
        for rank, end in sorted(told.ends.items()):
            how = "came to its end" if found is None else "was not over yet"
            print(f"rank {rank} " + (f"ended with {end!r:.200}" if end else how))
    if found is None:
        print(f"nothing was found with {_seeds(seeds)}")
        return 0
    print(f"FOUND with --seed {found[0]}: {found[1]}")
    return 1


def _seeds(seeds: range) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _function(parser: argparse.ArgumentParser, given: str) -> Function:
    module, _, name = given.partition(":")
    try:
        function: Function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        parser.error(f"{given} is no function that can be imported: {error}")
    return function


def _play(
    train: Function, seed: int, ranks: int
) -> tuple[tuple[int, Finding] | None, Play]:
    try:
        return None, play(train, seed, ranks=ranks)
    except Finding as finding:
        return (seed, finding), finding.play  # type: ignore[attr-defined]


if __name__ == "__main__":
    raise SystemExit(main())
