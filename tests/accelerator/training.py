"""Trainings on the simulated device, and on the CPU for their bits."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from tests.support import sim


@contextlib.contextmanager
def no_races():
    """Fail if the block has a race; those before it do not count."""
    sim.load().drain()
    sim.races()
    yield
    sim.load().drain()
    found = sim.races()
    assert not found, "\n".join(found)


def conv_net():
    """Return a small network of many kinds of layers, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(288, 64), nn.Dropout(0.3), nn.Tanh()),
        *(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)),
    )
