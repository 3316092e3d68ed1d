"""Layers under activation checkpoints, which autograd runs a second time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.both import history_of, modes, on_both, same
from tests.support.ranks import as_in_torch, on_ranks


class Checkpointed(nn.Module):
    """A layer, then others under checkpoints, which may be several times the same."""

    def __init__(self, order: str, *, reentrant: bool = True) -> None:
        super().__init__()
        self.first, self.again, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.layers = {"a": self.again, "b": self.last}
        self.order, self.reentrant = order, reentrant
        if "b" not in order:
            del self.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.order:
            x = checkpoint(self.layers[name], x, use_reentrant=self.reentrant)
        return x.pow(2).sum()


def checkpointed(ctx, wrap, mode, order, reentrant):
    ddp = wrap(Checkpointed(order, reentrant=reentrant), **mode)
    return history_of(ddp, lambda n: ddp(torch.ones(2, 4) * (ctx.rank + n + 1)), 4)


@as_in_torch(2)
def test_checkpoints_of_a_static_graph(ctx, wrap):
    return checkpointed(ctx, wrap, {"static_graph": True}, "aaab", True)


@on_ranks(2)
@modes
@pytest.mark.parametrize("order", ["a", "aa"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_matrix_is_at_least_as_good_as_torchs(ctx, mode, order, reentrant):
    """Torch raises 'marked twice' in three cells; minidp in two of them."""
    theirs, ours = on_both(ctx, checkpointed, mode, order, reentrant)
    if reentrant and order == "aa" and "static_graph" not in mode:
        assert ours.startswith("MarkedTwiceError")
        assert "again." in ours
        assert isinstance(theirs, str)
        return None
    assert not isinstance(ours, str)
    is_torch_wrong = isinstance(theirs, str)
    assert is_torch_wrong <= (mode == {"find_unused_parameters": True})
    assert is_torch_wrong or same(theirs, ours)
    return ours
