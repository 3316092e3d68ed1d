"""Run the checks of ``minidp doctor`` in order, each with a time limit.

The order is from what needs nobody else to what needs everything::

    alone          each rank looks at its environment, port, interfaces and machine
    meet           the ranks find each other through the store; missing ones are named
    compare        they compare versions, settings and GPUs, which they have told the
                   store
    communicate    they compare clocks, and check all-reduces and gradients, on groups
                   with a short timeout
    report         the lowest rank that came prints what all ranks have found

A rank whose collective check raises or hangs leaves out all checks that come after it.
The other ranks do so, too, as soon as one of their own checks lacks that rank.
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

from minidp import accelerator
from minidp.console import positive_seconds, say

from .checks import collectives, environment, network, ranks, variables
from .findings import Check, Finding, Report, Status, failed, merge, named, ok, skipped
from .meeting import Meeting
from .timebox import GRACE_SECONDS, Runner

_stores: Any = dist  # the type stubs do not export the stores
CPU = torch.device("cpu")
INTERRUPTED_SECONDS = 8.0  # how long a rank listens to the others after Ctrl-C

DESCRIPTION = """\
Finds out what is wrong with a machine or a job. On each rank it checks environment
variables, ports, network interfaces, backends, GPUs and shared memory. Under torchrun
it also compares the ranks' versions and clocks, and checks the sums and the bandwidth
of an all-reduce, and whether a probe model gets the same gradients on all ranks. No
check hangs.

  torchrun --nproc-per-node 2 -m minidp.doctor      a job
  python -m minidp.doctor                           this process alone
"""
EPILOG = """\
The exit status is 0 if nothing failed (there may be warnings), 1 if something failed
on any rank, 2 for wrong arguments, and 130 after Ctrl-C, which prints what was found
until then. Only the rank that prints the table exits with 1, the others with 0.

More checks are for your training script: minidp.doctor.check_model(model, batch),
minidp.doctor.check_loader(loader), and `with minidp.doctor.watch(model, loader):`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of ``minidp doctor``."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the table")
    for name, default, text in (
        ("--timeout", 20.0, "how long each check may take (default: %(default)g)"),
        ("--wait", 30.0, "how long to wait for all ranks (default: %(default)g)"),
    ):
        add(name, type=positive_seconds, default=default, metavar="SECONDS", help=text)


def main(options: argparse.Namespace) -> int:
    """Run all checks, print the report on one rank, and return the exit status.

    The handler of SIGINT is `interrupt_once` from now on. If a check was left behind in
    a thread that does not end, this ends the process itself.
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
    """Raise KeyboardInterrupt for a SIGINT, and ignore any further Ctrl-C."""
    # Torchrun passes Ctrl-C on to ranks that have got it already, and the second one
    # would end the report. SIG_IGN does not help: if a second one has come by now,
    # Python prints a traceback for it.
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt


def print_report(report: Report, *, as_json: bool = False) -> None:
    """Print a report, as a table or as JSON, in one piece."""
    width = min(shutil.get_terminal_size().columns, 100)  # 80 without a terminal
    say(json.dumps(report.as_json(), indent=2) if as_json else report.table(width))


class Examination:
    """Run ``minidp doctor`` in this process, by `run`.

    A check may take ``seconds``, and the ranks have to come within ``wait`` seconds.
    """

    def __init__(self, env: Mapping[str, str], seconds: float, wait: float) -> None:
        self.runner = Runner(seconds)
        self._env = env
        self._wait = wait
        self._launch: environment.Launch | None = None
        # Set once ranks have exchanged their facts.
        self._meeting: Meeting | None = None
        self._store: Any = None  # set once all ranks have come, one process each
        self._present: tuple[int, ...] = ()  # ranks that came in time
        self._has_own_gpus = False  # whether each rank has a GPU
        self._is_over = False  # whether this rank communicates no more

    def run(self) -> Report | None:
        """Run all checks, and return the report on the lowest rank that came.

        On the other ranks the result is None.

        If the ranks cannot meet, each of them gets a report of its own.
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
        """Return the report of what was found until now, or None, as `run` does."""
        found = f"Ctrl-C during: {self.runner.current}; what comes after is left out"
        self.runner.add("interrupted", skipped(found))
        self.runner.is_stuck = True
        if self._meeting is not None:
            self._meeting.seconds = INTERRUPTED_SECONDS
        return self._report()

    def _alone(self) -> bool:
        """Run the checks of this machine, and return whether the store's port works.

        If the variables of the launch are right, `_launch` is set.
        """
        env, runner, run = self._env, self.runner, self.runner.run
        run("environment", lambda: environment.judge_launch(env))
        status, is_reachable = runner.findings[-1].status, False
        here, several = 1, False
        if status in (Status.OK, Status.WARNING):
            self._launch = launch = environment.read_launch(env)
            here = launch.local_world_size or launch.world_size
            several = launch.has_several_hosts
            wait = self._wait  # how long rank 0 may take until it listens
            if launch.world_size > 1:
                # The first DDP of a process imports this, with some 800 modules. That
                # may take longer than the ranks wait for each other later on.
                run("imports", partial(_import, "torch._dynamo"), wait + runner.seconds)
            check = partial(network.check_port, launch, wait)
            run("master port", check, wait + GRACE_SECONDS)
            is_reachable = runner.findings[-1].status is not Status.FAILED
        needed = collectives.needed_backend()
        run("variables", lambda: variables.judge_variables(env))
        if url := env.get("TORCHFT_LIGHTHOUSE"):
            check = partial(network.check_lighthouse, url)
            run("lighthouse", partial(check, runner.seconds))
        interfaces = partial(
            network.judge_interfaces,
            env,
            several_hosts=several,
            uses_nccl=needed == "nccl",
        )
        run("interfaces", lambda: interfaces(*network.read_interfaces()))
        run("backends", lambda: collectives.judge_backends(needed))
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
        """Open the store, wait for the ranks, and compare the facts of those that came.

        Afterwards `_meeting`, `_present` and `_has_own_gpus` are set. `_store` is set
        only if all ranks came, with the same WORLD_SIZE and one process per rank.
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
        # A connection serves one call at a time, and groups block in it. So the meeting
        # gets one of its own.
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
                "and WORLD_SIZE? look at what those ranks printed, or try --wait 120"
            )
            yield failed(absent, remedy)
        elif all(finding.status is Status.OK for finding in came):
            self._store = prefix(store)

    def _communicate(self, launch: environment.Launch) -> None:
        """Run the checks that are collectives: on Gloo, and on that of the devices.

        They run on a default process group, which is destroyed at the end. After a
        check that raises or hangs, as it does if a rank is missing, the rest is left
        out, and the group stays.
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

        def open_own() -> Finding:
            groups.append(dist.new_group(backend=own, timeout=timeout))
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
        own = collectives.needed_backend()
        if self._has_own_gpus and own and dist.is_backend_available(own):
            name = own.upper()
            # Without this a late collective would end the process, and leave no
            # finding.
            os.environ[f"TORCH_{name}_BLOCKING_WAIT"] = "1"
            self._together(f"{name} group", open_own)
            index = ranks.index_of_gpu(launch.local_rank)
            measure(name, accelerator.device(index or 0))
        if not self._is_over:
            runner.attempt(dist.destroy_process_group)

    def _together(self, name: str, check: Check) -> None:
        """Run a check that is a collective, unless an earlier one has failed."""
        seconds = self.runner.seconds + GRACE_SECONDS
        if not self._is_over and not self.runner.run(name, check, seconds):
            self._is_over = self.runner.is_stuck = True

    def _report(self) -> Report | None:
        """Return the report of all ranks on the lowest one that came, None on others.

        The others post their findings, and the lowest one waits for them. If the ranks
        have not met, or the store fails, the report is of this rank alone.
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
    importlib.import_module(name)
    return []


def _open_gloo() -> Finding:
    """Check that Gloo works here by an all-reduce of one rank, and raise if not."""
    store, timeout = _stores.HashStore(), timedelta(seconds=5)
    group: Any = _stores.ProcessGroupGloo(store, 0, 1, timeout)
    group.allreduce([torch.ones(1, device="cpu")]).wait()
    return ok("opens its interface")
