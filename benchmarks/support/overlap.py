"""The table of exposed communication, of overlap.py and bucket_sweep.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.table import Table

from support.baselines import BARE, TORCH, TORCH_AGAIN
from support.estimates import short
from support.report import table
from support.rounds import MIB, STEP_COLUMNS, Measured


def overlap_table(measured: Measured) -> Table:
    """Make the table; without a link it has no bounds."""
    columns = [*STEP_COLUMNS, "step /\ntorch (95%)", "exposed,\nms", "CPU,\nms"]
    low, high = noise(measured)
    facts = f"{measured.facts}\ntorch again / torch, p10-p90: {low:.3f}-{high:.3f}"
    if measured.bounds:
        columns += ["bound,\nms", "step /\nbound"]
        shortest = min(
            float((measured.times[name] / bounds).min())
            for name, bounds in measured.bounds.items()
        )
        facts += f"; shortest step over its bound: {shortest:.3f}"
    columns += ["buckets,\nMiB", "#wrong"]
    return table(measured.title, facts, columns, _rows(measured))


def noise(measured: Measured) -> tuple[float, float]:
    """Return torch over itself in one round: the 10th and 90th percentile."""
    times = measured.times
    low, high = np.percentile(times[TORCH_AGAIN] / times[TORCH], [10, 90])
    return float(low), float(high)


def _rows(measured: Measured) -> Iterator[list[str]]:
    times = measured.times
    for name in times:
        exposed = 1e3 * float(np.median(times[name] - times[BARE]))
        row = [*measured.step_cells(name), str(measured.ratio(name, TORCH))]
        row.append("-" if name == BARE else short(exposed))
        row.append(short(1e3 * float(np.median(measured.cpu[name]))))
        if measured.bounds:
            over = measured.over_bound(name)
            bound = measured.bounds.get(name)
            row.append("-" if bound is None else short(1e3 * float(np.median(bound))))
            row.append("-" if over is None else f"{over.value:.3f}")
        yield [*row, _layout(measured.buckets.get(name)), measured.wrong_cell(name)]


def _layout(buckets: list[int] | None) -> str:
    """Format the number of buckets, the smallest and the largest."""
    if not buckets:
        return "-"
    ends = dict.fromkeys(f"{nbytes / MIB:.2g}" for nbytes in sorted(buckets))
    first, *_, last = [*ends, *ends]
    return f"{len(buckets)} of {first if first == last else f'{first}-{last}'}"
