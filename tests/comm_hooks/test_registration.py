"""A registered comm hook: its signature, what it may return, what errors say."""

from __future__ import annotations

import functools
import re
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import minidp
from minidp import CommHookError, DataParallel, GradBucket, comm_hooks
from minidp.hooks.comm_hook import CommHook
from minidp.hooks.grad_bucket import BucketInfo
from minidp.layout.plan import ParamSpec, build_layout
from tests.support.both import done

CPU = torch.device("cpu")


def bucket_of(buffer, *, sparse=False):
    shape = tuple(buffer.shape)
    stride = (1,) if not sparse else (shape[1], 1)
    spec = ParamSpec("w", shape, stride, buffer.dtype, CPU, sparse)
    (plan,) = build_layout([spec], [[0]]).buckets
    return GradBucket(plan, buffer, [buffer], BucketInfo(3, True, 2, None))


def call(returned, buffer=None, *, sparse=False):
    bucket = bucket_of(torch.ones(4) if buffer is None else buffer, sparse=sparse)
    hook = CommHook(None, lambda state, bucket: returned)
    return hook.start(bucket, ["a.weight", "a.bias"], 1).wait()


# -- signatures ------------------------------------------------------------------------


def hook_with(bucket="", returned="", more=""):
    """A hook with these annotations, which are evaluated."""
    names = {"result": done, "torch": torch, "dist": dist, "minidp": minidp}
    names |= {"Any": Any, "Future": Future, "Optional": Optional}
    head = f"def hook(state, b{bucket and ': ' + bucket}{more})"
    code = f"{head}{returned and ' -> ' + returned}: return result(b.buffer())"
    exec(compile(code, "hook", "exec", dont_inherit=True), names)
    return names["hook"]


plain = hook_with()


class Callable:
    def __call__(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        return plain(state, bucket)

    def method(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        return plain(state, bucket)


def with_scale(scale, state, bucket: GradBucket) -> Future[torch.Tensor]:
    return plain(state, bucket)


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (plain, "hook"),
        (hook_with("minidp.GradBucket", "Future[torch.Tensor]"), "hook"),
        (hook_with("dist.GradBucket", "Future"), "hook"),
        (hook_with("'Not read'", "'if text'"), "hook"),
        (hook_with("Any", "Any"), "hook"),
        (hook_with("object"), "hook"),
        (hook_with("Optional[minidp.GradBucket]"), "hook"),
        (hook_with(more=", scale=2.0"), "hook"),
        (lambda *args: plain(*args), "<lambda>"),
        (Callable(), "Callable"),
        (Callable().method, "Callable.method"),
        (functools.partial(functools.partial(with_scale), 2.0), "with_scale"),
        (
            comm_hooks.row_major(comm_hooks.fp16_compress_wrapper(plain)),
            "row_major(fp16_compress_wrapper(hook))",
        ),
    ],
)
def test_these_are_comm_hooks(hook, name):
    registered = CommHook(None, hook)
    assert registered.name == name
    result = registered.start(bucket_of(torch.ones(4)), ["w"], 0).wait()
    assert torch.equal(result, torch.ones(4))


def test_a_builtin_without_a_signature_is_taken_at_its_word():
    assert CommHook(None, max).name == "max"


@pytest.mark.parametrize("hook", [None, "all_reduce", torch.ones(2)], ids=str)
def test_not_callable(hook):
    with pytest.raises(TypeError, match="must be callable, as hook\\(state, bucket\\)"):
        CommHook(None, hook)


@pytest.mark.parametrize(
    "hook", [lambda: None, lambda bucket: None, lambda a, b, c: None, with_scale]
)
def test_wrong_number_of_arguments(hook):
    with pytest.raises(TypeError, match="must take two arguments"):
        CommHook(None, hook)


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (
            hook_with("torch.Tensor"),
            "bucket annotation should be dist.GradBucket. (hook",
        ),
        (
            hook_with("Any", "torch.Tensor"),
            "return annotation should be torch.futures.",
        ),
        (hook_with("Any", "None"), "return annotation should be torch.futures.Future["),
        (hook_with("Any", "list[torch.Tensor]"), "return annotation should be torch."),
    ],
)
def test_wrong_annotations(hook, text):
    """Torch's words come first: its tests look for them."""
    with pytest.raises(ValueError, match=re.escape(f"Communication hook: {text}")):
        CommHook(None, hook)


# -- results ---------------------------------------------------------------------------


def test_results_that_are_returned_unchanged():
    buffer, grad = torch.ones(4), torch.eye(4).to_sparse()
    assert call(done(buffer), buffer) is buffer
    assert call(done(grad), grad, sparse=True) is grad
    # ``.then`` returns torch's base class, which is no torch.futures.Future.
    chained = done(buffer).then(lambda f: f.value() * 2)
    assert call(chained).tolist() == [2.0] * 4


SPARSE = torch.eye(4).to_sparse()
TORCHS = "callback must return a torch.futures.Future object, but got "


@pytest.mark.parametrize(
    ("returned", "says", "buffer"),
    [
        (done(torch.ones(3)), "shape (3,), torch.strided, torch.float32.", None),
        (done(torch.ones(5)), "shape (5,), torch.strided, torch.float32.", None),
        (done(torch.ones(4).cfloat()), "torch.strided, torch.complex64.", None),
        (done(torch.ones(4).to_sparse()), "shape (4,), torch.sparse_coo, ", None),
        (done(torch.eye(4)), "shape (4, 4), torch.strided, torch.float32.", SPARSE),
        (done(torch.eye(5).to_sparse()), "shape (5, 5), torch.sparse_coo, ", SPARSE),
        (done(torch.ones(4)), "converts to torch.int64", torch.ones(4).long()),
        (done(None), "Found: NoneType.", None),
        (done([torch.ones(4)]), "list (take its first item in .then()).", None),
        (done(4.0), "Found: float.", None),
        (None, TORCHS + "NoneType ", None),
        (torch.ones(4), TORCHS + "Tensor ", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_results_that_do_not_fit(returned, says, buffer):
    with pytest.raises(CommHookError) as caught:
        call(returned, buffer, sparse=buffer is SPARSE)
    text = str(caught.value)
    assert text.startswith("[rank 1] The comm hook call.<locals>.<lambda> returned ")
    for part in (says, "(bucket 3)", "Expected: "):
        assert part in text
    assert "Parameters: a.weight, a.bias. What to do: fix the hook" in text


def test_errors_keep_their_cause():
    def hook(state, bucket):
        raise KeyError("boo")

    with pytest.raises(CommHookError, match="raised KeyError: 'boo'") as caught:
        CommHook(None, hook).start(bucket_of(torch.ones(4)), ["w"], 0)
    assert isinstance(caught.value.__cause__, KeyError)


# -- registering -----------------------------------------------------------------------


def test_a_bucket_follows_its_buffer(lone_group):
    """A hook may move it; a gradient may then be allocated at the old address."""
    ddp = DataParallel(nn.Linear(2, 1))
    ddp.register_comm_hook(
        None, lambda _, b: done(b.buffer().resize_(100_000).resize_(3))
    )
    ddp(torch.ones(1, 2)).sum().backward()
    (bucket,) = ddp._reducer.queue.buckets
    assert bucket._memory.owns(bucket.views[0])


def test_one_hook_can_be_registered(lone_group):
    ddp = DataParallel(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="annotation"):
        ddp.register_comm_hook(None, hook_with("torch.Tensor"))
    ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)
    with pytest.raises(RuntimeError, match=r"only be called once.*all_reduce_hook"):
        ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)


# -- states and wrappers that need no ranks --------------------------------------------


def test_states_check_their_arguments():
    with pytest.raises(ValueError, match=r"bfloat16 or torch.float16, not torch.int8"):
        comm_hooks.Fp32State(wire_dtype=torch.int8)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        comm_hooks.Int8State(block=0)


def test_residuals_belong_to_parameters_not_to_a_bucket_number():
    state = comm_hooks.Int8State(block=3)
    first, second = bucket_of(torch.ones(4)), bucket_of(torch.ones(4))
    residual = state.residual(first)
    assert residual.shape == (2, 3)
    assert state.residual(first) is residual
    assert state.residual(second) is not residual  # other parameters, as many elements
