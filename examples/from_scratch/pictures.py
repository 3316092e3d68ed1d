"""Draw recordings, a picture for each, all on one scale of time.

    python examples/from_scratch/pictures.py stage1_after_backward.json stage2_...json

NAME.json becomes NAME.svg: the typical step of the rank that waits most, as in `minidp
report`. The first row is what the processor does, each other row is a message.
`record_all.sh` makes the recordings.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from minidp.overlap import aligned, from_json
from minidp.overlap.analysis import StepOverlap, most_exposed, overlaps_of, slices

WIDTH, LEFT, RIGHT = 800, 90, 16
TOP, ROW, MESSAGES = 34, 20, 130  # heights: title, processor, all messages together
COLOURS = {
    "forward": "#8fb3d9",
    "local forward": "#8fb3d9",
    "backward": "#aab4be",
    "local backward": "#aab4be",
    "optimizer step": "#5c6770",
    "waited": "#f7e6c4",
    "late (slower ranks)": "#b79bd6",
    "wire, hidden": "#2a9d8f",
    "wire, exposed": "#d1495b",
}
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "optimizer step": "optimizer",
    "waited": "message ready, waits",
    "late (slower ranks)": "other rank is late",
    "wire, hidden": "travels, hidden",
    "wire, exposed": "travels, exposed",
}


def typical(path: Path) -> StepOverlap:
    """Return the step that the report shows."""
    run = aligned(from_json(path.read_text(), str(path)))
    return most_exposed(overlaps_of(run)).typical


def picture(title: str, one: StepOverlap, longest_s: float) -> Iterator[str]:
    """Yield the lines of an SVG file; ``longest_s`` is the time across its width."""
    bottom = TOP + ROW + MESSAGES
    scale = (WIDTH - LEFT - RIGHT) / (longest_s * 1e3)  # pixels per ms

    def x(ns: float) -> float:
        return LEFT + (ns - one.step.begin_ns) / 1e6 * scale

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 62}" '
        'font-family="sans-serif" font-size="12" fill="#222">'
    )
    yield f'<rect width="{WIDTH}" height="{bottom + 62}" rx="6" fill="#fff"/>'
    words = (
        f"a step of {one.seconds * 1e3:.1f} ms; of the communication "
        f"{one.hidden_s * 1e3:.1f} ms are hidden, {one.exposed_s * 1e3:.1f} ms exposed"
    )
    bold = f'<tspan font-weight="bold">{title}</tspan>'
    yield f'<text x="10" y="20">{bold} {words}</text>'
    yield from axis(bottom + 8, longest_s * 1e3, scale)
    pitch = MESSAGES / len(one.buckets)
    for each in slices(one):
        top, height = float(TOP), ROW - 6.0
        if isinstance(each.row, int):
            top, height = TOP + ROW + each.row * pitch, 0.88 * pitch
        if each.name in COLOURS:
            begin, end = x(each.begin_ns), x(each.end_ns)
            place = f'x="{begin:.1f}" y="{top:.1f}" width="{end - begin:.1f}"'
            colour = COLOURS[each.name]
            yield f'<rect {place} height="{height:.1f}" fill="{colour}"/>'
    end = x(one.step.backward.end_ns)
    path = f"M{end:.1f} {TOP - 4}V{bottom + 4}"
    yield f'<path d="{path}" stroke="#444" stroke-dasharray="4 3"/>'
    yield f'<text x="10" y="{TOP + 11}">processor</text>'
    count = f"{len(one.buckets)} messages"
    yield f'<text x="10" y="{bottom - MESSAGES // 2}">{count}</text>'
    yield from legend(bottom + 50)
    yield "</svg>"


def axis(y: float, longest_ms: float, scale: float) -> Iterator[str]:
    """Yield a scale of milliseconds."""
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * 10 > longest_ms)
    for ms in range(0, int(longest_ms) + 1, step):
        at = LEFT + ms * scale
        yield f'<path d="M{at:.1f} {TOP - 4}V{y}" stroke="#eee"/>'
        yield f'<text x="{at:.1f}" y="{y + 12}" text-anchor="middle">{ms} ms</text>'


def legend(y: float) -> Iterator[str]:
    """Yield coloured squares and what they mean."""
    at = 10.0
    for name, text in LEGEND.items():
        square = f'x="{at:.0f}" y="{y - 10}" width="11" height="11"'
        yield f'<rect {square} fill="{COLOURS[name]}"/>'
        yield f'<text x="{at + 15:.0f}" y="{y}">{text}</text>'
        at += 26 + 6.6 * len(text)


def main() -> None:
    """Draw all."""
    paths = [Path(name) for name in sys.argv[1:]]
    steps = [typical(path) for path in paths]
    longest = max(one.seconds for one in steps)
    for path, one in zip(paths, steps, strict=True):
        title = path.stem.replace("_", " ").replace("stage", "stage ") + ":"
        lines = picture(title, one, longest)
        path.with_suffix(".svg").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
