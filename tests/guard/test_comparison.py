"""Two or three ranks compare what one or all of them suspect; nobody hangs."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidp import ReplicaMismatchError, UnsyncedGradientsError
from minidp.guard import comparison
from minidp.guard.comparison import Verdict, _Meeting
from tests.support.both import Two, wrapped
from tests.support.optimized import Breaks
from tests.support.ranks import on_ranks

X = torch.tensor([2.0])


def setting(ctx, **options):
    ddp = wrapped(ctx, Two(), **{"hang_timeout": 20.0, **options})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(X).backward()
    optimizer.step()
    optimizer.zero_grad()
    return ddp, optimizer


def values(ddp):
    return [param.item() for param in ddp.parameters()]


def local_backwards(ctx, ddp):
    with ddp.no_sync():
        for k in range(2):
            ddp(X + ctx.rank + k).backward()


@pytest.fixture(autouse=True)
def other_rank():
    """The real comparison, instead of the fake one of this folder's other tests."""


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"hang_timeout": None}], ids=str)
def test_gradients_averaged_by_hand_are_applied(ctx, options):
    ddp, optimizer = setting(ctx, **options)
    for k in range(4):
        local_backwards(ctx, ddp)
        for param in ddp.parameters():
            dist.all_reduce(param.grad, group=ctx.group)
            param.grad /= ctx.world_size
        if ctx.rank == 1 and not k:
            threading.Event().wait(0.7)  # the others wait for it
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp)


@on_ranks(2)
def test_gradients_that_differ_by_rounding_are_applied(ctx):
    ddp, optimizer = setting(ctx)
    local_backwards(ctx, ddp)
    for param in ddp.parameters():
        param.grad.fill_(1.0 + 2e-7 * ctx.rank)
    optimizer.step()
    for param in ddp.parameters():
        param.grad.fill_(1.0 + 1e-3 * ctx.rank)
    local_backwards(ctx, ddp)
    with pytest.raises(UnsyncedGradientsError, match="different values on rank 1 than"):
        optimizer.step()


@on_ranks(3)
def test_local_gradients_that_one_rank_applies_are_found_after_the_step(ctx):
    """The others have made this step, so only the parameters can prove a mistake."""
    ddp, optimizer = setting(ctx, check_replicas_every=0)
    ddp(X).backward()  # new buckets come with this forward
    optimizer.step()
    optimizer.zero_grad()
    ddp(X).backward()
    if ctx.rank == 1:
        ddp.module.a.square().sum().backward()
    found = ""
    try:
        optimizer.step()
        assert ctx.rank != 1
        optimizer.zero_grad()
        ddp(X).backward()
    except RuntimeError as error:
        found = str(error)
    assert ("Parameters: a. What to do" in found) == (ctx.rank == 1)
    assert "Gradients were never averaged" in found


@on_ranks(3)
def test_a_step_that_waiting_ranks_have_not_made_is_refused(ctx):
    ddp, optimizer = setting(ctx)
    before = values(ddp)
    found = ""
    try:
        if ctx.rank == 1:
            ddp.module.a.square().sum().backward()
            optimizer.step()
        ddp(X).backward()
    except RuntimeError as error:
        found = str(error)
    assert ("Parameters: a. What to do" in found) == (ctx.rank == 1)
    assert values(ddp) == before
    assert "Gradients were never averaged" in found


@on_ranks(3)
def test_waiting_ranks_answer_for_their_parameters(ctx):
    """One rank alone asks for gradients of weights; then all load a checkpoint."""
    ddp, optimizer = setting(ctx)
    for _ in range(2):
        loss = ddp(X)
        if ctx.rank == 1:
            torch.autograd.grad(loss, [*ddp.parameters()])
        ddp.load_state_dict({n: v * 0.5 for n, v in ddp.state_dict().items()})
        ddp(X).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp)


@on_ranks(2)
def test_a_waiting_rank_answers_that_it_differs(ctx):
    ddp, optimizer = setting(ctx, check_replicas_every=0)
    loss, found = ddp(X), ""
    if ctx.rank == 1:
        grads = torch.autograd.grad(loss, [*ddp.parameters()])
        with torch.no_grad():
            for param, grad in zip(ddp.parameters(), grads, strict=True):
                param -= 0.1 * grad
    ddp(X).backward()
    try:
        for _ in range(2):  # asked in the second backward, compared after the step
            optimizer.step()
            optimizer.zero_grad()
            ddp(X).backward()
    except RuntimeError as error:
        found = str(error)
    assert "averaged nothing: torch.autograd.grad" in found
    assert ("On another rank: " in found) == (ctx.rank == 0)
    assert "Found: different parameters on rank 1 than on rank 0" in found
    assert "Parameters: a, b" in found


@on_ranks(2)
@pytest.mark.parametrize("policy", ["raise", "warn"])
@pytest.mark.parametrize("when", [6, 7])
def test_a_mistake_of_one_rank_while_all_leave_out_a_step(ctx, policy, when):
    """In one backward rank 0 asks for one reason, and rank 1 for another one."""
    ddp, optimizer = setting(ctx, unsynced=policy)
    found = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for k in range(12):
                if (ctx.rank, k) == (1, when):
                    ddp.module(X).backward()
                    with torch.no_grad():
                        for param in ddp.parameters():
                            param -= 0.1 * param.grad
                    optimizer.zero_grad()
                ddp(X).backward()
                if k % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        except (UnsyncedGradientsError, ReplicaMismatchError) as error:
            found = str(error)
    # All ranks tell of it in the same backward, and none waits for another one.
    told = " ".join([found, *(str(each.message) for each in caught)])
    assert "Found: different " in told
    assert found or policy == "warn"
    if when == 6:  # else the comparison of replicas may come first
        assert "after a local backward" in told
        assert ("On another rank: " in told) == (ctx.rank == 0)


@on_ranks(2)
def test_weights_that_are_back_after_the_step_are_legal(ctx):
    """Sharpness-aware training, with each rank's own local gradients."""
    ddp, optimizer = setting(ctx)
    for _ in range(5):
        kept = [param.detach().clone() for param in ddp.parameters()]
        params = [*ddp.parameters()]
        grads = torch.autograd.grad(ddp(X + ctx.rank), params)
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param += 0.05 * grad
        ddp(X + ctx.rank).backward()
        with torch.no_grad():
            for param, old in zip(params, kept, strict=True):
                param.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp)


@on_ranks(2)
def test_the_store_does_not_grow(ctx):
    ddp, optimizer = setting(ctx)
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for _ in range(12):
        with ddp.no_sync():
            ddp(X).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier(group=ctx.group)
        counts.append(store.num_keys())
        dist.barrier(group=ctx.group)
    # One key for each comparison would be ten. A slow machine adds some for good: the
    # first question of each rank to the others, say.
    assert counts[-1] - counts[1] < 5, counts


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ([0.0, 1.0], [-0.0, 1.0], True),
        ([float("nan"), 1.0], [-float("nan"), 1.0], True),
        ([1.0, 2.0], [2.0, 1.0], False),
        ([1.0], [1.0, 0.0], False),
        (None, [], False),
        ([1.0], [1.5], False),
        ([], [], True),
    ],
)
def test_digest(one, other, are_equal):
    def digest(found):
        return comparison._digest([None if found is None else torch.tensor(found)])

    assert (digest(one) == digest(other)) == are_equal


def test_digest_of_other_kinds():
    sparse = torch.eye(3).to_sparse()
    kinds = [
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3),
        sparse,
        sparse * 2,
    ]
    assert len({comparison._digest([each]) for each in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("more", "is_proof"),
    [
        ({}, True),  # rank 2 will never come
        ({"awaited": frozenset({2})}, False),
        ({"awaited": frozenset({2}), "stepped": frozenset({2})}, True),
        ({"awaited": frozenset({2}), "reducing": frozenset({2})}, True),
    ],
)
def test_nothing_is_proved_as_long_as_a_rank_is_late(more, is_proof):
    """Two ranks may differ by rounding, or by noise that all three have."""
    verdict = Verdict({0: 1, 1: 2}, frozenset({0, 1, 2}), **more)
    assert verdict.is_proof is is_proof
    assert verdict.proves_mistake is is_proof


def average_by_hand(ctx, ddp):
    for param in ddp.parameters():
        dist.all_reduce(param.grad, group=ctx.group)
        param.grad /= ctx.world_size


def message_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


@on_ranks(2)
@pytest.mark.parametrize("broadcasts", [True, False])
def test_ranks_that_step_parts_are_judged_in_the_next_forward(ctx, broadcasts):
    """ZeRO by hand; the last forward is one inside no_sync(), as all of them."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    params = [*ddp.parameters()]
    optimizer = torch.optim.SGD([params[ctx.rank]], lr=0.1)

    def train():
        for _ in range(3):
            ddp.zero_grad()
            local_backwards(ctx, ddp)
            average_by_hand(ctx, ddp)
            optimizer.step()
            for owner, param in enumerate(params) if broadcasts else ():
                dist.broadcast(param.data, group_src=owner, group=ctx.group)
        with ddp.no_sync():
            ddp(X)

    found = message_of(train)
    assert bool(found) is not broadcasts
    if not broadcasts:
        assert "Expected: the same parameters on all ranks after the step" in found
        assert "Parameters: " in found
    return [] if not broadcasts else values(ddp)


@on_ranks(2)
@pytest.mark.parametrize("parts", ["alike", "one more on rank 1", "new optimizers"])
@pytest.mark.parametrize("broadcasts", [True, False])
def test_parts_that_are_never_sent_are_found_without_a_forward(ctx, broadcasts, parts):
    """Each rank steps its parts in several optimizers, and no forward ever judges."""
    ddp = wrapped(ctx, torch.nn.Sequential(Two(), Two()), hang_timeout=8.0)
    params = [*ddp.parameters()]
    own = params[ctx.rank :: 2]
    if ctx.rank and parts == "one more on rank 1":
        own.append(params[0])

    def made():
        return [torch.optim.SGD([param], lr=0.01) for param in own]

    optimizers = made()

    def train():
        for _ in range(6):
            if parts == "new optimizers":
                optimizers[:] = made()
            ddp.zero_grad()
            ddp.module(X + ctx.rank).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            for i, param in enumerate(params) if broadcasts else ():
                dist.broadcast(param.data, group_src=i % 2, group=ctx.group)

    found = message_of(train)
    if broadcasts:
        assert found == ""
        return values(ddp)
    if parts != "one more on rank 1":
        assert "on all ranks before the next step like it" in found
    assert "Found: different " in found
    assert "Parameters: " in found
    return []


@on_ranks(2)
def test_a_part_is_stepped_several_times_before_it_is_sent(ctx):
    """The steps apply the same gradients, so there is no other backward to judge."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    params = [*ddp.parameters()]
    optimizer = torch.optim.SGD([params[ctx.rank]], lr=0.1)
    for k in range(3):
        ddp.zero_grad()
        ddp.module(X + ctx.rank + k).backward()
        average_by_hand(ctx, ddp)
        for _ in range(3):
            optimizer.step()
        for owner, param in enumerate(params):
            dist.broadcast(param.data, group_src=owner, group=ctx.group)
    return values(ddp)


@on_ranks(2)
def test_parts_may_arrive_while_the_next_forward_runs(ctx):
    """ZeRO whose modules wait for their parameters right before they need them."""
    ddp = wrapped(ctx, torch.nn.Sequential(Two(), Two()), hang_timeout=20.0)
    params = [*ddp.parameters()]
    optimizer = torch.optim.SGD(params[ctx.rank :: 2], lr=0.01)
    under_way = {}

    def arrive(module, _inputs):
        for param in module.parameters():
            if param in under_way:
                work, values = under_way.pop(param)
                work.wait()
                param.data.copy_(values)

    for module in ddp.module:
        module.register_forward_pre_hook(arrive)
    for k in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(X + ctx.rank + k).backward()
        average_by_hand(ctx, ddp)
        optimizer.step()
        for i, param in enumerate(params):
            sent = param.detach().clone()
            work = dist.broadcast(sent, group_src=i % 2, group=ctx.group, async_op=True)
            under_way[param] = work, sent
    for module in ddp.module:
        arrive(module, ())
    return values(ddp)


@on_ranks(2)
def test_ranks_may_have_unequal_numbers_of_optimizers(ctx):
    """Rank 1 has one for each parameter; a penalty makes every step doubtful."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    params = [*ddp.parameters()]
    parts = [[param] for param in params] if ctx.rank else [params]
    optimizers = [torch.optim.SGD(part, lr=0.01) for part in parts]
    for k in range(4):
        ddp.zero_grad()
        ddp(X + ctx.rank + k).backward()
        sum(param.square().sum() for param in ddp.module.parameters()).backward()
        for optimizer in optimizers:
            optimizer.step()
    return values(ddp)


class Gone:
    """A store whose host has ended."""

    def __getattr__(self, name):
        raise RuntimeError("Connection reset by peer")


def test_a_meeting_is_over_when_its_store_is_gone():
    """The rank that hosts it has made its last step, and ended."""
    meeting = _Meeting(Gone(), "step/1/0/1/0", frozenset({0, 1}), None, None)
    assert meeting.is_done_within(0.0)
    assert meeting.wait() == {}


@on_ranks(2)
@pytest.mark.parametrize("broadcasts", [True, False])
def test_one_rank_steps_for_all(ctx, broadcasts):
    """A parameter server; if it forgets to send, the next averaged backward tells."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0, check_replicas_every=0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def train():
        for _ in range(2):
            ddp.zero_grad()
            local_backwards(ctx, ddp)
            average_by_hand(ctx, ddp)
            if ctx.rank == 0:
                optimizer.step()
            if not broadcasts:
                dist.barrier(ctx.group)
            for param in ddp.parameters() if broadcasts else ():
                dist.broadcast(param.data, group_src=0, group=ctx.group)
        ddp(X).backward()

    found = message_of(train)
    assert ("different parameters on rank" in found) is not broadcasts
    return [] if not broadcasts else values(ddp)


@on_ranks(2)
@pytest.mark.parametrize("way", ["object", "copy", "data"])
def test_averages_that_are_put_back_may_be_applied(ctx, way):
    """Rank 0 alone looks at gradients of its own before the step."""
    ddp, optimizer = setting(ctx, check_replicas_every=0)
    for k in range(3):
        ddp(X + ctx.rank + k).backward()
        if ctx.rank == 0:
            params = [*ddp.parameters()]
            kept = [p.grad if way == "object" else p.grad.clone() for p in params]
            if way == "object":
                ddp.zero_grad(set_to_none=True)
            ddp.module(X).backward()
            for param, grad in zip(params, kept, strict=True):
                if way == "object":
                    param.grad = grad
                elif way == "copy":
                    param.grad.copy_(grad)
                else:
                    param.grad.data.copy_(grad)
        optimizer.step()
        optimizer.zero_grad()
    return values(ddp)


@on_ranks(3)
@pytest.mark.parametrize("set_to_none", [True, False, "kept"])
@pytest.mark.parametrize("every", ["auto", 0])
def test_a_rank_that_caught_its_error_and_missed_a_step(ctx, every, set_to_none):
    ddp, optimizer = setting(ctx, check_replicas_every=every)

    def train():
        for k in range(12):
            if set_to_none != "kept":
                optimizer.zero_grad(set_to_none=set_to_none)
            ddp(X).backward()
            if k == 9 and ctx.rank == 1:
                continue
            optimizer.step()
            if set_to_none == "kept":
                optimizer.zero_grad()

    if every == "auto":  # has compared before this
        for _ in range(2):
            optimizer.zero_grad()
            ddp(X).backward()
            optimizer.step()
    found = message_of(train)
    assert "No optimizer has stepped on this rank since a backward" in found


@on_ranks(2)
def test_a_rank_that_leaves_out_the_step_of_one_of_two_optimizers(ctx):
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    first, second = (torch.optim.SGD([param], lr=0.1) for param in ddp.parameters())

    def train():
        for k in range(6):
            ddp.zero_grad()
            ddp(X).backward()
            first.step()
            if k != 4 or ctx.rank == 0:
                second.step()

    assert "SGD has not stepped on this rank since a backward" in message_of(train)


@on_ranks(2)
def test_all_ranks_may_step_two_optimizers_in_turn(ctx):
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    pair = [torch.optim.SGD([param], lr=0.1) for param in ddp.parameters()]
    for k in range(20):
        ddp.zero_grad()
        ddp(X + ctx.rank).backward()
        pair[k % 2].step()
    return values(ddp)


@on_ranks(2)
@pytest.mark.parametrize("num_sent", [0, 5])
def test_a_rank_that_never_steps_is_not_sent_the_steps_of_others(ctx, num_sent):
    """At the second backward, or as soon as the sending ends."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    done = []

    def train():
        for k in range(8):
            ddp.zero_grad()
            ddp(X).backward()
            done.append(k)
            if ctx.rank == 0:
                optimizer.step()
            for param in ddp.parameters() if k < num_sent else ():
                dist.broadcast(param.data, group_src=0, group=ctx.group)

    assert "No optimizer has stepped on this rank" in message_of(train)
    assert len(done) == num_sent + 1


@on_ranks(2)
def test_a_loop_without_an_optimizer_is_compared_rarely(ctx):
    """As in a benchmark of forward and backward: all ranks doubt that they step."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    with patch.object(comparison, "_digest", wraps=comparison._digest) as digest:
        for _ in range(40):
            ddp(X).backward()
    assert 1 <= digest.call_count <= 6


@on_ranks(2)
def test_a_step_that_raises_leaves_nothing_to_be_judged(ctx):
    """It was to be compared when made, as it applied a parameter of one rank alone."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    optimizer = Breaks(ddp.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        ddp(X).backward()
        optimizer.step()

    train()
    if ctx.rank == 1:
        ddp.module.late = torch.nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [ddp.module.late]})
        optimizer.is_broken = True
        with pytest.raises(ValueError, match="out of luck"):
            train()
        del ddp.module.late, optimizer.param_groups[1:]
        optimizer.is_broken = False
    else:
        train()
    ddp.reset(copy_from=0)
    for _ in range(3):
        train()
    return values(ddp)


@on_ranks(2)
def test_a_step_that_raises_on_one_rank_was_not_made(ctx):
    ddp, optimizer = setting(ctx)

    def fail(*_):
        if ctx.rank == 1 and len(done) == 3:
            done.append("failed")
            raise RuntimeError("boo")

    optimizer.register_step_pre_hook(fail)
    done = []

    def train():
        for k in range(8):
            optimizer.zero_grad()
            ddp(X).backward()
            with suppress(RuntimeError):
                optimizer.step()
            done.append(k)

    assert "No optimizer has stepped on this rank" in message_of(train)
    assert len(done) <= 5


@on_ranks(2)
def test_a_change_by_hand_on_one_rank_is_not_taken_for_a_step(ctx):
    """One rank updates by hand what the other one's optimizer steps, and equally."""
    ddp = wrapped(ctx, Two(), hang_timeout=20.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    done = []

    def train():
        for k in range(12):
            ddp.zero_grad()
            ddp(X).backward()
            done.append(k)
            if ctx.rank == 0:
                optimizer.step()
                continue
            with torch.no_grad():
                for param in ddp.parameters():
                    param -= 0.5 * param.grad
                    param += 1.0 if k == 4 else 0.0

    text = message_of(train)
    assert "or parameters were changed by hand on some ranks only" in text
    assert len(done) == 5


@on_ranks(2)
@pytest.mark.parametrize("is_global", [True, False])
def test_gradients_may_be_averaged_by_a_hook_of_the_step(ctx, is_global):
    ddp, optimizer = setting(ctx)

    def average(*_):
        average_by_hand(ctx, ddp)

    register = register_optimizer_step_pre_hook
    hook = (register if is_global else optimizer.register_step_pre_hook)(average)
    for _ in range(3):
        optimizer.zero_grad()
        local_backwards(ctx, ddp)
        optimizer.step()
    hook.remove()
    return values(ddp)


@on_ranks(2)
def test_a_local_phase_ends_in_a_comparison(ctx):
    """After the scheduled ones; the guard then looks for left-out steps again."""
    ddp, optimizer = setting(ctx)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(X).backward()
        optimizer.step()
    with ddp.no_sync():
        ddp(X * (ctx.rank + 1)).backward()
        optimizer.step()
    for param in ddp.parameters():
        dist.all_reduce(param.data, group=ctx.group)
        param.data /= ctx.world_size

    def train():
        for k in range(6):
            optimizer.zero_grad()
            ddp(X).backward()
            if k != 3 or ctx.rank == 0:
                optimizer.step()

    assert "No optimizer has stepped on this rank" in message_of(train)


@on_ranks(2)
def test_a_step_in_no_sync_that_nobody_averages_is_warned_of(ctx):
    ddp, optimizer = setting(ctx)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(X).backward()
        optimizer.step()
    with ddp.no_sync():
        optimizer.zero_grad()
        ddp(X * (ctx.rank + 1)).backward()
        optimizer.step()

    def train():
        for _ in range(2):
            optimizer.zero_grad()
            ddp(X).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="updated inside no_sync"):
        train()


@on_ranks(2)
def test_local_training_is_no_step_that_was_left_out(ctx):
    """Replicas differ on purpose, and a backward is made whose averages nobody uses."""
    ddp, optimizer = setting(ctx)
    with ddp.no_sync():
        ddp(X * (ctx.rank + 1)).backward()
        optimizer.step()
    for _ in range(3):
        ddp.zero_grad()
        ddp(X).backward()


@on_ranks(2)
@pytest.mark.parametrize("drops", [True, False])
def test_all_ranks_may_leave_out_a_step(ctx, drops):
    """A GradScaler, a network beside another one, accumulation without no_sync()."""
    ddp, optimizer = setting(ctx)
    for k in range(20):
        ddp(X + ctx.rank).backward()
        if not k % 3:
            optimizer.step()
        if drops or not k % 3:
            optimizer.zero_grad()
    return values(ddp)


@on_ranks(2)
def test_ranks_agree_that_all_have_asked_though_one_reads_late(ctx):
    """Noise that is put back differs in the backward; no rank may take it for proof.

    Rank 0 has left out a step, as all have, and reads the posts when rank 1 already
    waits for it in the collective that follows.
    """
    ddp, optimizer = setting(ctx)
    is_completed = _Meeting.is_completed

    def late(meeting):
        threading.Event().wait(0.7)  # rank 1 looks for questions twice a second
        return is_completed(meeting)

    with patch.object(_Meeting, "is_completed", is_completed if ctx.rank else late):
        for k in range(4):
            kept = [param.detach().clone() for param in ddp.parameters()]
            with torch.no_grad():
                for param in ddp.parameters():
                    param += ctx.rank + k
            ddp(X).backward()
            with torch.no_grad():
                for param, value in zip(ddp.parameters(), kept, strict=True):
                    param.copy_(value)
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
    return values(ddp)


@on_ranks(2)
def test_one_rank_may_drop_averages_that_it_has_stepped_otherwise(ctx):
    """An update by hand, on one rank, of what the others step by an optimizer."""
    ddp, optimizer = setting(ctx, check_replicas_every=0)
    for _ in range(3):
        ddp(X).backward()
        if ctx.rank == 0:
            with torch.no_grad():
                for param in ddp.parameters():
                    param.add_(param.grad, alpha=-0.1)
        else:
            optimizer.step()
        optimizer.zero_grad()
    return values(ddp)


@on_ranks(2, fresh={"group_timeout": 30.0})
def test_a_rank_that_trains_on_alone_is_soon_left_in_peace(ctx):
    """The others wait for it meanwhile, so each comparison takes about a second."""
    ddp, optimizer = setting(ctx)
    if ctx.rank == 0:
        compare = ddp._guard.comparison._compare
        with patch.object(ddp._guard.comparison, "_compare", wraps=compare) as compared:
            for _ in range(20):
                optimizer.zero_grad()
                ddp.module(X).backward()
                optimizer.step()
        assert compared.call_count == 3
    dist.barrier()


@on_ranks(2, fresh={"group_timeout": 20.0})
def test_a_rank_may_train_alone_when_the_process_group_is_destroyed(ctx):
    ddp, optimizer = setting(ctx)
    dist.barrier()
    dist.destroy_process_group()
    before = values(ddp)
    for _ in range(2):
        optimizer.zero_grad()
        ddp.module(X * (ctx.rank + 1)).backward()
        with torch.no_grad():
            ddp.module.a.add_(1.0)
        optimizer.step()
    assert values(ddp) != before
