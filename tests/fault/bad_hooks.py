"""Random comm hooks, right and wrong, and what may come of them.

A case is plain data: what the hook does to the bucket, what it brings, how it delivers
that, and when. `try_hook` plays it in a group of one rank and says what happened.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.futures import Future

from minidp import DataParallel, MiniDPError, UnsyncedGradientsError
from tests.fault.bad_inputs import DOCUMENTED, Bag, Broken, dies, values

Tensor = torch.Tensor

# ----------------------------------------------------------- what a future may bring

SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda b: b,
    "a copy, doubled": lambda b: b * 2,
    "doubled in place": lambda b: b.mul_(2),
    "a column": lambda b: (b + 1).reshape(-1, 1),
    "a row": lambda b: (b + 1).reshape(1, -1),
    "reversed": lambda b: b.flip(0),
    "a view of itself": lambda b: b.view(-1),
    "expanded": lambda b: torch.ones(1).expand(b.numel()),
    "every second": lambda b: torch.arange(2.0 * b.numel())[::2],
    "double": lambda b: b.double() * 3,
    "half": lambda b: b.half(),
    "bfloat16": lambda b: b.bfloat16(),
    "integers": lambda b: torch.arange(b.numel()),
    "booleans": lambda b: b > 0,
    "requires grad": lambda b: b.clone().requires_grad_(),
    "has a graph": lambda b: b.clone().requires_grad_() * 2,
    "a parameter": lambda b: nn.Parameter(b.clone()),
    "NaN": lambda b: torch.full_like(b, float("nan")),
    "negated view": lambda b: torch._neg_view(b.clone()),
    "inference": lambda b: _in_inference_mode(b),
}
MISFITS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda _: None,
    "a number": lambda _: 1.0,
    "a string": lambda _: "x",
    "a list": lambda b: [b],
    "a tuple": lambda b: (b,),
    "a dict": lambda b: {"x": b},
    "an exception": lambda _: ValueError("boo"),
    "a class": lambda _: torch.Tensor,
    "numpy": lambda b: np.ones(b.numel()),
    "shorter": lambda b: b[1:],
    "longer": lambda b: torch.cat([b, b]),
    "scalar": lambda b: b.sum(),
    "empty": lambda b: b[:0],
    "complex": lambda b: b.to(torch.complex64),
    "sparse": lambda b: b.to_sparse(),
    "sparse rows": lambda b: b.reshape(1, -1).to_sparse_csr(),
    "meta": lambda b: b.to("meta"),
    "quantised": lambda b: torch.quantize_per_tensor(b, 0.1, 0, torch.qint8),
    "nested": lambda b: torch.nested.nested_tensor([b]),
    "mkldnn": lambda b: b.to_mkldnn(),
    "no memory": lambda b: _without_memory(b),
}
BRINGS = SHAPES | MISFITS


def done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


def _in_inference_mode(buffer: Tensor) -> Tensor:
    with torch.inference_mode():
        return buffer.clone()


def _without_memory(buffer: Tensor) -> Tensor:
    copy = buffer.clone()
    copy.untyped_storage().resize_(0)
    return copy


# --------------------------------------------------- what a hook may do to the bucket

EFFECTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: None,
    "fills with NaN": lambda b: b.buffer().fill_(float("nan")),
    "scales": lambda b: b.buffer().mul_(3),
    "zeroes a gradient": lambda b: b.gradients()[0].zero_(),
    "sets the buffer": lambda b: b.set_buffer(b.buffer() * 5),
    "sets a half buffer": lambda b: b.set_buffer(b.buffer().half()),
    "sets no buffer": lambda b: b.set_buffer(None),
    "asks everything": lambda b: [
        getattr(b, name)()
        for name in ("index", "is_last", "parameters", "divisor", "process_group")
    ],
    "nulls .grad": lambda b: _set_grad(b.parameters()[0], None),
    "replaces .grad": lambda b: _set_grad(
        b.parameters()[0], torch.zeros_like(b.parameters()[0])
    ),
    "runs a backward": lambda _: _own_backward(),
    "an all-reduce": lambda b: dist.all_reduce(b.buffer(), group=b.process_group()),
    "turns grad on": lambda b: b.buffer().requires_grad_(),
}
# Of what lies beneath the buffer: its size, its memory.
TAMPERS: dict[str, Callable[[Any], Any]] = {
    "shrinks the buffer": lambda b: b.buffer().resize_(1),
    "empties the buffer": lambda b: b.buffer().resize_(0),
    "grows the buffer": lambda b: b.buffer().resize_(b.buffer().numel() + 7),
    "reshapes the buffer": lambda b: b.buffer().unsqueeze_(0),
    "moves the buffer": lambda b: b.buffer().set_(torch.ones(b.buffer().numel())),
    "swaps the data": lambda b: setattr(
        b.buffer(), "data", torch.ones(b.buffer().numel())
    ),
    "changes the dtype": lambda b: setattr(b.buffer(), "data", b.buffer().double()),
    "frees the memory": lambda b: b.buffer().untyped_storage().resize_(0),
    "enlarges the memory": lambda b: b.buffer().untyped_storage().resize_(1 << 16),
}
TOUCHES = EFFECTS | TAMPERS


def _set_grad(param: Any, grad: Any) -> None:
    param.grad = grad


def _own_backward() -> None:
    with torch.enable_grad():
        (torch.ones(2, requires_grad=True) * 2).sum().backward()


# ------------------------------------------------------------------- how it delivers


def _later(make: Callable[[], Any]) -> Any:
    """Completed from another thread, at once or a little later."""
    future: Any = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def _raise(error: BaseException) -> Any:
    raise error


def _failed(error: Exception) -> Any:
    future: Any = Future()
    future.set_exception(error)
    return future


def _twice(value: Any) -> Any:
    future = done(value)
    future.set_result(value)
    return future


class _Strange(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


DELIVERIES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "at once": lambda make: done(make()),
    "in a callback": lambda make: done(0).then(lambda _: make()),
    "from a thread": _later,
    "thread and callback": lambda make: _later(make).then(lambda f: f.value()),
}
MISDELIVERIES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "no future": lambda make: make(),
    "a future of a future": lambda make: done(done(make())),
    "another kind of future": lambda make: concurrent.futures.Future(),
    "a class": lambda _: Future,
    "a work": lambda _: dist.all_reduce(torch.ones(1), async_op=True),
    "futures of all": lambda make: torch.futures.collect_all([done(make())]),
    "set twice": lambda make: _twice(make()),
    "raises": lambda _: _raise(ValueError("boo")),
    "raises KeyError": lambda _: _raise(KeyError("boo")),
    "raises StopIteration": lambda _: _raise(StopIteration()),
    "raises AssertionError": lambda _: _raise(AssertionError()),
    "raises without text": lambda _: _raise(_Strange()),
    "failed": lambda _: _failed(OSError("boo")),
    "failed without text": lambda _: _failed(_Strange()),
    "fails in a callback": lambda _: done(0).then(lambda f: _raise(ValueError("boo"))),
    "fails in a thread": lambda _: _later(lambda: _raise(ValueError("boo"))),
    "a coroutine": lambda _: (i for i in range(2)),
}
WAYS = DELIVERIES | MISDELIVERIES

# What cannot be registered at all.
NO_HOOKS: dict[str, Any] = {
    "None": None,
    "a number": 5,
    "no arguments": lambda: None,
    "one argument": lambda bucket: None,
    "three arguments": lambda a, b, c: None,
    "keywords only": lambda *, state, bucket: None,
    "a class": Future,
    "a string": "allreduce",
    "a future": Future(),
}
HOOKS_OF_ANY_FORM: dict[str, Any] = {
    "a builtin": max,
    "any arguments": lambda *_: None,
    "defaults": lambda state, bucket=None, more=1: None,
    "a method": {}.get,
    "a type": int,
    "a partial": functools.partial(lambda a, b: None, 1, 2, 3),
}
FORMS = NO_HOOKS | HOOKS_OF_ANY_FORM

# ------------------------------------------------------------------------------ cases


@dataclass(frozen=True)
class Case:
    """One hook: on bucket ``bucket`` (-1: on all) of step ``step`` it goes wrong."""

    touch: str
    brings: str
    way: str
    step: int
    bucket: int
    options: tuple[tuple[str, Any], ...]
    form: str = ""  # registered first; must be refused, or fail at its first call


OPTIONS = st.sampled_from(
    [
        (),
        (("gradient_as_bucket_view", True),),
        (("find_unused_parameters", True),),
        (("static_graph", True),),
        (("find_unused_parameters", True), ("gradient_as_bucket_view", True)),
    ]
)
CAPS = st.sampled_from([(("bucket_cap_mb", 8 / 2**20),), ()])


def _mostly(right: dict[str, Any], everything: dict[str, Any]) -> Any:
    return st.sampled_from(sorted(right)) | st.sampled_from(sorted(everything))


cases = st.builds(
    Case,
    touch=st.just("nothing") | st.sampled_from(sorted(TOUCHES)),
    brings=_mostly(SHAPES, BRINGS),
    way=_mostly(DELIVERIES, WAYS),
    step=st.integers(0, 2),
    bucket=st.integers(-1, 1),
    options=st.tuples(OPTIONS, CAPS).map(lambda both: both[0] + both[1]),
    form=st.sampled_from([""] * 9 + sorted(FORMS)),
)


class Hook:
    """All-reduces alone, until it is its turn to do as the case says."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.step = -1
        self.is_good = False
        self.expected: list[tuple[Any, Tensor]] = []  # (parameter, gradient)

    def __call__(self, state: Any, bucket: Any) -> Any:
        case = self.case
        is_here = case.bucket in (-1, bucket.index()) and case.step == self.step
        if self.is_good or not is_here:
            self._note(bucket, bucket.buffer())
            return done(bucket.buffer())
        original = bucket.buffer()
        # What was there before: a tampering hook still says what it wants.
        buffer = original.clone()
        slots, params = bucket._plan.slots, bucket.parameters()
        expected = self.expected  # of this step: a thread may be late
        TOUCHES[case.touch](bucket)
        if case.touch not in TAMPERS and isinstance(bucket.buffer(), Tensor):
            buffer = original

        def make() -> Any:
            with torch.no_grad():
                value = BRINGS[case.brings](buffer)
                if case.brings in SHAPES:
                    _expect(expected, slots, params, value)
            return value

        return WAYS[case.way](make)

    def _note(self, bucket: Any, buffer: Tensor) -> None:
        _expect(self.expected, bucket._plan.slots, bucket.parameters(), buffer)


def _expect(
    expected: list[tuple[Any, Tensor]], slots: Any, params: Any, value: Any
) -> None:
    flat = value.detach().clone().reshape(-1).to(torch.float32)
    for slot, param in zip(slots, params, strict=True):
        grad = flat.as_strided(slot.shape, slot.stride, slot.offset).clone()
        expected.append((param, grad))


def try_hook(case: Case) -> str:
    """Play the case, check the laws, and say what happened in a word or two.

    Laws: a hook that is none is refused with a documented exception; a backward brings
    what the hook's future brought, or raises an error of ours; then no optimizer steps,
    and after `reset` gradients are right. Nothing of the object stays behind.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Bag(values(3, 2), values(5))
        ddp = DataParallel(module, **dict(case.options))
        outcome = _play(ddp, case)
        reference = weakref.ref(ddp._reducer)
        del ddp
        if not dies(reference):
            raise Broken("the reducer stays alive")
        return outcome


def _play(ddp: DataParallel, case: Case) -> str:
    hook = Hook(case)
    if case.form:
        try:
            ddp.register_comm_hook(None, FORMS[case.form])
        except DOCUMENTED as error:
            refused = f"refused: {type(error).__name__}"
            _check_refusal(ddp, hook)
            return refused
        if case.form in NO_HOOKS:
            raise Broken(f"accepted as a hook: {case.form}")
    else:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    outcome = "right"
    for step in range(3):
        outcome = _step(ddp, hook, optimizer, step)
        if outcome != "right":
            break
    if outcome != "right" and not case.form:
        try:
            _recover(ddp, hook, optimizer)
        finally:
            if ddp.process_group is not dist.group.WORLD:
                dist.destroy_process_group(ddp.process_group)  # it has threads
    return outcome


def _step(ddp: DataParallel, hook: Hook, optimizer: Any, step: int) -> str:
    hook.step, hook.expected = step, []
    ddp.zero_grad()
    loss = ddp(torch.ones(1)).sum()
    try:
        loss.backward()
    except MiniDPError as error:
        outcome = type(error).__name__
    else:
        _check(ddp, hook)
        optimizer.step()
        return "right"
    held = [p for p in ddp.parameters() if p.grad is not None]
    try:
        optimizer.step()
    except UnsyncedGradientsError:
        return outcome
    if held:
        raise Broken(f"an optimizer stepped after {outcome}")
    return outcome


def _check(ddp: DataParallel, hook: Hook) -> None:
    seen = {id(param) for param, _ in hook.expected}
    if len(seen) != len([*ddp.parameters()]):
        raise Broken(f"accepted, but gradients of {len(seen)} parameters were brought")
    for param, expected in hook.expected:
        found = param.grad
        if found is None or not torch.allclose(found, expected, equal_nan=True):
            raise Broken(f"{found} in .grad, but the hook brought {expected}")


def _recover(ddp: DataParallel, hook: Hook, optimizer: Any) -> None:
    hook.is_good = True
    ddp.reset()
    for param in ddp.parameters():
        param.data = torch.ones_like(param)
    for step in range(3, 5):
        outcome = _step(ddp, hook, optimizer, step)
        if outcome != "right":
            raise Broken(f"{outcome} after reset()")


def _check_refusal(ddp: DataParallel, hook: Hook) -> None:
    """A refused hook leaves no trace: a right one can be registered."""
    hook.is_good = True
    ddp.register_comm_hook(None, hook)
    outcome = _step(ddp, hook, torch.optim.SGD(ddp.parameters(), lr=0.1), 0)
    if outcome != "right":
        raise Broken(f"{outcome} after a refused hook")
