"""Convert a bucket layout to a dict for a checkpoint or JSON, and back.

    {"format": 1, "rebuilt": True, "buckets": [["head.bias", "head.weight"], ...],
     "elements": [[10, 640], ...]}

At three and more ranks the last bits of a sum depend on a gradient's place in its
bucket. Without the saved layout, a resumed run starts with the layout of a first
backward, and its first steps differ from those of an undisturbed run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from minidp.config import SavedLayout

from .plan import Layout, ParamSpec, build_layout

FORMAT = 1
_REMEDY = (
    "What to do: pass what ddp.bucket_layout gave for the same module, options and "
    "delayed parameters, or leave bucket_layout out (the bits of the first steps may "
    "then differ from those of an undisturbed run)."
)


def to_plain(
    layout: Layout, specs: Sequence[ParamSpec], *, rebuilt: bool
) -> dict[str, Any]:
    """Return a layout as a dict for JSON, with the names and sizes in each bucket.

    Args:
        layout: The layout.
        specs: The parameters that it assigns.
        rebuilt: Whether it follows the ready order, so that a resumed run must not
            rebuild it.
    """
    buckets = [[specs[i] for i in members] for members in layout.assignment]
    return {
        "format": FORMAT,
        "rebuilt": rebuilt,
        "buckets": [[spec.name for spec in members] for members in buckets],
        "elements": [[spec.numel for spec in members] for members in buckets],
    }


def read_plain(value: object) -> SavedLayout:
    """Parse a mapping from `to_plain`, or the JSON file at a path that holds one.

    Whether it fits a model is checked by `resumed_layout`.

    Raises:
        TypeError: It is no mapping.
        ValueError: The file cannot be read, or the mapping has another form.
    """
    source = ""
    if isinstance(value, str | os.PathLike):
        source = f" in {os.fspath(value)}"
        try:
            value = json.loads(Path(value).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"bucket_layout must be a file that minidp tune wrote, but {value} "
                f"cannot be read as such: {error}. Write it anew, or leave "
                "bucket_layout out."
            ) from error
    if not isinstance(value, Mapping):
        raise TypeError(
            "bucket_layout must be a mapping, as ddp.bucket_layout gives it, or a "
            f"file that minidp tune wrote, but got {type(value).__name__}{source}."
        )
    if "ranks" in value:
        raise ValueError(
            f"bucket_layout must be a layout, but got a recording{source}: that one is "
            "for minidp report. What to do: minidp tune writes a layout."
        )
    rebuilt, buckets = value.get("rebuilt"), _rows(value.get("buckets"), str)
    elements = _rows(value.get("elements") or (), int)
    if value.get("format") != FORMAT:
        wrong = f"be of format {FORMAT}, but got {value.get('format')!r}"
    elif not isinstance(rebuilt, bool) or buckets is None or not all(buckets):
        wrong = "hold 'rebuilt', True or False, and 'buckets', lists of parameter "
        wrong += "names of which none is empty; it does not"
    elif elements is None or (
        elements and [*map(len, elements)] != [*map(len, buckets)]
    ):
        wrong = "hold in 'elements' one number for each name in 'buckets'; it does not"
    else:
        return SavedLayout(buckets, rebuilt, elements, source)
    raise ValueError(f"bucket_layout must {wrong}{source}. {_REMEDY}")


def _rows(value: Any, kind: type) -> tuple[tuple[Any, ...], ...] | None:
    """Return a list of lists as tuples, or None if it is no such thing of ``kind``."""
    lists = (list, tuple)
    if not isinstance(value, lists) or not all(isinstance(row, lists) for row in value):
        return None
    if not all(isinstance(item, kind) for row in value for item in row):
        return None
    return tuple(tuple(row) for row in value)


def resumed_layout(saved: SavedLayout, specs: Sequence[ParamSpec]) -> Layout:
    """Return the layout of these parameters that was saved by their names.

    Raises:
        ValueError: It does not fit. It must hold each parameter once, in the size that
            was saved, if any was. Each bucket must have one dtype and device. A sparse
            parameter must be alone in its bucket, and delayed ones must have the last
            buckets for themselves.
    """

    def require(fits: object, expected: str, found: str, names: Iterable[str]) -> None:
        if not fits:
            remedy = _REMEDY
            if saved.source:
                remedy = "What to do: minidp tune writes a layout for this module."
            raise ValueError(
                f"bucket_layout{saved.source} does not fit this module. Expected: "
                f"{expected}. Found: {found}. Parameters: {', '.join(names)}. {remedy}"
            )

    index = {spec.name: i for i, spec in enumerate(specs)}
    given = Counter(name for names in saved.buckets for name in names)
    expected = f"each of the {len(index)} trainable parameters once"
    for names, found in (
        ([n for n, k in given.items() if k > 1], "some stand in it more than once"),
        ([n for n in given if n not in index], "some in it are not such parameters"),
        ([n for n in index if n not in given], "some are not in it"),
    ):
        require(not names, expected, found, names)
    assignment = [[index[name] for name in names] for names in saved.buckets]
    buckets = [[specs[i] for i in members] for members in assignment]
    for members, counts in zip(buckets, saved.elements, strict=False):
        for spec, count in zip(members, counts, strict=True):
            expected = f"a parameter of {spec.numel} elements"
            require(spec.numel == count, expected, f"one of {count}", [spec.name])
    for number, members in enumerate(buckets):
        listed = [spec.name for spec in members]
        kinds = {_kind(spec): spec.name for spec in reversed(members)}
        found = "; ".join(f"{name}: {kind}" for kind, name in kinds.items())
        expected = "one dtype, device and sort of gradient in each bucket"
        require(len(kinds) == 1, expected, f"in bucket {number} {found}", listed)
    for number, (this, following) in enumerate(pairwise(buckets)):
        is_early = this[0].delayed and not following[0].delayed
        expected, found = "delayed parameters in the last buckets", f"bucket {number}"
        listed = [spec.name for spec in this]
        require(not is_early, expected, f"{found} before others", listed)
    return build_layout(specs, assignment)


def _kind(spec: ParamSpec) -> str:
    """Return a text that is equal for parameters that may share a bucket.

    A sparse parameter shares its bucket with none, so that its text is unique.
    """
    sort = f"sparse, {spec.name} alone" if spec.sparse else "dense"
    return f"{spec.dtype} on {spec.device}, {sort}{', delayed' * spec.delayed}"
