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
from minidp._comm_hook import CommHook, name_of
from minidp._grad_bucket import Turn
from minidp._layout import ParamSpec, build_layout

CPU = torch.device("cpu")


def bucket_of(buffer, *, sparse=False):
    shape = tuple(buffer.shape)
    stride = (1,) if not sparse else (shape[1], 1)
    spec = ParamSpec("w", shape, stride, buffer.dtype, CPU, sparse)
    (plan,) = build_layout([spec], [[0]]).buckets
    return GradBucket(plan, buffer, [buffer], Turn(3, True, 2, None))


def done(value):
    future = Future()
    future.set_result(value)
    return future


def call(returned, buffer=None, *, sparse=False):
    bucket = bucket_of(torch.ones(4) if buffer is None else buffer, sparse=sparse)
    hook = CommHook(None, lambda state, bucket: returned)
    return hook.start(bucket, ["a.weight", "a.bias"], 1).wait()


# -- signatures ------------------------------------------------------------------------


def plain(state, bucket):
    return done(bucket.buffer())


def with_ours(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
    return plain(state, bucket)


def with_torchs(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return plain(state, bucket)


def with_strings(state: "object", bucket: "minidp.GradBucket") -> "Future[Any]":  # noqa: UP037
    return plain(state, bucket)


def with_unknown_names(state: Nowhere, bucket: Neither) -> Nor:  # noqa: F821
    return plain(state, bucket)


def with_any(state: Any, bucket: Any) -> Any:
    return plain(state, bucket)


def with_object(state: object, bucket: object) -> Future:
    return plain(state, bucket)


def with_union(state: Any, bucket: Optional[GradBucket]) -> Future:  # noqa: UP045
    return plain(state, bucket)


def with_other_names(pg, b):
    return plain(pg, b)


def with_default(state, bucket, scale=2.0):
    return plain(state, bucket)


def with_everything(*args):
    return plain(*args)


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
        (plain, "plain"),
        (with_ours, "with_ours"),
        (with_torchs, "with_torchs"),
        (with_strings, "with_strings"),
        (with_unknown_names, "with_unknown_names"),
        (with_any, "with_any"),
        (with_object, "with_object"),
        (with_union, "with_union"),
        (with_other_names, "with_other_names"),
        (with_default, "with_default"),
        (with_everything, "with_everything"),
        (Callable(), "Callable"),
        (Callable().method, "Callable.method"),
        (functools.partial(with_scale, 2.0), "with_scale"),
        (functools.partial(functools.partial(with_scale), 2.0), "with_scale"),
        (comm_hooks.bf16_compress_hook, "bf16_compress_hook"),
        (
            comm_hooks.row_major(comm_hooks.fp16_compress_wrapper(plain)),
            "row_major(fp16_compress_wrapper(plain))",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_these_are_comm_hooks(hook, name):
    registered = CommHook(None, hook)
    assert registered.name == name == name_of(hook)
    bucket = bucket_of(torch.ones(4))
    if name != "bf16_compress_hook":  # that one needs a group
        result = registered.start(bucket, ["w"], 0).wait()
        assert torch.equal(result, torch.ones(4))


@pytest.mark.parametrize("hook", [None, 3, "all_reduce", torch.ones(2)], ids=str)
def test_not_callable(hook):
    with pytest.raises(TypeError, match="must be callable, as hook\\(state, bucket\\)"):
        CommHook(None, hook)


@pytest.mark.parametrize(
    "hook", [lambda: None, lambda bucket: None, lambda a, b, c: None, with_scale]
)
def test_wrong_number_of_arguments(hook):
    with pytest.raises(TypeError, match="must take two arguments"):
        CommHook(None, hook)


def wants_tensor(state: object, bucket: torch.Tensor) -> Future[torch.Tensor]: ...
def wants_strange(state: object, bucket: "torch.Tensor"): ...  # noqa: UP037
def gives_tensor(state: object, bucket: GradBucket) -> torch.Tensor: ...
def gives_none(state: object, bucket: GradBucket) -> None: ...
def gives_list(state: object, bucket: GradBucket) -> list[torch.Tensor]: ...


@pytest.mark.parametrize("hook", [wants_tensor, wants_strange])
def test_wrong_bucket_annotation(hook):
    """In torch's words, which its tests look for; then in ours."""
    with pytest.raises(ValueError, match="annotation should be") as caught:
        CommHook(None, hook)
    assert str(caught.value) == (
        "Communication hook: bucket annotation should be dist.GradBucket. "
        f"({hook.__name__} has <class 'torch.Tensor'>; minidp.GradBucket will do as "
        "well.)"
    )


@pytest.mark.parametrize("hook", [gives_tensor, gives_none, gives_list])
def test_wrong_return_annotation(hook):
    torchs = (
        "Communication hook: return annotation should be "
        "torch.futures.Future[torch.Tensor]. "
    )
    with pytest.raises(ValueError, match=re.escape(f"{torchs}({hook.__name__} has ")):
        CommHook(None, hook)


def test_a_builtin_without_a_signature_is_taken_at_its_word():
    assert CommHook(None, max).name == "max"


# -- results ---------------------------------------------------------------------------


def test_the_payload_itself_comes_back_as_it_is():
    buffer = torch.ones(4)
    assert call(done(buffer), buffer) is buffer


@pytest.mark.parametrize(
    "result",
    [
        torch.full((4,), 2.0),
        torch.full((2, 2), 2.0),
        torch.full((4,), 2.0, dtype=torch.float16),
        torch.full((4,), 2.0, dtype=torch.float64),
        torch.full((4,), 2, dtype=torch.int32),
        torch.full((2, 4), 2.0)[:, ::2],
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_tensors_of_as_many_elements_fit(result):
    found = call(done(result))
    assert found.shape == (4,)
    assert found.tolist() == [2.0] * 4


def test_what_then_gives_is_a_future():
    """``.then`` returns torch's base class, which is no torch.futures.Future."""
    chained = done(torch.ones(4)).then(lambda f: f.value() * 2)
    assert call(chained).tolist() == [2.0] * 4


def test_a_sparse_result_for_a_sparse_gradient():
    grad = torch.eye(4).to_sparse()
    assert call(done(grad), grad, sparse=True) is grad


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (torch.ones(3), "shape (3,), torch.strided, torch.float32"),
        (torch.ones(5), "shape (5,), torch.strided, torch.float32"),
        (torch.ones(4).cfloat(), "shape (4,), torch.strided, torch.complex64"),
        (torch.ones(4).to_sparse(), "shape (4,), torch.sparse_coo, torch.float32"),
        (None, "NoneType"),
        ([torch.ones(4)], "list (take its first item in .then())"),
        (4.0, "float"),
    ],
    ids=str,
)
def test_results_that_do_not_fit(result, found):
    with pytest.raises(CommHookError) as caught:
        call(done(result))
    assert f"Found: {found}." in str(caught.value)
    assert "Expected: one tensor of 4 elements" in str(caught.value)


@pytest.mark.parametrize(
    "result", [torch.eye(4), torch.eye(5).to_sparse()], ids=["dense", "other shape"]
)
def test_results_that_do_not_fit_a_sparse_gradient(result):
    with pytest.raises(CommHookError, match="does not fit the bucket"):
        call(done(result), torch.eye(4).to_sparse(), sparse=True)


def test_floats_do_not_fit_into_integers():
    with pytest.raises(CommHookError, match=r"converts to torch.int64"):
        call(done(torch.ones(4)), torch.ones(4, dtype=torch.int64))


def test_text_of_an_error():
    with pytest.raises(CommHookError) as caught:
        call(done(torch.ones(3)))
    assert str(caught.value) == (
        "[rank 1] The comm hook call.<locals>.<lambda> returned a future whose tensor "
        "does not fit the bucket (bucket 3). Expected: one tensor of 4 elements "
        "(layout torch.strided, a dtype that converts to torch.float32). Found: shape "
        "(3,), torch.strided, torch.float32. Parameters: a.weight, a.bias. What to do: "
        "mend the hook, or look for a rank that died; then call reset() on all ranks, "
        "and zero_grad()."
    )


@pytest.mark.parametrize("returned", [None, torch.ones(4), 3], ids=str)
def test_no_future(returned):
    torchs = "callback must return a torch.futures.Future object, but got"
    with pytest.raises(CommHookError, match=f"{torchs} {type(returned).__name__} "):
        call(returned)


def test_errors_keep_their_cause():
    def hook(state, bucket):
        raise KeyError("boo")

    with pytest.raises(CommHookError, match="raised KeyError: 'boo'") as caught:
        CommHook(None, hook).start(bucket_of(torch.ones(4)), ["w"], 0)
    assert isinstance(caught.value.__cause__, KeyError)


# -- registering -----------------------------------------------------------------------


class Resizes:
    """Moves the buffer's memory, and remembers what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, state, bucket):
        self.calls.append((state, bucket.index(), bucket.is_last(), bucket.divisor()))
        numel = bucket.buffer().numel()
        bucket.buffer().resize_(numel + 100_000)
        bucket.buffer().resize_(numel)
        return done(bucket.buffer().mul_(3))


@pytest.mark.parametrize("view", [False, True])
def test_a_bucket_follows_its_buffer(lone_group, view):
    net = nn.Linear(2, 1, bias=False)
    ddp = DataParallel(net, gradient_as_bucket_view=view)
    hook = Resizes()
    ddp.register_comm_hook("state", hook)
    for _ in range(3):
        ddp(torch.tensor([[1.0, 2.0]])).sum().backward()
        assert net.weight.grad.tolist() == [[3.0, 6.0]]
        (bucket,) = ddp._reducer.pipeline.buckets
        assert bucket._memory.owns(bucket.views[0])
        ddp.zero_grad(set_to_none=not view)
    assert hook.calls == [("state", 0, True, 1)] * 3


def test_only_once(lone_group):
    ddp = DataParallel(nn.Linear(2, 1))
    ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)
    with pytest.raises(RuntimeError, match=r"only be called once.*all_reduce_hook"):
        ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)


def test_a_refused_hook_leaves_the_place_free(lone_group):
    ddp = DataParallel(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="annotation"):
        ddp.register_comm_hook(None, wants_tensor)
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


def test_public_names():
    assert minidp.comm_hooks is comm_hooks
    assert comm_hooks.GradBucket is GradBucket
    assert [name for name in comm_hooks.__all__ if not hasattr(comm_hooks, name)] == []
