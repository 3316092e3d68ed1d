"""Random comm hooks, right and wrong, and what may come of them.

A case is plain data: what the hook does to the bucket, what it brings, how it delivers
that, and when. `try_hook` plays it in a group of one rank and says what happened.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.futures import Future

from minidp import DataParallel, MiniDPError, UnsyncedGradientsError
from tests.support.both import done
from tests.wrong_uses.bad_inputs import DOCUMENTED, Broken, bag, dies

# ------------------------------------------- what a future may bring, of the buffer

SHAPES = {
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
    "inference": torch.inference_mode()(torch.clone),
}


def without_memory(buffer):
    copy = buffer.clone()
    copy.untyped_storage().resize_(0)
    return copy


BRINGS = SHAPES | {
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
    "scalar": torch.sum,
    "empty": lambda b: b[:0],
    "complex": lambda b: b.to(torch.complex64),
    "sparse": lambda b: b.to_sparse(),
    "sparse rows": lambda b: b.reshape(1, -1).to_sparse_csr(),
    "meta": lambda b: b.to("meta"),
    "quantised": lambda b: torch.quantize_per_tensor(b, 0.1, 0, torch.qint8),
    "nested": lambda b: torch.nested.nested_tensor([b]),
    "mkldnn": lambda b: b.to_mkldnn(),
    "no memory": without_memory,
}

# --------------------------------------------------- what a hook may do to the bucket


def ones_of(bucket):
    return torch.ones(bucket.buffer().numel())


def set_grad(param, make=lambda _: None):
    param.grad = make(param)


@torch.enable_grad()
def own_backward(_bucket):
    (torch.ones(2, requires_grad=True) * 2).sum().backward()


QUESTIONS = ("index", "is_last", "parameters", "divisor", "process_group")
EFFECTS = {
    "nothing": lambda _: None,
    "fills with NaN": lambda b: b.buffer().fill_(float("nan")),
    "scales": lambda b: b.buffer().mul_(3),
    "zeroes a gradient": lambda b: b.gradients()[0].zero_(),
    "sets the buffer": lambda b: b.set_buffer(b.buffer() * 5),
    "sets a half buffer": lambda b: b.set_buffer(b.buffer().half()),
    "sets no buffer": lambda b: b.set_buffer(None),
    "asks everything": lambda b: [getattr(b, name)() for name in QUESTIONS],
    "nulls .grad": lambda b: set_grad(b.parameters()[0]),
    "replaces .grad": lambda b: set_grad(b.parameters()[0], torch.zeros_like),
    "runs a backward": own_backward,
    "an all-reduce": lambda b: dist.all_reduce(b.buffer(), group=b.process_group()),
    "turns grad on": lambda b: b.buffer().requires_grad_(),
}
# Of what lies beneath the buffer: its size, its memory.
TAMPERS = {
    "shrinks the buffer": lambda b: b.buffer().resize_(1),
    "empties the buffer": lambda b: b.buffer().resize_(0),
    "grows the buffer": lambda b: b.buffer().resize_(b.buffer().numel() + 7),
    "reshapes the buffer": lambda b: b.buffer().unsqueeze_(0),
    "moves the buffer": lambda b: b.buffer().set_(ones_of(b)),
    "swaps the data": lambda b: setattr(b.buffer(), "data", ones_of(b)),
    "changes the dtype": lambda b: setattr(b.buffer(), "data", b.buffer().double()),
    "frees the memory": lambda b: b.buffer().untyped_storage().resize_(0),
    "enlarges the memory": lambda b: b.buffer().untyped_storage().resize_(1 << 16),
}
TOUCHES = EFFECTS | TAMPERS

# ------------------------------------------------------------------- how it delivers


def failed(error):
    future = Future()
    future.set_exception(error)
    return future


def twice(value):
    future = done(value)
    future.set_result(value)
    return future


def later(make):
    """Return a future that another thread completes with what ``make()`` returns."""
    future = Future()

    def run():
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def fail(error):
    raise error


class Strange(Exception):
    """An exception whose __str__ raises."""

    def __str__(self):
        raise ValueError("no text")


DELIVERIES = {
    "at once": lambda make: done(make()),
    "in a callback": lambda make: done(0).then(lambda _: make()),
    "from a thread": later,
    "thread and callback": lambda make: later(make).then(lambda f: f.value()),
}
WAYS = DELIVERIES | {
    "no future": lambda make: make(),
    "a future of a future": lambda make: done(done(make())),
    "another kind of future": lambda make: concurrent.futures.Future(),
    "a class": lambda _: Future,
    "a work": lambda _: dist.all_reduce(torch.ones(1), async_op=True),
    "futures of all": lambda make: torch.futures.collect_all([done(make())]),
    "set twice": lambda make: twice(make()),
    "raises": lambda _: fail(ValueError("boo")),
    "raises KeyError": lambda _: fail(KeyError("boo")),
    "raises StopIteration": lambda _: fail(StopIteration()),
    "raises AssertionError": lambda _: fail(AssertionError()),
    "raises without text": lambda _: fail(Strange()),
    "failed": lambda _: failed(OSError("boo")),
    "failed without text": lambda _: failed(Strange()),
    "fails in a callback": lambda _: done(0).then(lambda f: fail(ValueError("boo"))),
    "fails in a thread": lambda _: later(lambda: fail(ValueError("boo"))),
    "a coroutine": lambda _: (i for i in range(2)),
}
NO_HOOKS = {  # what cannot be registered at all
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
FORMS = NO_HOOKS | {
    "a builtin": max,
    "any arguments": lambda *_: None,
    "defaults": lambda state, bucket=None, more=1: None,
    "a method": {}.get,
    "a type": int,
    "a partial": functools.partial(lambda a, b: None, 1, 2, 3),
}

# ------------------------------------------------------------------------------ cases

TINY = (("bucket_cap_mb", 8 / 2**20),)


@dataclass(frozen=True)
class Case:
    """A hook that goes wrong on bucket ``bucket`` (-1: on all) of step ``step``."""

    touch: str = "nothing"
    brings: str = "itself"
    way: str = "at once"
    step: int = 1
    bucket: int = 0
    options: tuple[tuple[str, Any], ...] = TINY
    form: str = ""  # registered first; must be refused, or fail at its first call


def _mostly(right, everything):
    return st.sampled_from(sorted(right)) | st.sampled_from(sorted(everything))


_flags = [
    *((), ("gradient_as_bucket_view",), ("find_unused_parameters",)),
    *(("static_graph",), ("find_unused_parameters", "gradient_as_bucket_view")),
]
cases = st.builds(
    Case,
    touch=st.just("nothing") | st.sampled_from(sorted(TOUCHES)),
    brings=_mostly(SHAPES, BRINGS),
    way=_mostly(DELIVERIES, WAYS),
    step=st.integers(0, 2),
    bucket=st.integers(-1, 1),
    options=st.builds(
        lambda names, cap: (*((name, True) for name in names), *cap),
        st.sampled_from(_flags),
        st.sampled_from([TINY, ()]),
    ),
    form=st.sampled_from([""] * 9 + sorted(FORMS)),
)


class Hook:
    """A comm hook that returns the bucket unchanged, and once what the case says."""

    def __init__(self, case):
        self.case, self.step = case, -1
        self.is_good = False
        self.expected = []  # (parameter, gradient)

    def __call__(self, state, bucket):
        case, original = self.case, bucket.buffer()
        slots, params = bucket._plan.slots, bucket.parameters()
        expected = self.expected  # of this step: a thread may be late

        def expect(value):
            flat = value.detach().clone().reshape(-1).to(torch.float32)
            for slot, param in zip(slots, params, strict=True):
                grad = flat.as_strided(slot.shape, slot.stride, slot.offset).clone()
                expected.append((param, grad))

        is_here = case.bucket in (-1, bucket.index()) and case.step == self.step
        if self.is_good or not is_here:
            expect(original)
            return done(original)
        # What was there before: a tampering hook still says what it wants.
        buffer = original.clone()
        TOUCHES[case.touch](bucket)
        if case.touch not in TAMPERS and isinstance(bucket.buffer(), torch.Tensor):
            buffer = original

        def make():
            with torch.no_grad():
                value = BRINGS[case.brings](buffer)
                if case.brings in SHAPES:
                    expect(value)
            return value

        return WAYS[case.way](make)


def try_hook(case: Case) -> str:
    """Play the case, check the laws, and say what happened in a word or two.

    Laws: a hook that is none is refused with a documented exception; a backward brings
    what the hook's future brought, or raises an error of ours; then no optimizer steps,
    and after `reset` gradients are right. Nothing of the object stays behind.
    """
    ddp = DataParallel(bag(), **dict(case.options))
    outcome = _play(ddp, case)
    reference = weakref.ref(ddp._reducer)
    del ddp
    if not dies(reference):
        raise Broken("the reducer stays alive")
    return outcome


def _play(ddp, case):
    hook = Hook(case)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    try:
        ddp.register_comm_hook(None, FORMS[case.form] if case.form else hook)
    except DOCUMENTED as error:
        outcome = f"refused: {type(error).__name__}"
    else:
        if case.form in NO_HOOKS:
            raise Broken(f"accepted as a hook: {case.form}")
        steps = (_step(ddp, hook, optimizer, step) for step in range(3))
        outcome = next((end for end in steps if end != "right"), "right")
    if outcome.startswith("refused"):  # and leaves no trace
        hook.is_good = True
        ddp.register_comm_hook(None, hook)
        _step_rightly(ddp, hook, optimizer, 0)
    elif outcome != "right" and not case.form:
        try:
            hook.is_good = True
            ddp.reset()
            for param in ddp.parameters():
                param.data = torch.ones_like(param)
            for step in range(3, 5):
                _step_rightly(ddp, hook, optimizer, step)
        finally:
            if ddp.process_group is not dist.group.WORLD:
                dist.destroy_process_group(ddp.process_group)  # it has threads
    return outcome


def _step_rightly(ddp, hook, optimizer, step):
    outcome = _step(ddp, hook, optimizer, step)
    if outcome != "right":
        raise Broken(f"{outcome} after reset(), or after a refused hook")


def _step(ddp, hook, optimizer, step):
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


def _check(ddp, hook):
    seen = {id(param) for param, _ in hook.expected}
    if len(seen) != len([*ddp.parameters()]):
        raise Broken(f"accepted, but gradients of {len(seen)} parameters were brought")
    for param, expected in hook.expected:
        found = param.grad
        if found is None or not torch.allclose(found, expected, equal_nan=True):
            raise Broken(f"{found} in .grad, but the hook brought {expected}")
