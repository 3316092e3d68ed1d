"""What one forked process does: be one rank of one of torch's tests."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from minidp._watchdog import watchdog
from tests.conformance import implementations, placement, suite


@dataclass(frozen=True)
class Setup:
    """One test, the same for all of its ranks."""

    name: str
    implementation: str
    num_ranks: int
    timeout: float  # seconds, for the whole test
    folder: Path  # of this test alone: rendezvous, torch's barrier, logs

    def log(self, rank: int) -> Path:
        """What a rank prints."""
        return self.folder / f"rank{rank}.log"

    @property
    def reached(self) -> Path:
        """Exists afterwards if the test wrapped a module."""
        return self.folder / "reached"


def be_rank(setup: Setup, rank: int, errors: Connection) -> None:
    """Run the test and exit with the code that torch's harness chose."""
    _redirect_output(setup.log(rank))
    # The parent asks ranks that take too long where they are, and kills them. Should
    # there be no parent any more, they end by themselves.
    faulthandler.register(signal.SIGUSR1)
    faulthandler.dump_traceback_later(setup.timeout + 10, exit=True)
    code = 1
    try:
        _set_environment(setup, rank)
        placement.place_on_cpu()
        implementations.bind(setup.implementation, at_instance=setup.reached.touch)
        case = suite.case_of(setup.name)
        case._run(rank, setup.name, str(setup.folder / "rendezvous"), errors)
        code = 0  # torch's main tests leave by sys.exit() instead
    except SystemExit as request:
        code = request.code
    except BaseException:  # torch's harness sends those of the test itself
        errors.send(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: process groups whose peers are gone may hang in it. But
    # the watchdog must not be cut off while it writes to the rendezvous file: half a
    # record there makes the other rank wait for the other half, for ever.
    watchdog._leave_with_the_process()
    os._exit(code)


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # a killed rank flushes nothing


def _set_environment(setup: Setup, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = str(setup.num_ranks)
    os.environ["TEMP_DIR"] = str(setup.folder)
