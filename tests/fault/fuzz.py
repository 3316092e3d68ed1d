"""Fuzz the constructor and comm hooks as long as you like.

    python -m tests.fault.fuzz --inputs 10000 --hooks 5000

Prints how many calls ended in what; the first that breaks a law is shrunk and raised.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from tests.fault import bad_hooks, bad_inputs
from tests.support.alone import lone_default_group


def fuzz(
    what: Callable[[Any], str],
    cases: st.SearchStrategy[Any],
    settings: hypothesis.settings,
) -> Counter[str]:
    """Count the outcomes of ``what`` on many cases."""
    outcomes: Counter[str] = Counter()

    @settings
    @hypothesis.given(cases)
    def run(case: Any) -> None:
        outcomes[what(case)] += 1

    gc.collect()
    gc.freeze()  # a collection then costs microseconds, not the walk over all of torch
    try:
        run()
    finally:
        gc.unfreeze()
    return outcomes


def _settings(count: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def _report(name: str, outcomes: Counter[str], seconds: float) -> None:
    lines = [f"{name}: {outcomes.total()} in {seconds:.0f} s"]
    lines += [f"    {count:6d}  {what}" for what, count in outcomes.most_common()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--hooks", type=int, default=5_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with lone_default_group():
        for name, what, cases, count in (
            ("constructor", bad_inputs.try_call, bad_inputs.calls, arguments.inputs),
            ("comm hooks", bad_hooks.try_hook, bad_hooks.cases, arguments.hooks),
        ):
            if count:
                begin = time.monotonic()
                outcomes = fuzz(what, cases, _settings(count))
                _report(name, outcomes, time.monotonic() - begin)


if __name__ == "__main__":
    main()
