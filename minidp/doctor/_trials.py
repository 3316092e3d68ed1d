"""Checks for which ranks communicate, on groups with a short timeout.

Before each of them the ranks meet. When one dies or fails, the others learn so there,
or from their backend, and leave the rest out.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._checks_collectives import (
    SIZES,
    check_all_reduce,
    check_clocks,
    check_gradients,
)
from ._checks_environment import Launch
from ._findings import Finding, Status, failed, ok, skipped
from ._meeting import Gathered, Meeting, absence
from ._timebox import GRACE_SECONDS, Check, Runner, Timebox


class Trials:
    """All of them, in order.

    Args:
        runner: runs them, keeps what they find.
        meeting: all ranks are there.
        store: of the process groups.
        launch: who this process is.
    """

    def __init__(
        self, runner: Runner, meeting: Meeting, store: Any, launch: Launch
    ) -> None:
        self._runner = runner
        self._meeting = meeting
        self._store = store
        self._launch = launch
        self._timeout = timedelta(seconds=runner.limits.check)
        self._met = 0  # times
        self._is_over = False  # some rank is missing, or a group is unusable

    def run(self) -> None:
        """Gloo first, then NCCL if every rank has a GPU."""
        if self._launch.world_size == 1:
            found = "one rank: no clocks to compare, nothing travels"
            self._runner.findings.append(skipped("communication", found))
            return
        self._together("gloo group", self._open_gloo)
        if self._is_over:
            return
        cpu = torch.device("cpu")
        world: Any = dist.group.WORLD
        self._together("clocks", lambda: check_clocks(world, cpu))
        self._measure(world, cpu, "Gloo")
        index = self._gpu_index()
        has_gpus = None not in self._hear(index).values.values()
        if has_gpus and not self._is_over and dist.is_nccl_available():
            self._on_gpus(torch.device(f"cuda:{index}"))
        if not self._is_over:
            self._runner.attempt(dist.destroy_process_group)

    def _hear(self, value: Any) -> Gathered:
        """Meet; also when the store is stuck this ends."""
        self._met += 1
        topic = f"trial {self._met}"
        seconds = self._meeting.seconds + GRACE_SECONDS
        try:
            hearing = functools.partial(self._meeting.gather, topic, value)
            return Timebox(hearing).run(seconds)
        except TimeoutError as error:
            self._runner.is_stuck = True
            me = self._launch.rank
            others = [r for r in range(self._launch.world_size) if r != me]
            return Gathered({}, dict.fromkeys(others, f"the store {error}"))

    def _together(self, name: str, check: Check) -> None:
        """Run one check on all ranks, or on none."""
        if self._is_over:
            return
        heard = self._hear(None)
        if heard.absent:
            remedy = "look at what that rank printed; what comes after is left out"
            self._runner.findings.append(failed(name, absence(heard), remedy))
            self._end("saw another rank leave")
            return
        seconds = self._runner.limits.check + GRACE_SECONDS
        if not self._runner.run(name, check, seconds, self._who_left):
            self._end(f"left: its check '{name}' failed")

    def _who_left(self) -> str:
        """While a check is under way: who will not take part."""
        try:
            return absence(Gathered({}, self._meeting.who_left()))
        except RuntimeError:
            return "the store is gone"

    def _end(self, why: str) -> None:
        # All that communicate are at most a grace apart from here on.
        self._meeting.seconds = 2 * GRACE_SECONDS
        self._is_over = self._runner.is_stuck = True
        self._runner.attempt(lambda: self._meeting.leave(why))

    def _open_gloo(self) -> Finding:
        prefixed: Any = dist
        dist.init_process_group(
            "gloo",
            store=prefixed.PrefixStore("group", self._store),
            rank=self._launch.rank,
            world_size=self._launch.world_size,
            timeout=self._timeout,
        )
        return ok("gloo group", "all ranks are connected to each other")

    def _measure(self, group: Any, device: torch.device, backend: str) -> None:
        name = f"all-reduce, {backend}"
        for num_bytes in SIZES:
            self._together(
                name,
                functools.partial(
                    check_all_reduce, group, device, num_bytes, check=name
                ),
            )
        name = f"gradients, {backend}"
        check = functools.partial(check_gradients, group, device, check=name)
        self._together(name, check)

    def _gpu_index(self) -> int | None:
        """The GPU of this rank; None: none, or ranks would have to share."""
        count, index = torch.cuda.device_count(), self._launch.local_rank
        is_refused = any(f.status is Status.FAILED for f in self._runner.findings)
        if count == 1:
            index = 0
        return None if is_refused or index is None or index >= count else index

    def _on_gpus(self, device: torch.device) -> None:
        made: list[Any] = []

        def open_nccl() -> Finding:
            made.append(dist.new_group(backend="nccl", timeout=self._timeout))
            return ok("NCCL group", "made")

        # Else a late collective would end the process, and nobody would say why.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        self._together("NCCL group", open_nccl)
        if made:
            self._measure(made[0], device, "NCCL")
