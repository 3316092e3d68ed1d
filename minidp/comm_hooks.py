"""Comm hooks: other ways to average buckets. They are short, to be copied and changed.

    ddp.register_comm_hook(None, comm_hooks.row_major(my_hook))

A comm hook gets a full bucket with this rank's own gradients, *not divided*, and
returns a future of their averages. It is called in the same order on all ranks. One
rule is yours to keep:

    Collectives of one group must start in the same order on every rank.

So start collectives in the hook itself. A callback (``.then``) runs when its collective
is done. On Gloo that is in a different order on every rank, so that with two buckets in
flight the ranks would mix them up. `one_at_a_time` makes such hooks safe.

These are the bytes that a rank sends for a bucket of N elements, on n ranks, if
collectives run in a ring:

    all_reduce_hook, fp32           8 N (n-1)/n
    fp16_, bf16_compress_hook       4 N (n-1)/n
    fp32_accumulate_hook            4 N (n-1)/n     error independent of n
    int8_error_feedback_hook        N (n-1) (1 + 4/block)     less than fp32 for n < 8

The ``state`` of a hook is a process group, or None for the bucket's own group, which
`DataParallel.reset` may replace. Hooks that keep data have a class for their state, of
which each wrapped module needs an object of its own.

On a device, a group keeps what a collective reads and writes until that has ended, and
a future marks its value as used by the streams of its callbacks. So a hook calls
`use_here` only for what it reads itself on another stream than that of its making.

Gradients that a hook cannot compress (16-bit, sparse) are averaged uncompressed, as by
`all_reduce_hook`. Complex gradients arrive as interleaved reals.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from .accelerator import use_here
from .comm import (
    FutureWork,
    ProcessGroup,
    Work,
    then,
    wait_for,
)
from .hooks import GradBucket, Hook, name_of

Group = ProcessGroup | None  # None stands for the bucket's own group

__all__ = ["Fp32State", "GradBucket", "Int8State", "all_reduce_hook"]
__all__ += ["bf16_compress_hook", "bf16_compress_wrapper"]
__all__ += ["fp16_compress_hook", "fp16_compress_wrapper", "fp32_accumulate_hook"]
__all__ += ["int8_error_feedback_hook", "one_at_a_time", "row_major"]


def all_reduce_hook(state: Group, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average in the bucket's dtype, as ``sum over ranks of (g / n)``, also if sparse.

    If n is no power of two, the last bits differ from those without a hook, where
    gradients are multiplied by ``1 / n``.
    """
    buffer = bucket.buffer()
    group, n = _group_and_divisor(state, bucket)
    buffer.div_(n)  # before the sum, which might overflow otherwise
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return then(work.get_future(), lambda: buffer)


# -- 16 bits on the wire ---------------------------------------------------------------


def fp16_compress_hook(state: Group, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average float32 and float64 buckets in float16: ``sum of (fp16(g) / n)``.

    Other buckets are averaged by `all_reduce_hook`. Values above 65504 become infinite,
    on all ranks.
    """
    return fp16_compress_wrapper(all_reduce_hook)(state, bucket)


def bf16_compress_hook(state: Group, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average float32 and float64 buckets in bfloat16: ``sum of (bf16(g) / n)``.

    Other buckets are averaged by `all_reduce_hook`. The range of float32 is kept, with
    8 significant bits. It also works on Gloo.
    """
    return bf16_compress_wrapper(all_reduce_hook)(state, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that runs ``hook`` in float16, and casts its result back.

    Only dense float32 and float64 buckets are cast; ``hook`` gets others as they are.
    """
    return _in_dtype(torch.float16, hook, "fp16_compress_wrapper")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that runs ``hook`` in bfloat16, and casts its result back.

    Only dense float32 and float64 buckets are cast; ``hook`` gets others as they are.
    """
    return _in_dtype(torch.bfloat16, hook, "bf16_compress_wrapper")


def _in_dtype(dtype: torch.dtype, hook: Hook, name: str) -> Hook:
    """Return a hook that runs ``hook`` in ``dtype``, and has this name in errors."""

    def compressed(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        if not _shrinks(buffer, dtype):
            return hook(state, bucket)
        bucket.set_buffer(buffer.to(dtype))

        def decompress(done: Future[torch.Tensor]) -> torch.Tensor:
            bucket.set_buffer(buffer)
            use_here(buffer)  # the bucket may die before anybody waits
            return buffer.copy_(done.value().view_as(buffer))

        return hook(state, bucket).then(decompress)

    return _named(compressed, name, hook)


class Fp32State:
    """The state of one `fp32_accumulate_hook`: group, dtype and unfinished exchange.

    Args:
        process_group: The ranks to average over; by default the bucket's own group.
        wire_dtype: The dtype of what is sent.

    Raises:
        ValueError: ``wire_dtype`` is neither bfloat16 nor float16.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        wire_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if wire_dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"wire_dtype must be torch.bfloat16 or torch.float16, not {wire_dtype}."
            )
        self.process_group = process_group
        self.wire_dtype = wire_dtype
        self.half_done: _Exchange | None = None  # of the bucket before this one


def fp32_accumulate_hook(state: Fp32State, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average with 16 bits sent, but a float32 sum: ``r((sum of r(g)) / n)``.

    Rank k collects the k-th part of all ranks (all-to-all), sums it in float32, and
    sends the rounded mean to all ranks (all-gather). These are as many bytes as those
    of a 16-bit all-reduce, whose error grows with n, but here there are only two
    roundings r. With u = 2**-8 (bfloat16) or 2**-11 (float16), and up to float32's own
    error and underflow, ``|error| <= (u + u*u) * mean(|g|) + u * |mean(g)|``. Buckets
    that are neither float32 nor float64 are averaged by `all_reduce_hook`.

    The all-gather cannot start in a callback (the head of this module says why). It
    starts when the hook is called for the next bucket, after that bucket's all-to-all:

        hook called for    bucket 0   bucket 1        bucket 2 (last)
        starts             all-to-all all-to-all      all-to-all
                                      all-gather of 0 all-gather of 1, of 2

    That call waits for the earlier all-to-all. On a network that is slower than the
    backward, the backward therefore waits here instead of at its end.

    Raises:
        TypeError: ``state`` is no `Fp32State`.
    """
    _check_state(state, Fp32State)
    group, _ = _group_and_divisor(state.process_group, bucket)
    previous, state.half_done = state.half_done, None
    if previous and (bucket.index() == 0 or previous.group is not group):
        previous = None  # an aborted backward left it
    if _shrinks(bucket.buffer(), state.wire_dtype):
        state.half_done = _Exchange(state, bucket)
        future = state.half_done.future
    else:
        future = all_reduce_hook(state.process_group, bucket)
    if previous:
        previous.finish()
    if bucket.is_last() and state.half_done:
        state.half_done.finish()
        state.half_done = None
    return future


class _Exchange:
    """The two exchanges of one bucket.

    The constructor starts an all-to-all, and `finish` an all-gather. `future` is
    complete when the averages are in the bucket's buffer.
    """

    def __init__(self, state: Fp32State, bucket: GradBucket) -> None:
        self._buffer = bucket.buffer()
        self.group, self._divisor = _group_and_divisor(state.process_group, bucket)
        devices: Any = None if self._buffer.is_cpu else [self._buffer.device]
        self.future: Future[torch.Tensor] = Future(devices=devices)
        numel, n = self._buffer.numel(), self.group.size()
        part = -(-numel // n)  # rounded up; the last parts are padded
        self._sent = self._buffer.new_zeros((n, part), dtype=state.wire_dtype)
        self._sent.view(-1)[:numel] = self._buffer
        self._received = torch.empty_like(self._sent)
        self._work: Work = dist.all_to_all_single(
            self._received, self._sent, group=self.group, async_op=True
        )

    def finish(self) -> None:
        """Wait for the all-to-all, average in float32, start to gather the results."""
        wait_for(self._work)  # within the time limit of the reducer that launches
        use_here(self._received, self._sent)  # of the stream of an earlier call
        total = self._received.sum(0, dtype=torch.float32)
        self._mean = mean = total.div_(self._divisor).to(self._sent.dtype)
        everyones = list(self._sent)  # reuse memory that has been sent
        self._work = dist.all_gather(everyones, mean, group=self.group, async_op=True)
        self._work.get_future().then(self._complete)

    def _complete(self, done: Future[Any]) -> None:
        """Copy what was gathered to the buffer, and complete `future`."""
        try:
            done.value()
            gathered = self._sent.view(-1)[: self._buffer.numel()]
            self.future.set_result(self._buffer.copy_(gathered))
        except Exception as error:
            self.future.set_exception(error)  # type: ignore[arg-type]


# -- 8 bits on the wire ----------------------------------------------------------------


class Int8State:
    """The state of one `int8_error_feedback_hook`: rounding errors of the last step.

    Args:
        process_group: The ranks to average over; by default the bucket's own group.
        block: How many elements of a bucket share a scale.

    Raises:
        ValueError: ``block`` is less than 1.
    """

    def __init__(
        self, process_group: ProcessGroup | None = None, block: int = 256
    ) -> None:
        if block < 1:
            raise ValueError(f"block must be at least 1, not {block}.")
        self.process_group = process_group
        self.block = block
        self._residuals: dict[int, tuple[object, torch.Tensor]] = {}

    def residual(self, bucket: GradBucket) -> torch.Tensor:
        """Return the stored rounding error of a bucket, which the caller must update.

        It is float32, with a row for each block. It is zero at first, and when the
        bucket holds other parameters than before, as after a rebuild.
        """
        buffer = bucket.buffer()
        kind = (*map(id, bucket.parameters()), buffer.numel(), buffer.device)
        known, residual = self._residuals.get(bucket.index(), (None, buffer))
        if known != kind:
            num_blocks = -(-buffer.numel() // self.block)
            residual = buffer.new_zeros((num_blocks, self.block), dtype=torch.float32)
            self._residuals[bucket.index()] = (kind, residual)
        return residual


def int8_error_feedback_hook(
    state: Int8State, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average gradients rounded to 8 bits, and add their errors to the next ones.

    These are computed for each block:

        v = g + residual        scale = max|v| / 127
        q = round(v / scale)    residual = v - scale * q

    One all-gather sends q and scale. Every rank sums ``scale * q`` in float32, in the
    order of the ranks, and divides the sum by n. No sum of q is formed, so nothing
    overflows, and all ranks get the same bits.

    Over many steps the sums of decoded and true gradients differ by the last residual
    alone, which is at most half a scale. A block with an infinity or NaN becomes NaN on
    all ranks, so that a GradScaler sees it, and keeps its residual.

    This is for all dense floating buckets; others are averaged by `all_reduce_hook`. It
    follows Seide et al., "1-Bit SGD", Interspeech 2014, and Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019.

    Raises:
        TypeError: ``state`` is no `Int8State`.
    """
    _check_state(state, Int8State)
    buffer = bucket.buffer()
    if not _shrinks(buffer, torch.int8):
        return all_reduce_hook(state.process_group, bucket)
    group, n = _group_and_divisor(state.process_group, bucket)
    residual = state.residual(bucket)
    values = residual.clone()
    values.view(-1)[: buffer.numel()] += buffer
    codes, scales = _quantise(values)
    error = values - codes * scales
    residual.copy_(torch.where(scales.isfinite(), error, residual))

    # Scales and codes travel in one message. The scales come first, because float32
    # must start at a multiple of 4 bytes.
    head = scales.nbytes
    message = torch.cat([t.flatten().view(torch.uint8) for t in (scales, codes)])
    messages = [torch.empty_like(message) for _ in range(group.size())]

    def decode() -> torch.Tensor:
        use_here(buffer)  # the bucket may die before anybody waits
        total = torch.zeros_like(values)
        for theirs in messages:
            scale = theirs[:head].view(torch.float32).unsqueeze(1)
            total += theirs[head:].view(torch.int8).view(total.shape) * scale
        return buffer.copy_(total.div_(n).view(-1)[: buffer.numel()])

    work = dist.all_gather(messages, message, group, async_op=True)
    return then(work.get_future(), decode)


def _quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes, and a float32 scale for each row, which may be NaN."""
    scales = values.abs().amax(dim=1, keepdim=True) / 127
    scales.masked_fill_(~scales.isfinite(), torch.nan)
    steps = values / scales.masked_fill(scales == 0, 1)  # a row of zeros has no scale
    codes = steps.round_().nan_to_num_(0).clamp_(-127, 127).to(torch.int8)
    return codes, scales


# -- wrappers --------------------------------------------------------------------------


def row_major(hook: Hook) -> Hook:
    """Return a hook that runs ``hook`` on row-major copies, and copies its result back.

    Hooks that ``.view()`` gradients as matrices need it: torch's ``powerSGD_hook``
    fails on channels_last parameters, for example. Buckets whose gradients are
    row-major already, or sparse, go to ``hook`` without a copy.
    """

    def rearranged(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        plain = bucket.in_row_major()
        if plain is bucket:
            return hook(state, bucket)
        buffer = bucket.buffer()

        def put_back(done: Future[torch.Tensor]) -> torch.Tensor:
            plain.set_buffer(done.value().to(buffer.dtype).reshape(-1))
            for mine, theirs in zip(bucket.gradients(), plain.gradients(), strict=True):
                mine.copy_(theirs)
            return buffer

        return hook(state, plain).then(put_back)

    return _named(rearranged, "row_major", hook)


def one_at_a_time(hook: Hook) -> Hook:
    """Return a hook that calls ``hook``, waits for its future, and returns that.

    So one bucket is in flight at a time. Hooks that start collectives in callbacks need
    it, such as torch's ``powerSGD_hook`` on Gloo.
    """

    def waiting(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        future = hook(state, bucket)
        wait_for(FutureWork(future))
        return future

    return _named(waiting, "one_at_a_time", hook)


def _group_and_divisor(state: Group, bucket: GradBucket) -> tuple[ProcessGroup, int]:
    """Return the group to average over, and the number to divide by."""
    if state is None or state is bucket.process_group():
        return bucket.process_group(), bucket.divisor()
    return state, state.size()


def _check_state(state: object, kind: type) -> None:
    if not isinstance(state, kind):
        call = f"register_comm_hook(comm_hooks.{kind.__name__}(), ...)"
        raise TypeError(
            f"it needs a {kind.__name__} as its state, but got "
            f"{type(state).__name__}. What to do: {call}"
        )


def _shrinks(buffer: torch.Tensor, dtype: torch.dtype) -> bool:
    # Only dense floating values that are wider than the dtype become smaller.
    return (
        buffer.layout is torch.strided
        and buffer.dtype.is_floating_point
        and buffer.dtype.itemsize > dtype.itemsize
    )


def _named(wrapped: Hook, wrapper_name: str, hook: Hook) -> Hook:
    """Name a wrapped hook "wrapper_name(name of hook)", for errors, and return it."""
    name = f"{wrapper_name}({name_of(hook)})"
    wrapped.__name__ = wrapped.__qualname__ = name
    return wrapped
