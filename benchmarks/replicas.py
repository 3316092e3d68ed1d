"""What does check_replicas_every cost? Compare the replicas never, and in every step.

    python benchmarks/replicas.py                        # 6 minutes
    python benchmarks/replicas.py --smoke                # does it run? no numbers

Wrappers that compare their replicas never, never again (the noise of the machine), by
default, and in every step take their steps in turn, in the same processes. Ratios are
paired by round (see the --help of overhead.py).

The default compares in steps 0, 1, 100 and then every 1000 steps. So it adds three
times the price of one check to a thousand steps. Target: at most 0.2% of their time.
"""

from __future__ import annotations

import sys

from support.baselines import ours
from support.estimates import Estimate
from support.report import Verdict, command_line, native_word
from support.variants import compare

from minidp.replica.drift import AUTO_EVERY, AUTO_STEPS

MODELS = ("tiny", "small", "transformer", "mlp", "resnet50", "gpt2")
NEVER, AGAIN, AUTO, EACH = "never", "never again", "auto (the default)", "every step"
WRAPS = {
    NEVER: ours(check_replicas_every=0),
    AGAIN: ours(check_replicas_every=0),
    AUTO: ours(),
    EACH: ours(check_replicas_every=1),
}
LIMIT = 0.002  # of a run of a thousand steps


def added(each: Estimate) -> Estimate:
    """Compute what the default adds to a run, from what a check adds to each step."""
    checks = len([step for step in AUTO_STEPS if step < AUTO_EVERY])
    share = checks / AUTO_EVERY
    return Estimate(
        (each.value - 1) * share, (each.low - 1) * share, (each.high - 1) * share
    )


def main() -> int:
    """Measure and report. Return 1 if a gradient was wrong."""
    args = command_line(__doc__, seconds=20).parse_args()
    report, found = compare(args, "What comparing the replicas costs", MODELS, WRAPS)
    for measured in found:
        share = added(measured.ratio(EACH, NEVER))
        what = f"{measured.title}: what the default adds to the first thousand steps"
        report.judge([Verdict(what, share, LIMIT)])
    content = {"results": [each.as_json() for each in found]}
    return report.finish(f"replicas_cpu_{native_word()}", content)


if __name__ == "__main__":
    sys.exit(main())
