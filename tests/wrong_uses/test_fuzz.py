"""Bad arguments and bad comm hooks: documented exceptions, no crash, nothing left.

``MINIDP_EXAMPLES=2000`` tries five times as many of each; ``pytest -s`` prints how many
calls ended in what.
"""

from __future__ import annotations

import sys
from collections import Counter

import hypothesis
import pytest
import torch

from minidp import DataParallel, native
from minidp.core.grad_hooks import GradHooks
from minidp.guard.optimizer_guard import Guard
from tests.support.collecting import few_objects
from tests.wrong_uses import bad_hooks, bad_inputs
from tests.wrong_uses.bad_hooks import TINY, Case, try_hook
from tests.wrong_uses.bad_inputs import DOCUMENTED, Broken, Call, make, try_call

pytestmark = [
    pytest.mark.fault,
    pytest.mark.usefixtures("lone_group"),
    pytest.mark.filterwarnings("ignore"),
]


def call(module="two parameters", **arguments):
    return Call(module, tuple(arguments.items()))


# What was found, and what is allowed: the outcome of each.
CALLS = {
    "no float holds it": (call(bucket_cap_mb="10**400"), "ValueError"),
    "infinite once in bytes": (call(bucket_cap_mb_list="[1e+308]"), "ValueError"),
    "a time that no float holds": (call(hang_timeout="10**400"), "ValueError"),
    "ignore list of numbers": (call("ignores numbers"), "TypeError"),
    "half a mesh": (call(device_mesh="half a mesh"), "TypeError"),
    "a flag that is infinite": (call(broadcast_buffers="inf"), "accepted"),
    "a flag without a truth": (
        call(forward_sync_buffers="two tensors"),
        "RuntimeError",
    ),
    "cannot be overwritten": (call("expanded"), "RuntimeError"),
    "several wrong ones": (
        call(bucket_cap_mb="nan", unsynced="'x'", device_ids="[0, 1]"),
        "ValueError",
    ),
    **{name: (call(name), "accepted") for name in bad_inputs.GOOD},
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments(name):
    call, outcome = CALLS[name]
    assert try_call(call) == outcome


VIEWS = (("gradient_as_bucket_view", True), *TINY)


@pytest.mark.parametrize(
    "case",
    [
        Case(brings="no memory"),
        Case("frees the memory"),
        Case("moves the buffer", "a copy, doubled"),
        Case("swaps the data", way="from a thread", bucket=-1, options=VIEWS),
        Case(way="failed"),
        Case(way="raises without text"),
        Case(brings="meta"),
        Case(brings="double", way="thread and callback", bucket=-1),
    ],
    ids=lambda case: f"{case.touch}, {case.brings}, {case.way}",
)
def test_bad_hooks(case):
    is_right = case.brings == "double"  # late, in another dtype
    assert try_hook(case) == ("right" if is_right else "CommHookError")


@pytest.mark.parametrize(
    ("what", "cases"),
    [(try_call, bad_inputs.calls), (try_hook, bad_hooks.cases)],
    ids=["constructor", "comm hooks"],
)
def test_random_ones(what, cases):
    outcomes, count = Counter(), 5 * hypothesis.settings.default.max_examples

    @hypothesis.settings(max_examples=count)
    @hypothesis.given(cases)
    def run(case):
        outcomes[what(case)] += 1

    try:
        with few_objects():
            run()
    finally:
        lines = [f"    {n:6d}  {end}\n" for end, n in outcomes.most_common()]
        sys.stdout.write("".join(lines))
    assert len(outcomes) >= 3, outcomes  # some go right, some go wrong
    right = outcomes["accepted"] + outcomes["right"]
    assert outcomes.total() / 10 < right < outcomes.total() * 0.9, outcomes


# ------------------------------------------------------------------------- on two ranks


def one_is_wrong(ctx, wrong_call, wrong):
    """The error of a constructor that is called wrongly on one rank, or right."""
    error = ""
    module, arguments = make(wrong_call if ctx.rank == wrong else call())
    try:
        ddp = DataParallel(module, process_group=ctx.group, **arguments)
    except DOCUMENTED as caught:
        error = f"{type(caught).__name__}: {caught}"
    ddp = DataParallel(bad_inputs.bag(), process_group=ctx.group)
    ddp(torch.ones(1)).backward()
    return error, all(torch.allclose(p.grad, 6 * p.detach()) for p in ddp.parameters())


WRONG_ON_ONE = [
    *map(call, ("all frozen", "no parameters", "meta", "lazy", "one frozen", "None")),
    *map(call, ("ignores numbers", "sparse buffer")),
    call(bucket_cap_mb="nan"),
    call(bucket_cap_mb="10**400", unsynced="'x'"),
    call(find_unused_parameters="on"),
    call(static_graph="on", device_ids="[0, 1]"),
    call(check_replicas_every="-1"),
]


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("call", WRONG_ON_ONE, ids=lambda c: f"{c.module}{c.arguments}")
def test_wrong_on_one_of_two_ranks(pool, call, wrong):
    """It says why, the other hears of it at once, and the group goes on."""
    results = pool.run(one_is_wrong, 2, call, wrong, limit=15.0)
    assert [ok for _, ok in results] == [True, True]
    assert results[wrong][0]
    assert results[1 - wrong][0].startswith(f"ReplicaMismatchError: [rank {1 - wrong}]")


# ------------------------------------------------------------- these laws can be broken


def test_a_hook_left_on_a_parameter_is_noticed(monkeypatch):
    if native.library() is not None:
        pytest.skip("native hooks take themselves off when they die")
    monkeypatch.setattr(GradHooks, "remove", lambda self: None)
    with pytest.raises(Broken, match="hooks are"):
        try_call(call())


def test_a_changed_module_is_noticed():
    module = bad_inputs.bag()
    before = bad_inputs.look(module)
    assert bad_inputs.look(module) == before
    module.w[0].register_hook(lambda grad: grad)
    assert bad_inputs.look(module) != before


def test_wrong_gradients_are_noticed(monkeypatch):
    def half(self, output):
        output.register_hook(lambda grad: grad / 2)
        return output

    monkeypatch.setattr(DataParallel, "_post_forward", half)
    with pytest.raises(Broken, match="expected"):
        try_call(call())
    monkeypatch.undo()
    monkeypatch.setattr(Guard, "check", lambda self, optimizer: None)
    with pytest.raises(Broken, match="stepped"):
        try_hook(Case(brings="None"))
