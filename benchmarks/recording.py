"""What do minidp.record and minidp.watch_speed cost? Time steps with and without them.

    python benchmarks/recording.py                        # 3 minutes
    python benchmarks/recording.py --smoke                # does it run? no numbers

Wrappers with the recorder off, off again (the noise of the machine), on, and off after
it was on take their steps in turn, in the same processes. Ratios are paired by round
(see the --help of overhead.py). CPU is of all threads of a rank, the mean over ranks.

Targets: a step with the recorder on takes at most 1.01 times a step without; a step
that watch_speed watches, and one after the recorder was on, at most 1.005 times. These
lie within the noise of two shared cores.
"""

from __future__ import annotations

import sys

from support.baselines import ours
from support.report import Verdict, command_line, native_word
from support.variants import compare
from torch import nn

import minidp

MODELS = ("small", "mlp", "transformer")
OFF, AGAIN, ON, AFTER = "off", "off again", "on", "off, was on"
WATCHED = "watch_speed"
LIMITS = {ON: 1.01, AFTER: 1.005, WATCHED: 1.005}  # of a step without
OPEN: list[minidp.Recording] = []  # until the process ends


def recorded(module: nn.Module) -> nn.Module:
    """Wrap a module, and record it until the process ends."""
    model = ours()(module)
    OPEN.append(minidp.record(model).__enter__())
    return model


def was_recorded(module: nn.Module) -> nn.Module:
    """Wrap a module whose recorder was on, and is off again."""
    model = ours()(module)
    with minidp.record(model):
        pass
    return model


def watched(module: nn.Module) -> nn.Module:
    """Wrap a module, and watch its speed until the process ends."""
    model = ours()(module)
    minidp.watch_speed(model)
    return model


WRAPS = {OFF: ours(), AGAIN: ours(), ON: recorded, AFTER: was_recorded}
WRAPS[WATCHED] = watched


def main() -> int:
    """Measure and report. Return 1 if a gradient was wrong."""
    args = command_line(__doc__, seconds=25).parse_args()
    report, found = compare(args, "What recording costs", MODELS, WRAPS)
    for measured in found:
        report.judge(
            Verdict(f"{measured.title}: {name}", measured.ratio(name, OFF), limit)
            for name, limit in LIMITS.items()
        )
    content = {"results": [each.as_json() for each in found]}
    return report.finish(f"recording_cpu_{native_word()}", content)


if __name__ == "__main__":
    sys.exit(main())
