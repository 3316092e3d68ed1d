"""Sums in shared memory: Gloo's bits, and waits that end."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minidp.comm.communicator import Communicator
from minidp.shared_memory import BufferShape, SharedBuffer, share
from tests.support.fresh import run_fresh
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.usefixtures("library"),  # skips without a compiler
    pytest.mark.skipif(
        "0" in map(os.environ.get, ("MINIDP_NATIVE", "MINIDP_SHARED_MEMORY")),
        reason="MINIDP_NATIVE=0 or MINIDP_SHARED_MEMORY=0: ranks must not share memory",
    ),
]

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TYPES += [torch.int32, torch.int64, torch.uint8, torch.int8]
MEBI = 2**20
CPU = torch.device("cpu")


def values(shape: tuple[int, torch.dtype], seed: int) -> torch.Tensor:
    numel, dtype = shape
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=generator) * 100).to(dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


def take(shapes: list[tuple[int, torch.dtype]], ctx: Any) -> list[SharedBuffer]:
    """Share memory between the ranks of ``ctx``, which all can."""
    buffers = share(
        [BufferShape(*each) for each in shapes], Communicator(ctx.group), CPU
    )
    assert not isinstance(buffers, str), buffers
    return buffers


def differences(ctx: Any, shapes: list[tuple[int, torch.dtype]]) -> list[int]:
    """Reduce each bucket both ways, twice; return the buckets whose bits differ."""
    buckets = take(shapes, ctx)
    wrong = []
    for round_number in range(2):
        for k, shape in enumerate(shapes):
            expected = values(shape, 10 * ctx.rank + round_number)
            buffer = buckets[k].values
            buffer.copy_(expected)
            work = buckets[k].all_reduce()
            dist.all_reduce(expected, group=ctx.group)
            work.wait()
            if not torch.equal(buffer.view(torch.uint8), expected.view(torch.uint8)):
                wrong.append(k)
    return wrong


shapes = st.tuples(
    st.one_of(
        st.integers(1, 300),
        st.integers(1, MEBI // 2),
        # Gloo's segments are of one MiB: some elements around their bounds.
        st.builds(
            lambda n, d: n * MEBI // 8 + d, st.integers(1, 8), st.integers(-3, 3)
        ),
    ),
    st.sampled_from(TYPES),
)


@given(size=st.integers(2, 4), shapes=st.lists(shapes, min_size=1, max_size=4))
def test_gloos_bits(pool, size, shapes):
    assert pool.run(differences, size, shapes) == [[]] * size


@on_ranks(2)
def test_a_waiting_rank_sleeps(ctx):
    """Rank 1 posts some time after rank 0, which sleeps, and must be woken."""
    store = dist.distributed_c10d._get_default_store()
    buckets = take([(1000, torch.float32)], ctx)
    buckets[0].values.fill_(ctx.rank + 1.0)
    if ctx.rank == 1:
        store.wait(["rank 0 has posted"])
        store.delete_key("rank 0 has posted")  # for the next test on these ranks
        time.sleep(0.3)
    work = buckets[0].all_reduce()
    future = work.get_future()
    early = work.is_completed()
    if ctx.rank == 0:
        store.set("rank 0 has posted", "")
    begun = time.process_time()
    work.wait()
    seconds = time.process_time() - begun
    assert buckets[0].values[7] == 3.0
    if ctx.rank == 0:
        assert not early
        assert future.done()
        assert seconds < 0.1  # of CPU time


def killed_rank(ctx: Any) -> Any:
    buckets = take([(10, torch.float32)], ctx)
    if ctx.rank == 1:
        os._exit(0)
    buckets[0].all_reduce().wait()


def test_a_rank_that_ends_is_named():
    found = run_fresh(killed_rank, 3, errors="return")
    assert "the process of rank 1 ended" in str(found[0])
    assert "the process of rank 1 ended" in str(found[2])


@on_ranks(3, fresh={})
def test_a_forked_child_has_a_copy(ctx):
    """It reads and writes the buffer, as its own child does; the ranks see nothing.

    When it asks for a sum, also for one that is in flight, it is told.
    """
    (bucket,) = take([(10, torch.float32)], ctx)
    buffer = bucket.values
    buffer.fill_(1.0)
    work = bucket.all_reduce()
    child = os.fork()
    if child == 0:
        code = int(buffer[0].item() in (1.0, 3.0))
        buffer.fill_(100.0)
        asks = work.is_completed, lambda: work.is_done_within(0.01), bucket.all_reduce
        for ask in asks:
            try:
                ask()
            except RuntimeError as error:
                code += "forked child" in str(error)
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(int(buffer[0].item()))
        _, status = os.waitpid(grandchild, 0)
        os._exit(code + os.waitstatus_to_exitcode(status))
    _, status = os.waitpid(child, 0)
    work.wait()
    assert os.waitstatus_to_exitcode(status) == 104
    assert buffer.tolist() == [3.0] * 10


def mapped() -> list[tuple[int, int]]:
    """First address and size of what this process maps of our files."""
    with open("/proc/self/maps", encoding="ascii") as lines:
        ours = [line.split()[0].split("-") for line in lines if "memfd:minidp" in line]
    return [(int(begin, 16), int(end, 16) - int(begin, 16)) for begin, end in ours]


@on_ranks(3, fresh={})
def test_a_forked_child_frees_only_its_own(ctx):
    """A forked child maps memory where its parent has another rank's; frees ours."""
    buckets = take([(1000, torch.float32)], ctx)
    here = mapped()
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
        left = {begin for begin, _ in mapped()}
        private_and_anonymous, fixed_but_not_instead = 0x22, 0x100000
        flags = private_and_anonymous | fixed_but_not_instead
        taken = [
            libc.mmap(begin, size, 3, flags, -1, 0)
            for begin, size in here
            if begin not in left
        ]
        del buckets
        gc.collect()
        for address in taken:
            ctypes.memset(address, 1, 8)  # a signal ends us if it is gone
        os._exit(len(taken))
    _, status = os.waitpid(child, 0)
    assert (os.waitstatus_to_exitcode(status), len(here)) == (2, 3)
