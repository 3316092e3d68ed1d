"""Names for what minidp does, in traces of `torch.profiler`.

``minidp::flatten bucket=3`` and the like; without a profiler they cost a question.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING: AbstractContextManager[object] = nullcontext()
_is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def label(doing: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """A range of the profiler, if there is one now."""
    if not _is_profiling():
        return _NOTHING
    which = "" if bucket is None else f" bucket={bucket}"
    return record_function(f"minidp::{doing}{which}")
