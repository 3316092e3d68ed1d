"""All checks of ``minidp doctor``, one after the other; none of them can hang.

alone          environment, port, variables, interfaces, backends, machine
meet           ranks find each other through the store; who is missing is named
compare        versions, settings, GPUs: facts by way of the store
communicate    clocks, all-reduce, gradients: `_trials`
report         rank 0 hears what all ranks found
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._checks_collectives import backends_here, judge_backends
from ._checks_environment import (
    TORCHRUN,
    Launch,
    judge_gpus,
    judge_launch,
    judge_shared_memory,
    judge_threads,
    read_launch,
    read_shared_memory,
)
from ._checks_network import check_port, judge_interfaces, read_network
from ._checks_ranks import Facts, judge_claims, judge_facts, read_facts
from ._findings import Finding, Report, Status, failed, merge, ok, skipped
from ._meeting import Meeting, absence
from ._timebox import GRACE_SECONDS, Limits, Runner, Timebox
from ._trials import Trials
from ._variables import judge_variables

_stores: Any = dist  # whose stores are missing from the type stubs' exports


class Examination:
    """One run of ``minidp doctor`` in this process.

    Args:
        env: environment variables.
        limits: of time.
    """

    def __init__(self, env: Mapping[str, str], limits: Limits) -> None:
        self.runner = Runner(limits)
        self._env = env
        self._launch: Launch | None = None
        self._store: Any = None
        self._meeting: Meeting | None = None
        self._present: tuple[int, ...] = ()  # ranks that came
        self._is_reachable = False  # the store
        self._is_complete = False  # all of them, and each once
        self.is_interrupted = False

    def run(self) -> Report | None:
        """All checks; the report of all ranks, or None where another rank has it."""
        self._alone()
        launch = self._launch
        if launch is not None:
            wait = self.runner.limits.wait + self.runner.limits.check
            if self._is_reachable:
                self.runner.run("rendezvous", lambda: self._meet(launch), wait)
            if self._is_complete and self._meeting is not None:
                Trials(self.runner, self._meeting, self._store, launch).run()
            elif not self._is_complete:
                found = "left out: clocks, all-reduce, gradients"
                self.runner.findings.append(skipped("communication", found))
        return self._report()

    def interrupt(self) -> Report | None:
        """After Ctrl-C: what was found until then; as `run`."""
        self.is_interrupted = self.runner.is_stuck = True
        check = self.runner.current or "the first check"
        found = f"Ctrl-C during: {check}; what comes after is left out"
        self.runner.findings.append(skipped("interrupted", found))
        meeting = self._meeting
        if meeting is not None:
            meeting.seconds = GRACE_SECONDS
            self.runner.attempt(lambda: meeting.leave("was interrupted (Ctrl-C)"))
        return self._report()

    def tell_printed(self) -> None:
        """Here the report was printed: the others may end."""
        meeting = self._meeting
        if meeting is not None:
            self.runner.attempt(lambda: meeting.post("printed", "yes"))

    def wait_until_printed(self) -> None:
        """Torchrun ends all ranks as soon as one has failed: not before the report."""
        meeting = self._meeting
        if meeting is None or not self._present:
            return
        first = [min(self._present)]
        wait = functools.partial(meeting.gather, "printed", "yes", first, is_last=True)
        try:
            Timebox(wait).run(meeting.seconds + GRACE_SECONDS)
        except TimeoutError:  # the store does not answer
            self.runner.is_stuck = True

    # -- alone -------------------------------------------------------------------------

    def _alone(self) -> None:
        env, run = self._env, self.runner.run
        run("environment", lambda: judge_launch(env))
        status = self.runner.findings[-1].status
        if status in (Status.OK, Status.WARNING):
            self._launch = launch = read_launch(env)
            wait = self.runner.limits.wait  # until rank 0 listens
            if launch.world_size > 1:
                run("imports", _import_ahead, wait + self.runner.limits.check)
            run("master port", lambda: check_port(launch, wait), wait + GRACE_SECONDS)
            self._is_reachable = self.runner.findings[-1].status is Status.OK
        run("variables", lambda: judge_variables(env))
        run("interfaces", self._check_interfaces)
        has_gpus = torch.cuda.is_available()
        run("backends", lambda: judge_backends(backends_here(), has_gpus=has_gpus))
        run("gloo", _open_gloo)
        here, gpus = self._local_processes(), torch.cuda.device_count()
        run("GPUs", lambda: judge_gpus(env, gpus, here))
        threads, cores = torch.get_num_threads(), os.cpu_count() or 1
        run("threads", lambda: judge_threads(threads, here, cores))
        run("shared memory", lambda: judge_shared_memory(*read_shared_memory()))
        if status is Status.FAILED:
            found = "left out until the environment is right"
            self.runner.findings.append(skipped("other ranks", found))
        if status is Status.SKIPPED:
            found = "none to compare with: clocks, versions, all-reduce, gradients"
            self.runner.findings.append(skipped("other ranks", found, TORCHRUN))

    def _local_processes(self) -> int:
        if self._launch is None:
            return 1
        return self._launch.local_world_size or self._launch.world_size

    def _check_interfaces(self) -> list[Finding]:
        several = self._launch is not None and self._launch.has_several_hosts
        has_gpus = torch.cuda.is_available()
        network = read_network()
        env = self._env
        return judge_interfaces(env, network, several_hosts=several, has_gpus=has_gpus)

    # -- meet --------------------------------------------------------------------------

    def _meet(self, launch: Launch) -> list[Finding]:
        meeting = self._open_store(launch)
        size, local_rank = launch.world_size, launch.local_rank
        facts = read_facts(self._env, world_size=size, local_rank=local_rank)
        heard = meeting.gather("facts", facts.as_json())
        meeting.seconds = self.runner.limits.check + 2 * GRACE_SECONDS
        self._meeting, self._present = meeting, tuple(heard.values)
        of_rank = {rank: Facts.of_json(said) for rank, said in heard.values.items()}
        findings = judge_facts(of_rank) + judge_claims(launch.rank, meeting.claim(0))
        is_refused = any(
            f.check == "ranks" and f.status is Status.FAILED for f in findings
        )
        self._is_complete = not heard.absent and not is_refused
        if heard.absent:
            remedy = (
                "were all processes started, with the same MASTER_ADDR, MASTER_PORT "
                "and WORLD_SIZE? look at what those ranks printed; try --wait 120"
            )
            findings.append(failed("rendezvous", absence(heard), remedy))
        return findings

    def _open_store(self, launch: Launch) -> Meeting:
        store = _stores.TCPStore(
            launch.address,
            launch.port,
            is_master=launch.rank == 0 and not launch.is_agents,
            timeout=timedelta(seconds=self.runner.limits.check),
            wait_for_workers=False,
        )
        run = self._env.get("TORCHELASTIC_RUN_ID", "")
        attempt = self._env.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"minidp/doctor/{run}/{attempt}"
        self._store = _stores.PrefixStore(prefix, store)
        rank, size, wait = launch.rank, launch.world_size, self.runner.limits.wait
        # A connection of its own: one store serves one call at a time, and groups wait.
        room = _stores.PrefixStore(prefix, store.clone())
        meeting = Meeting(room, rank, size, seconds=wait)
        meeting.claim()
        return meeting

    # -- report ------------------------------------------------------------------------

    def _report(self) -> Report | None:
        runner, meeting, launch = self.runner, self._meeting, self._launch
        rank = 0 if launch is None else launch.rank
        own = "minidp doctor" if launch is None else f"minidp doctor: rank {rank}"
        size = 1 if launch is None else launch.world_size
        if meeting is None:
            return merge(own, {rank: runner.findings}, size)
        mine = [finding.as_json() for finding in runner.findings]
        if rank != min(self._present):
            if runner.attempt(lambda: meeting.post("findings", mine)):
                return None
            return merge(own, {rank: runner.findings}, size)
        hear = functools.partial(
            meeting.gather, "findings", mine, self._present, is_last=True
        )
        try:
            heard = Timebox(hear).run(meeting.seconds + GRACE_SECONDS)
        except TimeoutError:
            runner.is_stuck = True
            return merge(own, {rank: runner.findings}, size)
        of_rank = {r: list(map(Finding.of_json, v)) for r, v in heard.values.items()}
        if heard.absent:
            remedy = "look at what that rank printed"
            of_rank[rank].append(failed("answers", absence(heard), remedy))
        return merge(f"minidp doctor: {size} rank{'s' * (size != 1)}", of_rank, size)


def _import_ahead() -> list[Finding]:
    """Import what the first DDP of a process does: hundreds of modules.

    On a busy machine that takes longer than ranks wait for each other later on; here
    nobody waits for it.
    """
    importlib.import_module("torch._dynamo")
    return []


def _open_gloo() -> Finding:
    """Whether Gloo can open a connection at all, here."""
    store, timeout = _stores.HashStore(), timedelta(seconds=5)
    group: Any = _stores.ProcessGroupGloo(store, 0, 1, timeout)
    group.allreduce([torch.ones(1)]).wait()
    return ok("gloo", "opens its interface")
