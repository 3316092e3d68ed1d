"""Assign parameters to buckets and slots (`plan`), and save that as JSON (`saved`)."""

from .plan import (
    BucketPlan,
    Layout,
    ParamSpec,
    Slot,
    build_layout,
    chunks_by_bytes,
    delayed,
    fill,
    initial_layout,
    rebuilt_layout,
    row_major_stride,
)
from .saved import read_plain, resumed_layout, to_plain

__all__ = ["BucketPlan", "Layout", "ParamSpec", "Slot", "build_layout"]
__all__ += ["chunks_by_bytes", "delayed", "fill", "initial_layout", "read_plain"]
__all__ += ["rebuilt_layout", "resumed_layout", "row_major_stride", "to_plain"]
