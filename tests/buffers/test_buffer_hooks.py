"""Torch's private hook for module buffers, and futures that a backward awaits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _BufferCommHookLocation

from tests.support.both import Scalars, done, wrapped, x_of
from tests.support.ranks import as_in_torch, on_ranks

POST, PRE = _BufferCommHookLocation.POST_FORWARD, _BufferCommHookLocation.PRE_FORWARD


class Marked(Scalars):
    def __init__(self):
        super().__init__()
        self.register_buffer("mark", torch.zeros(1))


@as_in_torch(2)
@pytest.mark.parametrize("location", [PRE, POST])
def test_module_buffer_hooks(ctx, wrap, location):
    """Averages a module buffer; the works are awaited in the next backward."""
    seen = []
    works = []

    def hook(state, module_buffers):
        seen.append(" ".join(module_buffers))
        assert state is seen
        work = dist.all_reduce(module_buffers["mark"], group=ctx.group, async_op=True)
        works.append(work)
        return [work.get_future()]

    ddp = wrap(Marked())
    ddp._register_buffer_comm_hook(seen, hook, location)
    history = []
    for step, kind in enumerate(["sync", "no_sync", "no_sync", "sync", "sync"]):
        ddp.module.mark.fill_(10.0 * step + ctx.rank)
        if kind == "no_sync":
            with ddp.no_sync():
                ddp(x_of(ctx)).backward()
        else:
            ddp(x_of(ctx)).backward()
            history.append(ddp.module.mark.item())
        for work in works:  # those of no_sync() are still owed
            work.wait()
    return history, seen


@on_ranks(2)
def test_futures_are_awaited_and_nobody_is_left_out(ctx):
    """A future that fails; then several at once, with a clipped step besides."""
    ddp = wrapped(ctx, Scalars())
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    awaited = []

    def owe(future):
        ddp._reducer.queue.buffer_hook_futures.append(future)

    failed = torch.futures.Future()
    failed.set_exception(ValueError("no"))
    owe(failed)
    with pytest.raises(RuntimeError, match="waiting for a buffer hook's future"):
        ddp(x_of(ctx)).backward()
    ddp.reset()
    ddp.zero_grad()
    for number in (1, 2):
        owe(done(number).then(lambda future: awaited.append(future.value())))
    ddp.step_in_backward(optimizer, clip_grad_norm=0.25)
    ddp(x_of(ctx)).backward()
    assert len(ddp._reducer.queue.buffer_hook_futures) == 0
    owe(torch.futures.Future())
    ddp._update_process_group(ctx.group)  # what was owed is forgotten
    ddp(x_of(ctx)).backward()
    assert awaited == [1, 2]
    assert ddp.module.w[0].item() == pytest.approx(0.5)
