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
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

# As a script, it finds its own folder on the path instead of the repository.
sys.path.insert(0, str(Path(__file__).parents[2]))
# Before torch is imported; see tests/conftest.py.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

from tests.conformance import cases, lists
from tests.conformance.lists import Known, Outcome
from tests.conformance.trial import run_all


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, implementations = parser.add_argument, sorted(cases.IMPLEMENTATIONS)
    add("tests", nargs="*", metavar="TEST", help="default: all")
    add("--implementation", choices=implementations, default="minidp")
    add("--jobs", type=int, default=2, help="tests at a time")
    add("--timeout", type=float, default=120.0, help="seconds for each test")
    add("--slow", action="store_true", help="slow tests, too")
    add("--details", action="store_true", help="show why every test failed")
    add("--record", action="store_true", help="write this torch's baseline anew")
    options = parser.parse_args(arguments)
    if options.record and options.implementation != "torch":
        parser.error("--record is for --implementation torch")
    start = time.monotonic()
    status = _record(options) if options.record else _check(parser, options)
    print(f"{time.monotonic() - start:.0f} s")
    return status


def _selected(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    baseline: dict[str, Known],
) -> list[Known]:
    for name in options.tests:
        if name not in cases.CASE_OF:
            parser.error(f"torch {torch.__version__} has no test {name!r}")
        if name not in baseline:
            parser.error(f"torch itself does not pass {name}: see {lists.BASELINE}")
    if options.tests:
        return [baseline[name] for name in options.tests]
    selected = []
    for known in baseline.values():
        if known.name not in cases.CASE_OF:
            print(f"absent  {known.name}  left out: torch {torch.__version__}")
        elif known.is_slow and not options.slow:
            print(f"slow    {known.name}  {known.seconds:.0f} s  left out: --slow")
        else:
            selected.append(known)
    return selected


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    baseline = lists.read_baseline()
    selected = _selected(parser, options, baseline)
    exceptions = {} if options.implementation == "torch" else lists.read_exceptions()
    outcomes = run_all(selected, options.implementation, options.timeout, options.jobs)
    counts: Counter[str] = Counter()
    unexpected = []
    for number, outcome in enumerate(outcomes, 1):
        progress = f"[{number}/{len(selected)}]"
        verdict = _print(outcome, exceptions, progress)
        counts[verdict] += 1
        if options.details and outcome.details:
            print(outcome.details)
        elif verdict == "FAILED":
            unexpected.append(outcome)
    # Last, because logs of continuous integration are often cut at their beginning.
    for outcome in unexpected:
        print(f"\n{outcome.name} failed:\n{outcome.details}")
    if (recorded := lists.baseline_version()) != torch.__version__:
        print(f"{lists.BASELINE.name}: torch {recorded}; this is {torch.__version__}")
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(f"{found} (torch itself: {len(baseline)} ok)")
    return 0 if counts and counts.keys() <= {"ok", "differs"} else 1


def _print(outcome: Outcome, exceptions: Mapping[str, str], progress: str) -> str:
    """Print a line about a test; return its verdict."""
    verdict, reason = lists.judge(outcome, exceptions)
    line = f"{verdict:8}{outcome.name}  {outcome.seconds:.1f} s  {reason[:160]}"
    print(f"{line.rstrip()}  {progress}", flush=True)
    return verdict


def _record(options: argparse.Namespace) -> int:
    """Try every test on two ranks, and on four what two could not decide."""
    passed = []
    names = options.tests or list(cases.CASE_OF)
    for count in (2, 4):
        tests = [Known(n, cases.fixed_num_ranks(n) or count, 0.0) for n in names]
        names = []
        all_of_them = run_all(tests, "torch", options.timeout, options.jobs)
        for number, outcome in enumerate(all_of_them, 1):
            _print(outcome, {}, f"[{number}/{len(tests)}]")
            if outcome.verdict == "ok":
                passed.append(outcome)
            elif _may_need_more_ranks(outcome):
                names.append(outcome.name)
    lists.write_baseline(passed)
    print(f"{lists.OWN_BASELINE.name}: {sum(o.wraps_module for o in passed)} tests")
    return 0


def _may_need_more_ranks(outcome: Outcome) -> bool:
    if cases.fixed_num_ranks(outcome.name) is not None:
        return False
    if outcome.verdict == "skipped":
        return not cases.why_skipped(outcome.name)
    return outcome.wraps_module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
