"""Write lists, ranks and errors as words, and find where mappings differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def join(items: Iterable[object], limit: int = 8) -> str:
    """Return ``a, b and c``, or ``a, b and N more`` beyond ``limit`` items."""
    texts = [str(item) for item in items]
    if len(texts) > limit:
        texts = [*texts[:limit], f"{len(texts) - limit} more"]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def of_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 1 and 2``."""
    return f"rank{'s' * (len(ranks) != 1)} {join(ranks)}"


def in_words(error: Exception) -> str:
    """Return an error as ``Type: text`` on one line, short and without C++ traces."""
    text = " ".join(str(error).partition("\nException raised from")[0].split())
    text = re.sub(r"\[(enforce fail at )?/[^\]\s]*:\d+\] ", "", text)
    return f"{type(error).__name__}: {text[:300]}".removesuffix(": ")


def differing(of_rank: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not all equal. A missing one counts as None."""
    first, *others = of_rank
    names = dict.fromkeys(name for each in (first, *others) for name in each)
    return [n for n in names if any(e.get(n) != first.get(n) for e in others)]
