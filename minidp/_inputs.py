"""A forward's inputs: tensors inside tuples, lists and dicts, mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every tensor and packed sequence; keep the rest.

    Named tuples, tuples, lists and dicts are rebuilt with their own types, as in torch;
    other objects (dataclasses, sets) are passed through.
    """
    if isinstance(value, torch.Tensor | PackedSequence):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return type(value)((k, map_tensors(item, change)) for k, item in value.items())
    return value


def move_inputs(value: Any, device: torch.device) -> Any:
    """Move tensors to ``device``."""
    return map_tensors(value, lambda tensor: tensor.to(device))
