"""A bucket layout as plain data: what a checkpoint carries from one run to the next.

    {"format": 1, "rebuilt": True, "buckets": [["head.bias", "head.weight"], ...],
     "elements": [[10, 640], ...]}

At three and more ranks the last bits of a sum depend on where a gradient stands in its
bucket. A resumed run starts with the first-iteration layout, so its first step would
differ from that of an undisturbed run, unless it gets the layout it had.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._layout import Layout, ParamSpec, build_layout
from .config import SavedLayout

FORMAT = 1
_REMEDY = (
    "What to do: pass what ddp.bucket_layout gave for the same module, options and "
    "delayed parameters, or leave bucket_layout out (the bits of the first steps may "
    "then differ from those of an undisturbed run)."
)


def to_plain(
    layout: Layout, specs: Sequence[ParamSpec], *, rebuilt: bool
) -> dict[str, Any]:
    """What `read_plain` and ``torch.load(weights_only=True)`` understand."""
    names = [[specs[i].name for i in members] for members in layout.assignment]
    elements = [[specs[i].numel for i in members] for members in layout.assignment]
    return {
        "format": FORMAT,
        "rebuilt": rebuilt,
        "buckets": names,
        "elements": elements,
    }


def read_plain(value: object) -> SavedLayout:
    """Check the form of the argument ``bucket_layout``; the names come later.

    Args:
        value: a mapping, or the path of a JSON file that holds one.

    Raises:
        TypeError: not a mapping, and no path.
        ValueError: not one that `to_plain` made, or a file that cannot be read.
    """
    source = ""
    if isinstance(value, str | os.PathLike):
        source = f" in {os.fspath(value)}"
        value = _read_file(value)
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
    if value.get("format") != FORMAT:
        raise ValueError(
            f"bucket_layout must be of format {FORMAT}, but got "
            f"{value.get('format')!r}{source}. {_REMEDY}"
        )
    rebuilt, buckets = value.get("rebuilt"), value.get("buckets")
    if not isinstance(rebuilt, bool) or not _is_list_of_names(buckets):
        raise ValueError(
            "bucket_layout must hold 'rebuilt', True or False, and 'buckets', lists "
            f"of parameter names of which none is empty; it does not{source}. {_REMEDY}"
        )
    assert isinstance(buckets, list | tuple)
    elements = value.get("elements", ())
    if elements and not _are_numbers_for(buckets, elements):
        raise ValueError(
            "bucket_layout must hold in 'elements' one number for each name in "
            f"'buckets'; it does not{source}. {_REMEDY}"
        )
    return SavedLayout(
        tuple(tuple(names) for names in buckets),
        rebuilt,
        tuple(tuple(numbers) for numbers in elements),
        source,
    )


def _read_file(path: str | os.PathLike[str]) -> object:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"bucket_layout must be a file that minidp tune wrote, but {path} cannot "
            f"be read as such: {error}. Write it anew, or leave bucket_layout out."
        ) from error


def _is_list_of_names(buckets: object) -> bool:
    return isinstance(buckets, list | tuple) and all(
        isinstance(names, list | tuple)
        and len(names) > 0
        and all(isinstance(name, str) for name in names)
        for names in buckets
    )


def _are_numbers_for(buckets: Sequence[Sequence[str]], elements: object) -> bool:
    return (
        isinstance(elements, list | tuple)
        and all(isinstance(numbers, list | tuple) for numbers in elements)
        and [len(names) for names in buckets] == [len(each) for each in elements]
        and all(isinstance(number, int) for each in elements for number in each)
    )


def resumed_layout(saved: SavedLayout, specs: Sequence[ParamSpec]) -> Layout:
    """The same buckets, for these parameters.

    Raises:
        ValueError: it is a layout of other parameters, or none that could have been.
    """
    index = {spec.name: i for i, spec in enumerate(specs)}
    given = Counter(name for names in saved.buckets for name in names)
    twice = [name for name, count in given.items() if count > 1]
    unknown = [name for name in given if name not in index]
    missing = [name for name in index if name not in given]
    for names, found in (
        (twice, "some stand in it more than once"),
        (unknown, "some in it are not such parameters"),
        (missing, "some are not in it"),
    ):
        if names:
            raise _misfit(
                saved,
                f"each of the {len(index)} trainable parameters once",
                found,
                names,
            )
    assignment = [[index[name] for name in names] for names in saved.buckets]
    for name, count in _sizes(saved).items():
        if specs[index[name]].numel != count:
            actual = specs[index[name]].numel
            raise _misfit(
                saved, f"a parameter of {actual} elements", f"one of {count}", [name]
            )
    for number, members in enumerate(assignment):
        _check_bucket(saved, number, [specs[i] for i in members])
    late = [specs[members[0]].delayed for members in assignment]
    if late != sorted(late):
        first = saved.buckets[late.index(True)]
        raise _misfit(
            saved,
            "delayed parameters in the last buckets",
            f"bucket {late.index(True)} before others",
            first,
        )
    return build_layout(specs, assignment)


def _sizes(saved: SavedLayout) -> dict[str, int]:
    return {
        name: count
        for names, numbers in zip(saved.buckets, saved.elements, strict=False)
        for name, count in zip(names, numbers, strict=True)
    }


def _check_bucket(
    saved: SavedLayout, number: int, members: Sequence[ParamSpec]
) -> None:
    """A bucket is one message: its parameters must be able to share it."""
    kinds = {_kind(spec): spec.name for spec in reversed(members)}
    if len(kinds) > 1:
        found = "; ".join(f"{name}: {kind}" for kind, name in kinds.items())
        raise _misfit(
            saved,
            "one dtype, device and sort of gradient in each bucket",
            f"in bucket {number} {found}",
            [spec.name for spec in members],
        )
    if members[0].sparse and len(members) > 1:
        raise _misfit(
            saved,
            "a sparse gradient alone in its bucket",
            f"{len(members)} in bucket {number}",
            [spec.name for spec in members],
        )


def _kind(spec: ParamSpec) -> str:
    sort = "sparse" if spec.sparse else "dense"
    return f"{spec.dtype} on {spec.device}, {sort}{', delayed' * spec.delayed}"


def _misfit(
    saved: SavedLayout, expected: str, found: str, names: Sequence[str]
) -> ValueError:
    remedy = _REMEDY
    if saved.source:
        remedy = "What to do: minidp tune writes a layout for this module."
    return ValueError(
        f"bucket_layout{saved.source} does not fit this module. Expected: {expected}. "
        f"Found: {found}. Parameters: {', '.join(names)}. {remedy}"
    )
