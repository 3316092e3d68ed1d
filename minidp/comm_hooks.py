"""Comm hooks: other ways to average a bucket. Short, to be copied and changed.

    ddp.register_comm_hook(None, comm_hooks.row_major(my_hook))

A comm hook gets a full bucket with this rank's own gradients, *not divided*, and
returns a future of what they become. It is called in the same order on all ranks, and
this is the one rule to keep::

    Collectives of one group must start in the same order on every rank.

So start them in the hook itself. In a callback (``.then``) of a collective they start
whenever that one happens to be done: on Gloo that is another order on every rank, and
with two buckets in flight the ranks mix them up. `one_at_a_time` makes such hooks safe.

Bytes that a rank sends per bucket of N elements, on n ranks (ring algorithms)::

    all_reduce_hook, fp32           8 N (n-1)/n
    fp16_, bf16_compress_hook       4 N (n-1)/n
    fp32_accumulate_hook            4 N (n-1)/n     error independent of n
    int8_error_feedback_hook        N (n-1) (1 + 4/block)     less than fp32 for n < 8

The ``state`` of a hook is a process group, or None: the bucket's own group, which stays
right when `DataParallel.reset` replaces it. Hooks that remember something have a class
of states; make one per wrapped module.

What a hook cannot make smaller (16-bit or sparse gradients) it averages as it is, like
`all_reduce_hook`. Complex gradients arrive as interleaved reals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ._comm_hook import Hook, name_of
from ._grad_bucket import GradBucket
from ._waiting import then

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = [
    "Fp32State",
    "GradBucket",
    "Int8State",
    "all_reduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "fp32_accumulate_hook",
    "int8_error_feedback_hook",
    "one_at_a_time",
    "row_major",
]


def all_reduce_hook(
    state: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """The mean: ``sum over ranks of (g / n)``, in the bucket's dtype.

    The same as no hook at all, but for the last bits when n is no power of two: without
    a hook, gradients are multiplied by ``1 / n``. Takes sparse gradients as well.
    """
    group, n = _who(state, bucket)
    buffer = bucket.buffer().div_(n)  # before the sum, which might overflow
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return then(work.get_future(), lambda: buffer)


# -- 16 bits on the wire ---------------------------------------------------------------


def fp16_compress_hook(
    state: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """The mean in float16: ``sum of (fp16(g) / n)``, added in float16.

    For float32 and float64. Values above 65504 become infinite, on all ranks.
    """
    return _compress(torch.float16, state, bucket)


def bf16_compress_hook(
    state: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """The mean in bfloat16: ``sum of (bf16(g) / n)``, added in bfloat16.

    For float32 and float64: their range, with 8 significant bits. Also on Gloo.
    """
    return _compress(torch.bfloat16, state, bucket)


def _compress(
    dtype: torch.dtype, state: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    buffer = bucket.buffer()
    if not _shrinks(buffer, dtype):
        return all_reduce_hook(state, bucket)
    group, n = _who(state, bucket)
    small = buffer.to(dtype).div_(n)
    work = dist.all_reduce(small, group=group, async_op=True)
    return then(work.get_future(), lambda: buffer.copy_(small))


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` see the gradients, and send them, in float16."""
    return _in_dtype(torch.float16, hook, "fp16_compress_wrapper")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` see the gradients, and send them, in bfloat16."""
    return _in_dtype(torch.bfloat16, hook, "bf16_compress_wrapper")


def _in_dtype(dtype: torch.dtype, hook: Hook, name: str) -> Hook:
    def compressed(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        if not _shrinks(buffer, dtype):
            return hook(state, bucket)
        bucket.set_buffer(buffer.to(dtype))

        def decompress(done: Future[torch.Tensor]) -> torch.Tensor:
            bucket.set_buffer(buffer)
            return buffer.copy_(done.value().view_as(buffer))

        return hook(state, bucket).then(decompress)

    return _named(compressed, name, hook)


class Fp32State:
    """For `fp32_accumulate_hook`.

    Args:
        process_group: who averages; None: the bucket's group.
        wire_dtype: what travels, torch.bfloat16 or torch.float16.
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
        self.half_done: _Exchange | None = None

    def drop_aborted(self, bucket: GradBucket) -> None:
        """Forget an exchange of a backward that was aborted."""
        group, _ = _who(self.process_group, bucket)
        is_old = self.half_done is not None and self.half_done.group is not group
        if bucket.index() == 0 or is_old:
            self.half_done = None

    def go_on(self, exchange: _Exchange | None) -> None:
        """Start the second half of the exchange before this one."""
        if self.half_done is not None:
            self.half_done.finish()
        self.half_done = exchange


def fp32_accumulate_hook(state: Fp32State, bucket: GradBucket) -> Future[torch.Tensor]:
    """The mean, added in float32 though 16 bits travel: ``r((sum of r(g)) / n)``.

    Rank k collects everybody's k-th part (all-to-all), adds it up in float32, and hands
    the rounded mean to everybody (all-gather): as many bytes as a 16-bit all-reduce,
    whose error grows with n, but only two roundings r. With u = 2**-8 (bfloat16) or
    2**-11 (float16), up to float32's own error and underflow,
    ``|error| <= (u + u*u) * mean(|g|) + u * |mean(g)|``. For float32 and float64.

    The second collective cannot start in a callback (see the module), so it starts when
    the hook is called for the next bucket, behind that one's first::

        hook called for    bucket 0   bucket 1        bucket 2 (last)
        starts             all-to-all all-to-all      all-to-all
                                      all-gather of 0 all-gather of 1, of 2

    That call waits until the exchange that it goes on with is half done: on a network
    slower than the backward, the backward waits here instead of at its end.
    """
    _check_state(state, Fp32State)
    state.drop_aborted(bucket)
    exchange = None
    if _shrinks(bucket.buffer(), state.wire_dtype):
        exchange = _Exchange(state, bucket)
        future = exchange.future
    else:
        future = all_reduce_hook(state.process_group, bucket)
    state.go_on(exchange)
    if bucket.is_last():
        state.go_on(None)
    return future


class _Exchange:
    """One bucket on its way through all-to-all and all-gather."""

    def __init__(self, state: Fp32State, bucket: GradBucket) -> None:
        self._buffer = bucket.buffer()
        self.group, self._divisor = _who(state.process_group, bucket)
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
        """Wait for the first half, start the second; it completes the future."""
        self._work.wait()
        total = self._received.sum(0, dtype=torch.float32)
        mean = total.div_(self._divisor).to(self._sent.dtype)
        everyones = list(self._sent)  # the memory is free again
        self._work = dist.all_gather(everyones, mean, group=self.group, async_op=True)
        self._work.get_future().then(self._complete)

    def _complete(self, done: Future[Any]) -> None:
        try:
            done.value()
            gathered = self._sent.view(-1)[: self._buffer.numel()]
            self.future.set_result(self._buffer.copy_(gathered))
        except Exception as error:
            self.future.set_exception(error)  # type: ignore[arg-type]


# -- 8 bits on the wire ----------------------------------------------------------------


class Int8State:
    """For `int8_error_feedback_hook`: what rounding has left behind so far.

    Args:
        process_group: who averages; None: the bucket's group.
        block: elements that share a scale.
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
        """The error to make up for in this bucket: float32, one row per block.

        Zeros when the bucket holds other parameters than the last time (the rebuild).
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
    """The mean of 8-bit gradients; what rounding loses is added to the next gradient.

    Per block: ``v = g + residual``, ``scale = max|v| / 127``, ``q = round(v / scale)``,
    ``residual = v - scale * q``; one all-gather of q and scale; every rank decodes all
    and adds them in float32, in rank order: ``(sum of scale * q) / n``. No sum of q is
    ever formed, so nothing overflows, and all ranks get the same bits.

    Over many steps nothing is lost: the sum of all decoded gradients differs from that
    of the true ones by the last residual alone, half a scale at most. A block that
    holds an infinity or NaN becomes NaN on all ranks, so that a GradScaler sees it, and
    leaves its residual as it was.

    All floating dtypes. After Seide et al., "1-Bit SGD", Interspeech 2014, and
    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
    """
    _check_state(state, Int8State)
    buffer = bucket.buffer()
    if not _shrinks(buffer, torch.int8):
        return all_reduce_hook(state.process_group, bucket)
    group, n = _who(state.process_group, bucket)
    residual = state.residual(bucket)
    values = residual.clone()
    values.view(-1)[: buffer.numel()] += buffer
    codes, scales = _quantise(values)
    error = values - codes * scales
    residual.copy_(torch.where(scales.isfinite(), error, residual))

    # One message: scales first, as float32 must start at a multiple of 4 bytes.
    head = scales.nbytes
    message = torch.cat(
        [scales.flatten().view(torch.uint8), codes.flatten().view(torch.uint8)]
    )
    messages = [torch.empty_like(message) for _ in range(group.size())]

    def decode() -> torch.Tensor:
        total = torch.zeros_like(values)
        for theirs in messages:
            scale = theirs[:head].view(torch.float32).unsqueeze(1)
            total += theirs[head:].view(torch.int8).view(total.shape) * scale
        return buffer.copy_(total.div_(n).view(-1)[: buffer.numel()])

    work = dist.all_gather(messages, message, group, async_op=True)
    return then(work.get_future(), decode)


def _quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) and scales (float32, one column; NaN where a row is not finite)."""
    scales = values.abs().amax(dim=1, keepdim=True) / 127
    scales.masked_fill_(~scales.isfinite(), torch.nan)
    steps = values / scales.masked_fill(scales == 0, 1)  # zeros, or as good as zeros
    codes = steps.round_().nan_to_num_(0).clamp_(-127, 127).to(torch.int8)
    return codes, scales


# -- wrappers --------------------------------------------------------------------------


def row_major(hook: Hook) -> Hook:
    """Give ``hook`` gradients that are row-major contiguous, whatever the parameters.

    For hooks that ``.view()`` gradients as matrices, as torch's ``powerSGD_hook`` does,
    which fails on channels_last parameters.
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
    """Wait for each bucket in the hook, so that no two are in flight.

    For hooks that start collectives in callbacks: torch's ``powerSGD_hook`` on Gloo.
    """

    def waiting(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return _named(waiting, "one_at_a_time", hook)


def _who(state: ProcessGroup | None, bucket: GradBucket) -> tuple[ProcessGroup, int]:
    """The group, and the number to divide by."""
    if state is None or state is bucket.process_group():
        return bucket.process_group(), bucket.divisor()
    return state, state.size()


def _check_state(state: object, kind: type) -> None:
    if not isinstance(state, kind):
        name = kind.__name__
        raise TypeError(
            f"it needs a state: register_comm_hook(comm_hooks.{name}(), ...)"
        )


def _shrinks(buffer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a buffer takes fewer bytes in ``dtype``."""
    return (
        buffer.layout is torch.strided
        and buffer.dtype.is_floating_point
        and buffer.dtype.itemsize > dtype.itemsize
    )


def _named(wrapped: Hook, wrapper_name: str, hook: Hook) -> Hook:
    """Give a wrapped hook the name that errors and logs show."""
    name = f"{wrapper_name}({name_of(hook)})"
    wrapped.__name__ = wrapped.__qualname__ = name
    return wrapped
