"""Bad arguments and bad comm hooks: documented exceptions, no crash, nothing left.

With more of them: ``python -m tests.fault.fuzz --inputs 10000 --hooks 5000``.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch

from minidp import DataParallel, native
from minidp._autograd import GradHooks
from minidp._guard import Guard
from tests.fault import bad_hooks, bad_inputs
from tests.fault.bad_hooks import Case, try_hook
from tests.fault.bad_inputs import (
    DOCUMENTED,
    Broken,
    Call,
    make,
    nodes_of,
    try_call,
)
from tests.fault.fuzz import fuzz

pytestmark = pytest.mark.usefixtures("lone_group")
TINY = (("bucket_cap_mb", 8 / 2**20),)

# What was found, and what is allowed: the outcome of each.
CALLS: dict[str, tuple[Call, str]] = {
    "no float holds it": (
        Call("two parameters", (("bucket_cap_mb", "10**400"),)),
        "ValueError",
    ),
    "infinite once in bytes": (
        Call("two parameters", (("bucket_cap_mb_list", "[1e308]"),)),
        "ValueError",
    ),
    "a time that no float holds": (
        Call("two parameters", (("hang_timeout", "10**400"),)),
        "ValueError",
    ),
    "ignore list of numbers": (Call("ignores numbers", ()), "TypeError"),
    "half a mesh": (
        Call("two parameters", (("device_mesh", "half a mesh"),)),
        "TypeError",
    ),
    "a flag that is infinite": (
        Call("two parameters", (("broadcast_buffers", "inf"),)),
        "accepted",
    ),
    "a flag without a truth": (
        Call("two parameters", (("forward_sync_buffers", "two tensors"),)),
        "RuntimeError",
    ),
    "fails in the broadcast": (Call("expanded", ()), "CollectiveError"),
    "several wrong ones": (
        Call(
            "two parameters",
            (("bucket_cap_mb", "nan"), ("unsynced", "'x'"), ("device_ids", "[0, 1]")),
        ),
        "ValueError",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments(name: str) -> None:
    call, outcome = CALLS[name]
    assert try_call(call) == outcome


@pytest.mark.parametrize("name", bad_inputs.GOOD)
def test_good_modules_are_accepted(name: str) -> None:
    assert try_call(Call(name, ())) == "accepted"


HOOKS: dict[str, tuple[Case, str]] = {
    "brings freed memory": (
        Case("nothing", "no memory", "at once", 1, 0, TINY),
        "CommHookError",
    ),
    "frees the buffer's memory": (
        Case("frees the memory", "itself", "at once", 1, 0, TINY),
        "CommHookError",
    ),
    "moves the buffer": (
        Case("moves the buffer", "a copy, doubled", "at once", 1, 0, TINY),
        "CommHookError",
    ),
    "moves the buffer, as views": (
        Case(
            "swaps the data",
            "itself",
            "from a thread",
            1,
            -1,
            (("gradient_as_bucket_view", True), *TINY),
        ),
        "CommHookError",
    ),
    "an error that the future keeps": (
        Case("nothing", "itself", "failed", 1, 0, TINY),
        "CommHookError",
    ),
    "an error without text": (
        Case("nothing", "itself", "raises without text", 1, 0, TINY),
        "CommHookError",
    ),
    "a meta tensor": (
        Case("nothing", "meta", "at once", 1, 0, TINY),
        "CommHookError",
    ),
    "late, in another dtype": (
        Case("nothing", "double", "thread and callback", 1, -1, TINY),
        "right",
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_bad_hooks(name: str) -> None:
    case, outcome = HOOKS[name]
    assert try_hook(case) == outcome


@pytest.mark.parametrize(
    ("what", "cases"),
    [(try_call, bad_inputs.calls), (try_hook, bad_hooks.cases)],
    ids=["constructor", "comm hooks"],
)
def test_random_ones(what: Any, cases: Any) -> None:
    settings = hypothesis.settings(
        hypothesis.settings.default,
        max_examples=5 * hypothesis.settings.default.max_examples,
    )
    outcomes = fuzz(what, cases, settings)
    assert len(outcomes) >= 3, outcomes  # some go right, some go wrong
    right = outcomes["accepted"] + outcomes["right"]
    assert outcomes.total() / 10 < right < outcomes.total() * 0.9, outcomes


# ------------------------------------------------------------------------- on two ranks


def one_is_wrong(ctx: Any, call: Call, wrong: int) -> tuple[str, bool]:
    """The error of a constructor that is called wrongly on one rank, or right."""
    error = ""
    rightly = Call("two parameters", ())
    module, arguments = make(call if ctx.rank == wrong else rightly)
    try:
        ddp = DataParallel(module, process_group=ctx.group, **arguments)
    except DOCUMENTED as caught:
        error = f"{type(caught).__name__}: {caught}"
    ddp = DataParallel(bad_inputs.bag(), process_group=ctx.group)
    ddp(torch.ones(1)).backward()
    wanted = [6 * p.detach() for p in ddp.parameters()]
    pairs = zip(ddp.parameters(), wanted, strict=True)
    return error, all(torch.allclose(p.grad, w) for p, w in pairs)


WRONG_ON_ONE = [
    Call("all frozen", ()),
    Call("no parameters", ()),
    Call("meta", ()),
    Call("lazy", ()),
    Call("one frozen", ()),
    Call("None", ()),
    Call("ignores numbers", ()),
    Call("sparse buffer", ()),
    Call("two parameters", (("bucket_cap_mb", "nan"),)),
    Call("two parameters", (("bucket_cap_mb", "10**400"), ("unsynced", "'x'"))),
    Call("two parameters", (("find_unused_parameters", "on"),)),
    Call("two parameters", (("static_graph", "on"), ("device_ids", "[0, 1]"))),
    Call("two parameters", (("check_replicas_every", "-1"),)),
]


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("call", WRONG_ON_ONE, ids=lambda c: f"{c.module}{c.arguments}")
def test_wrong_on_one_of_two_ranks(pool: Any, call: Call, wrong: int) -> None:
    """It says why, the other hears of it at once, and the group goes on."""
    results = pool.run(one_is_wrong, 2, call, wrong, limit=15.0)
    assert [ok for _, ok in results] == [True, True]
    assert results[wrong][0]
    assert results[1 - wrong][0].startswith(f"ReplicaMismatchError: [rank {1 - wrong}]")


# ------------------------------------------------------------- these laws can be broken


def test_a_hook_left_on_a_parameter_is_noticed(monkeypatch: Any) -> None:
    if native.library() is not None:
        pytest.skip("native hooks take themselves off when they die")
    monkeypatch.setattr(GradHooks, "remove", lambda self: None)
    with pytest.raises(Broken, match="hooks are"):
        try_call(Call("two parameters", ()))


def test_a_changed_module_is_noticed() -> None:
    module = bad_inputs.bag()
    before = bad_inputs.look(module)
    assert bad_inputs.look(module) == before
    module.w[0].register_hook(lambda grad: grad)
    assert bad_inputs.look(module) != before


def test_hooks_are_counted() -> None:
    module = bad_inputs.bag()
    nodes = nodes_of(module)
    assert bad_inputs.hooks_on(nodes) == []
    nodes[1].register_hook(lambda *_: None)
    assert bad_inputs.hooks_on(nodes) == [1]


def test_wrong_gradients_are_noticed(monkeypatch: Any) -> None:
    def half(self: Any, output: Any) -> None:
        output.register_hook(lambda grad: grad / 2)

    monkeypatch.setattr(DataParallel, "_after_module", half)
    with pytest.raises(Broken, match="expected"):
        try_call(Call("two parameters", ()))
    monkeypatch.undo()
    monkeypatch.setattr(Guard, "check", lambda self, optimizer: None)
    with pytest.raises(Broken, match="stepped"):
        try_hook(Case("nothing", "None", "at once", 1, 0, TINY))
