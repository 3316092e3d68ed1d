"""Run the stages of ``minidp doctor`` in order; each check has a time limit.

alone          environment, port, variables, interfaces, backends, machine
meet           ranks find each other through the store; who is missing is named
compare        versions, settings, GPUs: facts by way of the store (one check with
               the meeting)
communicate    clocks, all-reduce, gradients, on groups with a short timeout; a rank
               whose check raises or hangs leaves out what comes after; other ranks
               do, too, as soon as their own check lacks that rank
report         the lowest rank that came prints what all ranks found
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from minidp.console import positive_seconds, say

from .checks import collectives, environment, network, ranks, variables
from .findings import Check, Finding, Report, Status, failed, merge, named, ok, skipped
from .meeting import Meeting
from .timebox import GRACE_SECONDS, Runner

_stores: Any = dist  # the type stubs do not export the stores
CPU = torch.device("cpu")
INTERRUPTED_SECONDS = 8.0  # after Ctrl-C, to hear what other ranks found

DESCRIPTION = """\
Checks the machine and the job: environment variables, ports, network interfaces,
backends, GPUs, shared memory; under torchrun also versions, clocks, all-reduce
(numbers and bandwidth), and whether a probe model gets the same gradients on all
ranks. No check hangs.

  torchrun --nproc-per-node 2 -m minidp.doctor      a job
  python -m minidp.doctor                           this process alone
"""
EPILOG = """\
exit status: 0 if nothing failed (there may be warnings), 1 if something failed on
any rank (of the rank that prints the table, and 0 of the others),
2 for wrong arguments, 130 after Ctrl-C, which prints what was found until then.

In a script: minidp.doctor.check_model(model, batch), check_loader(loader), and
with minidp.doctor.watch(model, loader).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Set the description and epilog of ``parser``; add --json, --timeout, --wait."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the table")
    for name, default, text in (
        ("--timeout", 20.0, "limit of each check (default: %(default)g)"),
        ("--wait", 30.0, "limit of waiting for all ranks (default: %(default)g)"),
    ):
        add(name, type=positive_seconds, default=default, metavar="SECONDS", help=text)


def main(options: argparse.Namespace) -> int:
    """Run all checks; print the report on one rank; return the exit status.

    It is 1 if any finding failed, else 0; 0 on ranks that print nothing; 130 after
    Ctrl-C. SIGINT is `interrupt_once` from now on. If ``runner.is_stuck`` (Ctrl-C, a
    check that hung, an unusable group), end the process with that status by
    ``os._exit`` instead.
    """
    examination = Examination(os.environ, options.timeout, options.wait)
    code = 0
    signal.signal(signal.SIGINT, interrupt_once)
    try:
        report = examination.run()
    except KeyboardInterrupt:
        report, code = examination.interrupt(), 128 + signal.SIGINT
    if report is not None:
        print_report(report, as_json=options.json)
        code = code or report.exit_code
    if examination.runner.is_stuck:
        os._exit(code)
    return code


def interrupt_once(*_: object) -> NoReturn:
    """SIGINT handler: raise KeyboardInterrupt, and ignore any further Ctrl-C."""
    # Torchrun passes Ctrl-C on to ranks that have got it: it would end the report. Not
    # SIG_IGN: with that, Python prints a traceback for a second one that came by now.
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt


def print_report(report: Report, *, as_json: bool = False) -> None:
    """Print a report to stdout, as table or JSON, not mixed with other ranks'."""
    width = min(shutil.get_terminal_size().columns, 100)  # 80 without a terminal
    say(json.dumps(report.as_json(), indent=2) if as_json else report.table(width))


class Examination:
    """Run ``minidp doctor`` in this process, by `run`; the constructor checks nothing.

    ``seconds``: limit of each check; ``wait``: limit of waiting until all ranks came.
    """

    def __init__(self, env: Mapping[str, str], seconds: float, wait: float) -> None:
        self.runner = Runner(seconds)
        self._env = env
        self._wait = wait  # seconds until all ranks have come
        self._launch: environment.Launch | None = None
        self._meeting: Meeting | None = None  # once ranks have exchanged their facts
        self._store: Any = None  # once all ranks came, one process each
        self._present: tuple[int, ...] = ()  # ranks that joined in time
        self._has_own_gpus = False  # each rank has one
        self._is_over = False  # this rank communicates no more

    def run(self) -> Report | None:
        """Run all checks; return the report on the lowest rank that came, else None.

        Wait for other ranks within the limits. What a check raises becomes a finding.
        Each rank gets a report of its own if they cannot meet.
        """
        runner, is_reachable, launch = self.runner, self._alone(), self._launch
        if launch is None:
            return self._report()
        if is_reachable:
            wait = self._wait + runner.seconds
            runner.run("rendezvous", lambda: self._meet(launch), wait)
        if self._store is None:
            found = "left out: clocks, all-reduce, gradients"
            runner.add("communication", skipped(found))
        elif launch.world_size == 1:
            found = "one rank: no clocks to compare, nothing travels"
            runner.add("communication", skipped(found))
        else:
            self._communicate(launch)
        return self._report()

    def interrupt(self) -> Report | None:
        """Add a skipped finding "interrupted"; return the report or None, as `run`.

        Set ``runner.is_stuck``. If ranks have met, wait 10 s at most for the findings
        of the others.
        """
        found = f"Ctrl-C during: {self.runner.current}; what comes after is left out"
        self.runner.add("interrupted", skipped(found))
        self.runner.is_stuck = True
        if self._meeting is not None:
            self._meeting.seconds = INTERRUPTED_SECONDS
        return self._report()

    def _alone(self) -> bool:
        """Run checks of this machine; return whether the store's port can be used.

        Set `_launch`, if the launch's variables are right; else return False. A rank
        that does not open the port itself waits up to `_wait` s until the port answers.
        """
        env, runner, run = self._env, self.runner, self.runner.run
        run("environment", lambda: environment.judge_launch(env))
        status, is_reachable = runner.findings[-1].status, False
        here, several = 1, False
        if status in (Status.OK, Status.WARNING):
            self._launch = launch = environment.read_launch(env)
            here = launch.local_world_size or launch.world_size
            several = launch.has_several_hosts
            wait = self._wait  # until rank 0 listens
            if launch.world_size > 1:
                # The first DDP of a process needs it: some 800 modules, which may take
                # longer than ranks wait for each other later on.
                run("imports", partial(_import, "torch._dynamo"), wait + runner.seconds)
            check = partial(network.check_port, launch, wait)
            run("master port", check, wait + GRACE_SECONDS)
            is_reachable = runner.findings[-1].status is not Status.FAILED
        has_gpus = torch.cuda.is_available()
        run("variables", lambda: variables.judge_variables(env))
        if url := env.get("TORCHFT_LIGHTHOUSE"):
            check = partial(network.check_lighthouse, url)
            run("lighthouse", partial(check, runner.seconds))
        judge = network.judge_interfaces
        interfaces = partial(judge, env, several_hosts=several, has_gpus=has_gpus)
        run("interfaces", lambda: interfaces(*network.read_interfaces()))
        run("backends", lambda: collectives.judge_backends(has_gpus=has_gpus))
        run("gloo", _open_gloo)
        run("GPUs", lambda: environment.judge_gpus(env, here))
        run("threads", lambda: environment.judge_threads(here))
        run("shared memory", environment.judge_shared_memory)
        if status is Status.FAILED:
            runner.add("other ranks", skipped("left out: the environment is wrong"))
        if status is Status.SKIPPED:
            found = "none to compare with: clocks, versions, all-reduce, gradients"
            runner.add("other ranks", skipped(found, environment.TORCHRUN))
        return is_reachable

    def _meet(self, launch: environment.Launch) -> Iterator[Finding]:
        """Open the store; wait up to `_wait` s for ranks; yield findings on all facts.

        Rank 0 serves the store, unless torchrun's agent does. Set `_meeting`,
        `_present`, `_has_own_gpus`; `_store` only if all ranks came, with one
        WORLD_SIZE and one process per rank. Raise if the store cannot be reached.
        """
        store = _stores.TCPStore(
            launch.address,
            launch.port,
            is_master=launch.rank == 0 and not launch.is_agents,
            timeout=timedelta(seconds=self.runner.seconds),
            wait_for_workers=False,
        )
        run = self._env.get("TORCHELASTIC_RUN_ID", "")
        attempt = self._env.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = partial(_stores.PrefixStore, f"minidp/doctor/{run}/{attempt}")
        # Clone the connection: it serves one call at a time, and groups block in it.
        room = prefix(store.clone())
        meeting = Meeting(room, launch.rank, launch.world_size, self._wait)
        meeting.claim()
        facts = ranks.read_facts(self._env, launch.world_size, launch.local_rank)
        heard, absent = meeting.gather("facts", facts)
        meeting.seconds = self.runner.seconds + 2 * GRACE_SECONDS
        self._meeting, self._present = meeting, tuple(heard)
        came = [*ranks.judge_ranks(heard.values(), launch.rank, meeting.claim(0))]
        yield from named("ranks", came)
        for name, judge in ranks.COMPARED.items():
            yield from named(name, judge(heard))
        self._has_own_gpus = ranks.judge_owners(heard).status is Status.OK
        if absent:
            remedy = (
                "were all processes started, with the same MASTER_ADDR, MASTER_PORT "
                "and WORLD_SIZE? look at what those ranks printed; try --wait 120"
            )
            yield failed(absent, remedy)
        elif all(finding.status is Status.OK for finding in came):
            self._store = prefix(store)

    def _communicate(self, launch: environment.Launch) -> None:
        """Check clocks, buckets, all-reduces, gradients on Gloo; the last two on NCCL.

        Collective; opens a default process group, and destroys it at the end. NCCL only
        if every rank has a GPU of its own. After a check that raises or hangs (as it
        does if a rank is missing), leave out the rest, and leave the group open.
        """
        runner = self.runner
        timeout = timedelta(seconds=runner.seconds)
        groups: list[Any] = []

        def open_gloo() -> Finding:
            dist.init_process_group(
                "gloo",
                rank=launch.rank,
                world_size=launch.world_size,
                store=_stores.PrefixStore("group", self._store),
                timeout=timeout,
            )
            groups.append(dist.group.WORLD)
            return ok("all ranks are connected to each other")

        def open_nccl() -> Finding:
            groups.append(dist.new_group(backend="nccl", timeout=timeout))
            return ok("made")

        def check(name: str, function: Callable[..., Finding], *args: Any) -> None:
            self._together(name, lambda: function(groups[-1], *args))

        def measure(backend: str, device: torch.device) -> None:
            for size in collectives.SIZES:
                name = f"all-reduce, {backend}"
                check(name, collectives.check_all_reduce, device, size)
            check(f"gradients, {backend}", collectives.check_gradients, device)

        self._together("gloo group", open_gloo)
        check("clocks", collectives.check_clocks, CPU)
        check("shared buckets", collectives.check_shared_memory, CPU)
        measure("Gloo", CPU)
        if self._has_own_gpus and dist.is_nccl_available():
            # Without it a late collective would end the process, and leave no finding.
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
            self._together("NCCL group", open_nccl)
            index = ranks.index_of_gpu(launch.local_rank)
            measure("NCCL", torch.device(f"cuda:{index}"))
        if not self._is_over:
            runner.attempt(dist.destroy_process_group)

    def _together(self, name: str, check: Check) -> None:
        """Run a check that is collective, and add its findings; no-op if `_is_over`.

        If it raises or is late, set `_is_over` and ``runner.is_stuck``.
        """
        seconds = self.runner.seconds + GRACE_SECONDS
        if not self._is_over and not self.runner.run(name, check, seconds):
            self._is_over = self.runner.is_stuck = True

    def _report(self) -> Report | None:
        """Return all ranks' report on the lowest that came; others post theirs.

        Others return None. The lowest waits up to `_meeting.seconds` for their
        findings. Return this rank's own report if ranks have not met, or the store
        fails.
        """
        runner, meeting, launch = self.runner, self._meeting, self._launch
        place = "" if launch is None else f": rank {launch.rank}"
        size = 1 if launch is None else launch.world_size
        own = merge(f"minidp doctor{place}", {0: runner.findings}, size)
        if meeting is None:
            return own
        mine = [finding.as_json() for finding in runner.findings]
        if meeting.rank != self._present[0]:
            was_posted = runner.attempt(lambda: meeting.post("findings", mine))
            return None if was_posted else own
        hear = partial(meeting.gather, "findings", mine, self._present)
        answers = runner.attempt(hear, meeting.seconds)
        if not answers:
            return own
        heard, absent = answers[0]
        of_rank = {r: [*map(Finding.of_json, heard[r])] for r in heard}
        if absent:
            found = failed(absent, "look at what that rank printed")
            of_rank[meeting.rank] += named("answers", found)
        return merge(f"minidp doctor: {size} rank{'s' * (size != 1)}", of_rank, size)


def _import(name: str) -> list[Finding]:
    """Import a module; return [], as a check without findings does."""
    importlib.import_module(name)
    return []


def _open_gloo() -> Finding:
    """Check that Gloo works: run an all-reduce of one rank; return ok, or raise."""
    store, timeout = _stores.HashStore(), timedelta(seconds=5)
    group: Any = _stores.ProcessGroupGloo(store, 0, 1, timeout)
    group.allreduce([torch.ones(1)]).wait()
    return ok("opens its interface")
