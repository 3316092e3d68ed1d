"""A test of an own comm hook on the simulated device, as `tests/README.md` shows it."""

import torch
import torch.distributed as dist

from minidp import DataParallel
from tests.accelerator.training import SMALL, Run, net, result_of
from tests.support.ranks import on_ranks


def in_16_bits(_state, bucket):
    buffer = bucket.buffer()
    half = buffer.half().div_(bucket.divisor())
    work = dist.all_reduce(half, group=bucket.process_group(), async_op=True)
    return work.get_future().then(lambda future: buffer.copy_(future.value()[0]))


def train(run):
    model = run.wrap(net().to(run.device()), **SMALL)
    model.register_comm_hook(None, in_16_bits)
    return run.train(model)


@on_ranks(2)
def test_my_hook(ctx):
    expected = result_of(Run(ctx, DataParallel, "cpu"), train)
    run = Run(ctx, DataParallel, "sim", way="mixed_nodes")
    assert all(map(torch.equal, expected, result_of(run, train)))  # and no race
    # By minidp, which makes new buckets in the second step; another is the hook's.
    assert run.costs.host_waits == ("Event.synchronize",)
