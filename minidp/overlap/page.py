"""Write recorded steps as one HTML page, to look at in a browser without a network.

The numbers of the report are computed here and put into the page as JSON; `page.js`
draws them. Only predictions are computed in the browser: `forecast.js`.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .advice import allows_hook, layers_of, straggler
from .analysis import (
    EXPOSED_VALUES,
    HIDDEN_VALUES,
    VALUES,
    Slice,
    StepOverlap,
    overlap_of,
    slices,
)
from .forecast import CAPS_MB, Analysis, Forecast, analyse
from .skew import Run, aligned
from .text import (
    PHASES,
    RARE,
    VALUES_HEAD,
    headline,
    network_lines,
    report,
    skew_rows,
    slowest_turn,
    spread_text,
    turn_rows,
    value_rows,
)
from .timeline import Step, Timeline

ROOM = 900_000  # how many characters of data fit into a page of less than 1 MB
GAP = -1  # stands in the place of a kind where nothing is drawn
KINDS = (
    *("local forward", "local backward", "forward", "backward", "optimizer step"),
    *("filling", "waited", "late (slower ranks)", "wire, hidden", "wire, exposed"),
    *("done, not copied out", HIDDEN_VALUES, EXPOSED_VALUES, "turn"),
)
TOTALS = ("seconds", "hidden_s", "late_s", *PHASES.values())


def html_page(timelines: Sequence[Timeline]) -> str:
    """Return an HTML page with the report, the steps of all ranks, and predictions.

    If the ranks recorded no step in common, the page has the text of the report, and
    nothing to draw.

    Raises:
        ValueError: The recordings are not of different ranks of one run.
    """
    run = aligned(timelines)
    found = analyse(run)
    text = report(timelines)
    answers = _sentences(found) if found else f"<p>{html.escape(text)}</p>"
    data = {"kinds": KINDS, "totals": TOTALS, "phases": list(PHASES), "rare": RARE}
    data |= _data(found) if found else {"steps": []}
    parts = {
        "/*forecast.js*/": _file("forecast.js"),
        "/*page.js*/": _file("page.js"),
        "<!--sentences-->": answers,
        "<!--report-->": html.escape(text),
        "<!--data-->": _json(data),  # the last one, so that nothing in it is replaced
    }
    whole = _file("page.html")
    for mark, part in parts.items():
        whole = whole.replace(mark, part, 1)
    return whole


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _sentences(found: Analysis) -> str:
    """Return the headline as HTML paragraphs, with what was recorded as the last one.

    The question before "?", or the word before ":", is emphasised.
    """
    where, *answers = headline(found)
    paragraphs = []
    for line in answers:
        text = re.sub(r"^([^?:]*[?:] )", r"<strong>\1</strong>", html.escape(line))
        paragraphs.append(f"<p>{text}</p>")
    about = html.escape(where.replace("\n", "; "))
    return "".join(paragraphs) + f'<p class="where">{about}</p>'


def _data(found: Analysis) -> dict[str, Any]:
    """Return what `page.js` draws: the typical step, and as many last ones as fit.

    How many fit is estimated by the size of the typical one.
    """
    run, shown = found.run, found.shown
    first = run.ranks[0]
    numbers = [steps[0].number for steps in run.common]
    typical = numbers.index(shown.typical.step.number)
    places = [timeline.where.rank for timeline in run.ranks]
    turns, values = turn_rows(found), value_rows(found)
    data = {
        "ranks": places,
        "shown": places.index(shown.rank),
        "clocks_known": run.error_s is not None,
        "layers": [layers_of(first, [i]) for i in range(len(first.params))],
        "nbytes": [param.nbytes for param in first.params],
        "members": first.layouts[run.common[typical][0].layout],
        "num_steps": shown.num_steps,
        "first_s": [
            {bucket.number: bucket.first_s for bucket in overlap.typical.buckets}
            for overlap in found.overlaps
        ],
        "spread": [spread_text(overlap.spread_s) for overlap in found.overlaps],
        "network": network_lines(found) if found.forecast else [],
        "skew": skew_rows(found.skew, found) if found.skew else None,
        "turns": [slowest_turn(found), turns] if turns else None,
        "values": [VALUES_HEAD, values] if values else None,
        "latest": straggler(found).advice or "No rank is late in three of four steps.",
        "model": _model(found.forecast, found) if found.forecast else None,
    }
    fit = max(1, (ROOM - len(_json(data))) // len(_json(_step(run, typical))))
    kept = list(range(len(numbers)))[-fit:]
    if typical not in kept:
        kept[0] = typical
    steps = [_step(run, number) for number in kept]
    return data | {"steps": steps, "typical": kept.index(typical)}


def _json(data: Any) -> str:
    # Names of layers may hold anything, and "<" could end the script element.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _step(run: Run, number: int) -> dict[str, Any]:
    """Return the step of all ranks that has an index in `Run.common`.

    Times are nanoseconds after the start on the earliest rank. A rank whose clock is
    unknown begins at its own 0.
    """
    steps = run.common[number]
    pairs = list(zip(steps, run.clocks, strict=True))
    known = [step.begin_ns for step, clock in pairs if clock is not None]
    ranks = []
    for timeline, (step, clock) in zip(run.ranks, pairs, strict=True):
        one = overlap_of(timeline, step, run.launches[step.number])
        ranks.append(_rank(one, step.begin_ns if clock is None else min(known)))
    return {"number": steps[0].number, "ranks": ranks}


def _rank(one: StepOverlap, origin: int) -> dict[str, Any]:
    step: Step = one.step
    drawn = [each for each in slices(one) if each.name in KINDS]
    values = [each for each in drawn if each.row == VALUES]
    phases = [e for e in drawn if isinstance(e.row, str) and e.row != VALUES]
    buckets = []
    for bucket in one.buckets:
        mine = [each for each in drawn if each.row == bucket.number]
        full, hidden = bucket.times.full_ns, round(bucket.hidden_s * 1e9)
        packed = _packed(mine, full)
        buckets.append([bucket.number, full - origin, hidden, *packed])
    return {
        "totals": [getattr(one, name) for name in TOTALS],
        "backward": [step.backward.begin_ns - origin, step.backward.end_ns - origin],
        "phases": _packed(phases, origin),
        "turns": [
            [turn.number, turn.begin_ns - origin, turn.end_ns - origin]
            for turn in step.turns
        ],
        "values": [
            [KINDS.index(v.name), v.bucket, v.begin_ns - origin, v.end_ns - origin]
            for v in values
        ],
        "buckets": buckets,
    }


def _packed(found: Iterable[Slice], at: int) -> list[int]:
    """Return slices as one flat list of kind, length, kind, length and so on.

    Lengths are nanoseconds, and kinds are indices in `KINDS`. A slice begins where the
    one before it ends, and the first one at ``at``. If it does not, a `GAP` comes
    before it, which may have a negative length.
    """
    numbers = []
    for each in found:
        if each.begin_ns != at:
            numbers += [GAP, each.begin_ns - at]
        numbers += [KINDS.index(each.name), each.end_ns - each.begin_ns]
        at = each.end_ns
    return numbers


def _model(forecast: Forecast, found: Analysis) -> dict[str, Any]:
    """Return the numbers from which `forecast.js` predicts."""
    return asdict(forecast) | {
        "balance_s": straggler(found).gain_s,
        "caps": CAPS_MB,
        "ranks": found.run.ranks[0].where.world_size,
        "allows_hook": allows_hook(found.run.ranks[0]),
        "shares_memory": found.run.ranks[0].where.no_shared_memory == "",
    }
