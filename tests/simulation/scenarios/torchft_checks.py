"""What must hold after a training on torchft's replicas.

Every committed step is computed again, without minidp, from the state before it: with
the batches of those who contributed, or by one process. Whoever contributed must have
had this very state, and somebody must have committed it. Nobody tells of what has not
happened, and each try ends by the limits of what it may wait for.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from minidp.errors import CollectiveError
from minidp.torchft.quorum import ATTEMPTS
from tests.simulation.faults import LASTING, InjectedError
from tests.simulation.play import Play
from tests.simulation.scheduler import Death, Finding, Life
from tests.simulation.training import Net, Settings

from .logical import average
from .torchft import (
    DIFFERENT,
    LAST,
    TURNS,
    Commit,
    Elastic,
    Job,
    Marked,
    State,
    Stepper,
    job_of,
    loss_in,
    state_of,
    tensor_bytes,
    trained,
)


def check_elastic(play: Play) -> None:
    """Let each committed step be right, and each wait end by its limit."""
    job, settings = job_of(play), play.settings
    afters: dict[int, set[State]] = {-1: job.first_states}
    for each in job.commits:
        afters.setdefault(each.step, set()).add(each.after)
    for each in job.commits:
        where = f"rank {each.rank}, step {each.step} in quorum {each.quorum}"
        if each.before not in afters.get(each.step - 1, ()):
            raise Finding(f"{where}: nobody has committed the state before it")
        if settings.number is None:
            _check_average(job, settings, each, where)
        else:
            _check_bits(settings, each, where)
    _check_quorums(job)
    _check_words(play)
    _check_errors(play)
    _check_times(play)
    _check_progress(play)
    _check_ends(play)


def _check_average(job: Job, settings: Elastic, commit: Commit, where: str) -> None:
    """Let a step be the average over those who contributed, from this very state."""
    who = tuple(number for number, share in enumerate(commit.who) if share)
    if any(commit.who[number] != commit.who[who[0]] for number in who) or not who:
        raise Finding(f"{where}: replicas contributed {commit.who}")
    for number in who:
        if (number, commit.step, commit.before) not in job.seen:
            raise Finding(f"{where}: replica {number} has averaged with another state")
    right = next_state(settings.training, commit.before, commit.step, who)
    # A gradient that lies in its bucket is divided, another one is multiplied.
    has_views = dict(settings.training.options).get("gradient_as_bucket_view")
    if commit.after != right and not (has_views and _is_close(commit.after, right)):
        raise Finding(f"{where}: it is not the average of {who}")


def _is_close(found: State, right: State) -> bool:
    numbers = [
        torch.frombuffer(bytearray(b"".join(each)), dtype=torch.float32)
        for each in (found, right)
    ]
    return torch.allclose(*numbers, rtol=1e-6, atol=1e-7)


@functools.lru_cache(maxsize=20000)
def next_state(
    settings: Settings, before: State, step: int, who: tuple[int, ...]
) -> State:
    """Return a state after one more step, computed without minidp."""
    net = Marked(0)
    optimizer = Stepper(net, lambda: None)
    params = trained(net)
    with torch.no_grad():
        for i, param in enumerate(params):
            param.copy_(_tensor(before[i], param))
            if momentum := before[len(params) + i]:
                found = _tensor(momentum, param)
                optimizer.state[param]["momentum_buffer"] = found
    totals: dict[nn.Parameter, torch.Tensor] = {}
    is_batched = dict(settings.options).get("batched_grad_copy")
    for number in who:
        net.zero_grad()
        for part in range(settings.local + 1):
            loss_in(net, settings, number, step, part).backward()
        for param in params:
            if param.grad is not None:
                n = len(who)
                share = param.grad / n if is_batched else param.grad * (1.0 / n)
                totals[param] = totals[param] + share if param in totals else share
    for param in params:
        param.grad = totals.get(param)
    optimizer.step()
    return state_of(net, optimizer)


def _tensor(values: bytes, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(values), dtype=like.dtype).view_as(like)


def _check_bits(settings: Elastic, commit: Commit, where: str) -> None:
    """Let a step have the bits of one process, whoever has computed what."""
    after, buffer = of_one_process(settings.training, settings.number)[commit.step]
    if commit.after != after or commit.buffer not in (None, buffer):
        raise Finding(f"{where}: not the bits of one process")


@functools.lru_cache(maxsize=500)
def of_one_process(settings: Settings, number: int) -> list[tuple[State, bytes]]:
    """Return parameters and momenta, and the module buffer, after each step."""
    net = Net(0)
    optimizer = Stepper(net, lambda: None)
    found = []
    for step in range(TURNS + LAST):  # STEPS are fewer
        average(net, settings, number, step)
        optimizer.step()
        found.append((state_of(net, optimizer), tensor_bytes(net.seen)))
    return found


def _check_quorums(job: Job) -> None:
    """Let all who commit a step in the same quorum come to the same state."""
    first: dict[tuple[int, int], Commit] = {}
    for each in job.commits:
        other = first.setdefault((each.quorum, each.step), each)
        if (each.before, each.after) != (other.before, other.after):
            raise Finding(
                f"ranks {other.rank} and {each.rank} commit step {each.step} in quorum "
                f"{each.quorum} to different states"
            )


def is_untroubled(play: Play) -> bool:
    """Return whether nothing happens, none comes late, and all vote in each step."""
    has_struck = any(each.fault.has_struck for each in play.strikers)
    settings: Elastic = play.settings
    is_late = settings.late or settings.replaces or settings.skips >= 0
    return not (has_struck or is_late or job_of(play).lighthouse.cuts)


def _check_words(play: Play) -> None:
    """Let nobody tell of different ways where all have gone one."""
    ways: dict[int, set[int]] = {}  # by step, the quorums that have committed it
    for each in job_of(play).commits:
        ways.setdefault(each.step, set()).add(each.quorum)
    for rank, text in play.warned:
        if DIFFERENT in text and max(map(len, ways.values()), default=0) < 2:
            raise Finding(f"rank {rank} said {text}")
    for quorum, (found, size) in job_of(play).told.items():
        if len(found) == size and len({*found}) == 1:
            raise Finding(f"all in quorum {quorum} have come by {found[0]}")
    if is_untroubled(play) and play.warned:
        raise Finding(f"rank {play.warned[0][0]} said {play.warned[0][1]}")


def _check_errors(play: Play) -> None:
    """Let errors be those of a script that was struck, or find no quorum."""
    expected = InjectedError, KeyboardInterrupt, Death
    for outcome in play.outcomes:
        error = outcome.error
        # torchft's own error comes if a script has raised before it waits for a quorum.
        is_alone = isinstance(error, CollectiveError | TimeoutError)
        is_alone = is_alone and "lighthouse quorum timeout" in str(error)
        if isinstance(error, expected) or error is None:
            continue
        if is_untroubled(play) or not is_alone:
            raise Finding(f"rank {outcome.rank}, step {outcome.step}: {error!r}")


def _check_progress(play: Play) -> None:
    """Let no replica try in vain for long, if enough of them live and are heard."""
    struck = [each.fault.kind for each in play.strikers if each.fault.has_struck]
    if LASTING.intersection(struck) or job_of(play).lighthouse.cuts:
        return
    for rank, living in job_of(play).gave_up:
        if living >= play.settings.limits.min_replica_size:
            raise Finding(f"rank {rank} gave up, although {living} replicas lived")


def _check_ends(play: Play) -> None:
    """Let replicas have gone one way at last, if they had turns in common."""
    ways = job_of(play).last_ways
    if len(ways) == len(play.scheduler.processes) and len({*ways.values()}) > 1:
        raise Finding(f"after {LAST} common turns, ways are {ways}")


def _check_times(play: Play) -> None:
    """Let each try end by the limits of all it may wait for."""
    limits = play.settings.limits
    late = sum(each.fault.seconds for each in play.strikers if each.fault.has_struck)
    limit = late + ATTEMPTS * (limits.quorum + 3 * limits.manager + 2 * limits.group)
    for each in play.outcomes:
        is_dead = play.scheduler.processes[each.rank].life is Life.KILLED
        if not is_dead and each.ended - each.began > limit:
            took = each.ended - each.began
            raise Finding(f"rank {each.rank}: step {each.step} took {took:.0f} s")
    if is_untroubled(play):
        tries = sum(each.step >= 0 for each in play.outcomes)
        if tries != len(job_of(play).commits):
            raise Finding(f"{tries} tries for {len(job_of(play).commits)} steps")
