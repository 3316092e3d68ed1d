"""Move the inputs of a forward to the module's device, for ``device_ids``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with every tensor and packed sequence in it on a device.

    Tuples, lists and dicts are copied, nested ones too. Other objects are returned as
    they are.
    """
    has_data: Any = isinstance(value, torch.Tensor | PackedSequence)
    if has_data:
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, moved(item, device)) for key, item in value.items())
    return value
