"""Runs torch's own DDP tests against an implementation, and prints one line per test.

    python tests/conformance/run.py                        minidp, all but slow tests
    python tests/conformance/run.py test_ddp_create_graph  these tests only
    python tests/conformance/run.py --implementation torch --record

Exit status: 0 if exactly those tests fail that exceptions.txt lists, 1 if not, 2 if the
question was wrong. tests/README.md says more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# As a script, it finds its own folder on the path instead of the repository.
sys.path.insert(0, str(Path(__file__).parents[2]))
# Before torch is imported; see tests/conftest.py.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

from tests.conformance import records, suite
from tests.conformance.implementations import IMPLEMENTATIONS
from tests.conformance.judge import Judge
from tests.conformance.outcome import Outcome
from tests.conformance.records import Known
from tests.conformance.schedule import run_all


def main(arguments: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.record and options.implementation != "torch":
        parser.error("--record is for --implementation torch")
    start = time.monotonic()
    if options.record:
        status = _record(options)
    else:
        baseline = records.read_baseline()
        status = _check(options, baseline, _selected(parser, options, baseline))
    print(f"{time.monotonic() - start:.0f} s")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", metavar="TEST", help="default: all")
    parser.add_argument(
        "--implementation", choices=sorted(IMPLEMENTATIONS), default="minidp"
    )
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds for each test"
    )
    parser.add_argument("--slow", action="store_true", help="slow tests, too")
    parser.add_argument(
        "--details", action="store_true", help="tracebacks and output of failed tests"
    )
    parser.add_argument(
        "--record", action="store_true", help="write baseline.txt anew (torch only)"
    )
    return parser


def _selected(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    baseline: dict[str, Known],
) -> list[Known]:
    present = set(suite.all_names())
    for name in options.tests:
        if name not in present:
            parser.error(f"torch {torch.__version__} has no test {name!r}")
        if name not in baseline:
            parser.error(f"torch itself does not pass {name}: see {records.BASELINE}")
    if options.tests:
        return [baseline[name] for name in options.tests]
    selected = []
    for known in baseline.values():
        if known.name not in present:
            print(f"absent  {known.name}  left out: torch {torch.__version__}")
        elif known.is_slow and not options.slow:
            print(f"slow    {known.name}  {known.seconds:.0f} s  left out: --slow")
        else:
            selected.append(known)
    return selected


def _check(
    options: argparse.Namespace, baseline: dict[str, Known], selected: list[Known]
) -> int:
    exceptions = {} if options.implementation == "torch" else records.read_exceptions()
    judge = Judge(exceptions)
    outcomes = run_all(selected, options.implementation, options.timeout, options.jobs)
    for outcome in outcomes:
        print(judge.line(outcome), flush=True)
        if options.details and outcome.details:
            print(outcome.details)
    if (recorded := records.baseline_version()) != torch.__version__:
        print(f"baseline.txt is of torch {recorded}, this is {torch.__version__}")
    print(judge.summary(num_baseline=len(baseline)))
    return 0 if judge.is_satisfied else 1


def _record(options: argparse.Namespace) -> int:
    """Try every test on two ranks, and on four what two could not decide."""
    passed = []
    names = options.tests or suite.all_names()
    for num_ranks in (2, 4):
        tests = [
            Known(name, suite.fixed_num_ranks(name) or num_ranks, 0.0) for name in names
        ]
        names = []
        for outcome in run_all(tests, "torch", options.timeout, options.jobs):
            print(Judge({}).line(outcome), flush=True)
            if outcome.verdict == "ok":
                passed.append(outcome)
            elif _may_need_more_ranks(outcome):
                names.append(outcome.name)
    records.write_baseline(passed)
    print(f"{records.BASELINE.name}: {len(records.read_baseline())} tests")
    return 0


def _may_need_more_ranks(outcome: Outcome) -> bool:
    if suite.fixed_num_ranks(outcome.name) is not None:
        return False
    if outcome.verdict == "skipped":
        return not suite.why_skipped(outcome.name)
    return outcome.wraps_module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
