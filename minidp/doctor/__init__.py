"""``minidp doctor``: what is wrong with this machine, this job, this training script?

Two ways in. As a command, for the machine and the job::

    torchrun --nproc-per-node 2 -m minidp.doctor

In a script, two lines for the model, the loader, and what is seen while it trains::

    from minidp import doctor
    doctor.check_model(model, batch)

    doctor.check_loader(loader)

    with doctor.watch(model, loader) as watched:
        train_two_epochs()

Nothing that a check meets raises, and nothing waits for ever: both are findings. From
the command down to what a finding is::

    __main__              python -m minidp.doctor
    _examination          the command's checks, one after the other
    _trials               those for which ranks communicate
    _checks_training      what only shows while a script trains
    _training_log         ... written down; nothing stays patched
    _checks_model         devices, replicas, batch norm, unused parameters
    _checks_loader        does every rank get its own part of the data?
    _random_streams       do ranks draw the same numbers?
    _consultation         checks inside a script: facts compared between ranks
    _checks_collectives   all-reduce and gradients: right, and how fast?
    _checks_ranks         facts of ranks: versions, GPUs, clocks
    _checks_network       ports and interfaces
    _checks_environment   how a process was started; its machine
    _variables            environment variables, and what each one does
    _timebox              a check that cannot hang
    _meeting              ranks tell each other facts, without a collective
    _findings             what a check says; the table, the JSON
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from minidp._console import say

from ._checks_loader import examine_loader
from ._checks_model import examine_model
from ._checks_training import Watched, examine_training
from ._consultation import group_of
from ._examination import Examination
from ._findings import Finding, Report, Status
from ._timebox import Limits
from ._training_log import TrainingLog

__all__ = [
    "Finding",
    "Report",
    "Status",
    "Watched",
    "add_arguments",
    "check_loader",
    "check_model",
    "main",
    "watch",
]
WAIT_SECONDS = 10.0  # for other ranks, in a script
INTERRUPTED = 128 + signal.SIGINT  # exit status, as shells have it

DESCRIPTION = """\
Checks the machine and the job: environment variables, ports, network
interfaces, backends, GPUs, shared memory; under torchrun also versions, clocks,
all-reduce (numbers and bandwidth), and whether a probe model gets the same
gradients on all ranks. No check hangs.

  torchrun --nproc-per-node 2 -m minidp.doctor      a job
  python -m minidp.doctor                           this process alone
"""
EPILOG = """\
exit status: 0 if nothing failed (there may be warnings), 1 if something failed,
2 for wrong arguments, 130 after Ctrl-C, which prints what was found until then.

For a model, a loader and a training loop there are two lines for your script:
from minidp import doctor, then doctor.check_model(model, batch),
doctor.check_loader(loader), or: with doctor.watch(model, loader).
"""


def check_model(
    model: nn.Module,
    batch: Any = None,
    *,
    process_group: Any = None,
    seconds: float = WAIT_SECONDS,
    quiet: bool = False,
) -> Report:
    """Check a model: devices, replicas, batch norm, unused parameters, seeds.

    Batch norm is a warning where it sees fewer than 16 samples per rank.

    All ranks call it, before wrapping, after it, or both; rank 0 prints the table. One
    forward runs under ``torch.enable_grad()`` on the bare module; gradients, module
    buffers and random streams are left as they are.

    Args:
        model: a module, wrapped (by minidp or torch), attached or not.
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict
            of keyword arguments. None: checks that need one are skipped.
        process_group: the ranks; None: those of a wrapped model, or all.
        seconds: how long to wait for ranks that do not call it.
        quiet: do not print.

    Returns:
        The findings of all ranks, on every rank. What a check meets never raises.
    """
    group = group_of(model, process_group)
    return _shown(examine_model(model, batch, group, seconds), group, quiet=quiet)


def check_loader(
    loader: Any,
    *,
    process_group: Any = None,
    seconds: float = WAIT_SECONDS,
    quiet: bool = False,
) -> Report:
    """Check a loader: does every rank get its own part, and equally many batches?

    All ranks call it; rank 0 prints the table. No sample is read.

    Args:
        loader: a ``torch.utils.data.DataLoader``, or what looks like one.
        process_group: the ranks; None: those of a wrapped model, or all.
        seconds: how long to wait for ranks that do not call it.
        quiet: do not print.

    Returns:
        The findings of all ranks, on every rank. What a check meets never raises.
    """
    group = group_of(None, process_group)
    return _shown(examine_loader(loader, group, seconds), group, quiet=quiet)


@contextmanager
def watch(
    model: nn.Module,
    loader: Any = None,
    *,
    process_group: Any = None,
    seconds: float = WAIT_SECONDS,
    quiet: bool = False,
) -> Iterator[Watched]:
    """Watch some training, best two short epochs: what only shows while it runs.

    Whether ``set_epoch`` is called, ranks are fed the same batches, optimizers step
    with different gradients, accumulation goes without ``no_sync``,
    ``find_unused_parameters`` is set without need, and several ranks save or print.
    All ranks do it; rank 0 prints the table when the block ends. While it runs, hooks
    sit on the model, ``print`` and ``torch.save`` are replaced, and the sampler is of a
    subclass; afterwards nothing is. If the block raises, nothing is exchanged.

    Args:
        model: a wrapped module, or one that `minidp.attach` was called with.
        loader: the loader of the training data; None: ``set_epoch`` is not looked at.
        process_group: the ranks; None: those of a wrapped model, or all.
        seconds: how long to wait for other ranks at the end.
        quiet: do not print.

    Yields:
        What holds the report once the block has ended.

    Raises:
        Whatever stops it from noting anything, e.g. a loader that does not allow it;
        what a check meets later never raises.
    """
    watched = Watched()
    log = TrainingLog(model, loader)
    log.start()
    try:
        yield watched
    finally:
        log.stop()
    group = group_of(model, process_group)
    report = examine_training(log, loader, group, seconds)
    watched.report = _shown(report, group, quiet=quiet)


def _shown(report: Report, group: Any, *, quiet: bool) -> Report:
    if not quiet and (group is None or group.rank() == 0):
        _print(report)
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command to ``parser``: its text and its options."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of the table"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=Limits.check,
        metavar="SECONDS",
        help="how long each check may take (default: %(default)g)",
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=Limits.wait,
        metavar="SECONDS",
        help="how long to wait for ranks that have not come (default: %(default)g)",
    )


def main(options: argparse.Namespace) -> int:
    """Run the command; rank 0 prints for all ranks. Returns the exit status.

    If a check could not be ended, the process ends here: a thread that waits inside a
    backend would keep a normal exit waiting.
    """
    examination = Examination(os.environ, Limits(options.timeout, options.wait))
    runner = examination.runner
    try:
        report = examination.run()
    except KeyboardInterrupt:
        # Ctrl-C reaches every rank, and torchrun passes it on to each once more.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        report = examination.interrupt()
    own = Report("", tuple(runner.findings))  # where another rank prints
    code = own.exit_code if report is None else report.exit_code
    code = INTERRUPTED if examination.is_interrupted else code
    if report is not None:
        _print(report, as_json=options.json)
        examination.tell_printed()
    elif code and not examination.is_interrupted:
        examination.wait_until_printed()
    if runner.is_stuck:
        os._exit(code)
    return code


def _print(report: Report, *, as_json: bool = False) -> None:
    if as_json:
        text = json.dumps(report.as_json(), indent=2)
    else:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        colour = is_terminal and "NO_COLOR" not in os.environ
        width = shutil.get_terminal_size().columns  # 80 where there is no terminal
        text = report.table(width=min(width, 100), colour=colour)
    say(text)  # in one piece: other ranks print to the same terminal


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number of seconds, not {text}")
    return value
