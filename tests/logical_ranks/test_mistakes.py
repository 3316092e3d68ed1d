"""What is refused with logical ranks, and mistakes in the loop."""

from __future__ import annotations

import copy
import gc
import random
import time
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

import minidp
from minidp import DataParallel, LogicalRankError, MiniDPError, ReplicaMismatchError
from tests.logical_ranks.trainings import batch, net, wrapped
from tests.support.both import same
from tests.support.ranks import on_ranks


def error_of(act, kind=LogicalRankError):
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def trained(model, step=0, leaves=None):
    for leaf in model.each_logical_rank():
        if leaves is None or leaf in leaves:
            model(batch(step, leaf)).square().mean().backward()


# -------------------------------------------------------------------- the constructor


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (0, ValueError, "at least 1, but got 0"),
        (True, TypeError, "must be a number (int)"),
        ("8", TypeError, "got '8' (str)"),
        ({"number": 3}, ValueError, "a mapping without 'seed'"),
        ({"number": 3, "seed": "x", "first_step": 0}, ValueError, "with seed='x'"),
        ({"number": 3, "seed": 1, "first_step": 0.5}, ValueError, "first_step=0.5"),
        (1, ValueError, "leaves nothing to do for some of 2 ranks"),
    ],
)
@on_ranks(2)
def test_an_argument_that_is_none(ctx, given, kind, text):
    assert text in error_of(lambda: wrapped(ctx, net(), given), kind)


@on_ranks(1, 2)
def test_any_seed_will_do(ctx):
    torch.manual_seed(2**64 - 1)
    model = DataParallel(net(), process_group=ctx.group, logical_ranks=2)
    trained(model)
    return model.logical_state["seed"]


@on_ranks(2)
def test_ranks_with_other_numbers(ctx):
    text = error_of(lambda: wrapped(ctx, net(), 4 + ctx.rank), ReplicaMismatchError)
    assert "logical_ranks" in text


MODULES = {
    "SyncBatchNorm": lambda _: minidp.SyncBatchNorm(3),
    "a DistributedDataParallel inside the module": (
        lambda ctx: TorchsDDP(net(), process_group=ctx.group)
    ),
    "forward_sync_buffers=False": lambda _: net(),
}


@pytest.mark.parametrize("name", MODULES)
@on_ranks(2)
def test_what_does_not_go_with_it(ctx, name):
    options = {"process_group": ctx.group, "logical_ranks": 4}
    if name.endswith("False"):
        options["forward_sync_buffers"] = False
    module = MODULES[name](ctx)
    for wrap in (DataParallel, minidp.attach):
        assert name in error_of(lambda wrap=wrap: wrap(module, **options), ValueError)


@on_ranks(2)
def test_a_checkpoint_that_one_rank_has(ctx):
    state = {"number": 4, "seed": 5, "first_step": 10}
    given = state if ctx.rank == 0 else 4
    text = error_of(lambda: wrapped(ctx, net(), given), ReplicaMismatchError)
    assert "logical_ranks" in text


@on_ranks(2)
def test_ranks_that_do_not_meet_when_they_wrap(ctx):
    text = error_of(lambda: wrapped(ctx, net(), 4, init_sync=False), ValueError)
    assert "init_sync=False" in text


@on_ranks(2)
def test_no_comm_hook_can_be_registered(ctx):
    model = wrapped(ctx, net(), 4)
    hook = minidp.comm_hooks.bf16_compress_hook
    text = error_of(lambda: model.register_comm_hook(None, hook), RuntimeError)
    assert "bf16_compress_hook" in text
    assert "in which order" in text


@on_ranks(2)
def test_methods_that_depend_on_the_number_of_ranks(ctx):
    model = wrapped(ctx, net(), 4)
    assert "sync_gradients()" in error_of(model.sync_gradients)
    assert "join()" in error_of(model.join)
    assert "join()" in error_of(lambda: Join([model]))


@on_ranks(2)
def test_a_model_without_logical_ranks(ctx):
    model = DataParallel(net(), process_group=ctx.group)
    assert "logical_ranks=N" in error_of(model.each_logical_rank)
    assert not hasattr(model, "logical_state")


# --------------------------------------------------------------------------- the loop


@on_ranks(1, 2)
def test_a_forward_outside_of_the_loop(ctx):
    model = wrapped(ctx, net(), 4)
    assert "outside of the loop" in error_of(lambda: model(batch(0, 0)))
    with torch.no_grad():
        model(batch(0, 0))
    trained(model)


@on_ranks(1, 2)
def test_a_loop_that_is_left_early(ctx):
    """On one rank; the others hear of it where they wait for that one."""
    module = net()
    model = wrapped(ctx, module, 4, hang_timeout=10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = [param.detach().clone() for param in module.parameters()]

    def step():
        for leaf in model.each_logical_rank():
            model(batch(0, leaf)).square().mean().backward()
            if ctx.rank == 0:
                break
        optimizer.step()

    text = error_of(step, MiniDPError)
    assert "logical rank 0" in text
    assert same(before, list(module.parameters()))
    model.reset()
    trained(model)
    optimizer.step()


@on_ranks(1, 2)
def test_the_loop_after_one_that_was_left_early(ctx):
    model = wrapped(ctx, net(), 4)
    for leaf in model.each_logical_rank():
        model(batch(0, leaf)).square().mean().backward()
        break
    assert "was left in logical rank" in error_of(model.each_logical_rank)


@on_ranks(1, 2)
def test_an_optimizer_that_steps_in_the_loop(ctx):
    module = net()
    model = wrapped(ctx, module, 4, hang_timeout=10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step():
        for leaf in model.each_logical_rank():
            model(batch(0, leaf)).square().mean().backward()
            optimizer.step()

    assert "before the loop" in error_of(step)
    model.reset()
    trained(model)
    optimizer.step()


@on_ranks(1, 2)
def test_a_logical_rank_without_a_backward(ctx):
    model = wrapped(ctx, net(), 4, hang_timeout=10)
    first = model.logical_block[0]
    text = error_of(lambda: trained(model, leaves={*range(4)} - {first}))
    assert f"Logical rank {first} has ended without a backward" in text


@on_ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_logical_rank_without_a_backward_has_gradients_of_before(ctx, options):
    model = wrapped(ctx, net(), 4, hang_timeout=10, **options)
    trained(model)
    model.zero_grad(set_to_none=False)
    first = model.logical_block[0]
    text = error_of(lambda: trained(model, leaves={*range(4)} - {first}))
    assert f"Logical rank {first} has ended without a backward" in text


@on_ranks(1, 2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("turn", [0, -1])
def test_gradients_that_are_clipped_in_the_loop(ctx, views, turn):
    options = {"gradient_as_bucket_view": views}
    model = wrapped(ctx, net(), 4, hang_timeout=10, **options)

    def step():
        for leaf in model.each_logical_rank():
            model(batch(0, leaf)).square().mean().backward()
            if leaf == model.logical_block[turn]:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    if views and turn == -1:  # views share the version of their bucket
        step()
    else:
        assert "Gradients were changed in logical rank" in error_of(step)


@on_ranks(1, 2)
@pytest.mark.parametrize("turn", [0, 1])
def test_parameters_that_are_changed_in_the_loop(ctx, turn):
    model = wrapped(ctx, net(), 4, hang_timeout=10)

    def step():
        for leaf in model.each_logical_rank():
            if leaf == model.logical_block[turn]:
                with torch.no_grad():
                    model.module[0].weight.mul_(0.9)
            model(batch(0, leaf)).square().mean().backward()

    text = error_of(step)
    assert "Parameters were changed in logical rank" in text
    assert "0.weight" in text


@on_ranks(2, 3)
def test_a_second_reduction_on_one_rank_in_the_first_step(ctx):
    """The buckets are not made anew before it is refused."""
    model = wrapped(ctx, net(), 6, hang_timeout=30)

    def steps():
        for step in range(2):
            for leaf in model.each_logical_rank():
                model(batch(step, leaf)).square().mean().backward()
                if ctx.rank == 1:
                    model(batch(step, leaf)).square().mean().backward()

    begin = time.monotonic()
    kind = LogicalRankError if ctx.rank == 1 else MiniDPError
    assert "A second backward reduces" in error_of(steps, kind)
    assert time.monotonic() - begin < 25


def retried(ctx, number):
    """The first try of step 1 raises: in logical rank 1, or elsewhere after it."""
    module = net()
    model = wrapped(ctx, module, number, hang_timeout=10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: list[int] = []
    for number_of_try, step in enumerate((0, 1, 1, 2)):
        try:
            for leaf in model.each_logical_rank(step):
                found.append(model.logical_state["first_step"])
                model(batch(step, leaf)).square().mean().backward()
                if number_of_try == 1 and leaf == 1:
                    raise ValueError("out of luck")
            if number_of_try == 1:
                raise ValueError("no luck elsewhere")
            optimizer.step()
        except (ValueError, MiniDPError):
            model.reset(copy_from=0)
        optimizer.zero_grad()
    steps = sorted({*found, model.logical_state["first_step"]})
    return steps, [param.detach().clone() for param in module.parameters()]


def test_a_step_that_is_tried_again_has_its_number(pool):
    ((steps, expected),) = pool.run(retried, 1, 4)
    assert steps == [0, 1, 2, 3]
    for size in (2, 4):  # logical rank 1 is the last one of rank 0, or of rank 1
        for found in pool.run(retried, size, 4):
            assert same((steps, expected), found), f"{size} ranks"


@on_ranks(1)
def test_a_loop_that_was_left_is_gone_with_its_wrapper(ctx):
    model = wrapped(ctx, net(), 4)
    for _ in model.each_logical_rank():
        break
    alive = weakref.ref(model._logical)
    del model
    assert alive() is None
    random.seed(2)
    torch.manual_seed(2)
    gc.collect()
    assert (random.random(), float(torch.rand(()))) == drawn(2)
    other = wrapped(ctx, net(), 4)
    random.seed(2)
    torch.manual_seed(2)
    trained(other)
    assert (random.random(), float(torch.rand(()))) == drawn(2)


def kept_after(ctx, number):
    module = nn.Sequential(*(nn.Linear(60, 60, bias=False) for _ in range(16)))
    model = wrapped(ctx, module, number, bucket_cap_mb=0.01)
    for step in range(3):
        trained_on(model, step, 60)
        model.zero_grad()
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    storages = [each.untyped_storage() for each in tensors if each.numel() >= 60 * 20]
    kept = {each.data_ptr(): each.nbytes() for each in storages}
    for bucket in model._reducer.queue.buckets:
        if bucket.shared is not None:  # rows in shared memory stay
            for row in bucket.shared.apart:
                del kept[row.untyped_storage().data_ptr()]
    return sum(kept.values())


def trained_on(model, step, width):
    for leaf in model.each_logical_rank():
        model(batch(step, leaf, 5, width)).square().mean().backward()


@pytest.mark.fresh
def test_sums_do_not_stay_after_the_step(pool):
    """Threads of Gloo keep their last messages: four of two groups, of 16 buckets."""
    (one,) = pool.run(kept_after, 1, 6)
    messages = 4 * 4 * 2 * 60 * 60
    for size in (2, 3, 4):
        assert max(pool.run(kept_after, size, 6)) <= one + messages, f"{size} ranks"


@on_ranks(1, 2)
def test_a_last_logical_rank_that_does_not_reduce(ctx):
    model = wrapped(ctx, net(), 4, hang_timeout=10)

    def step():
        for leaf in model.each_logical_rank():
            with model.no_sync():
                model(batch(0, leaf)).square().mean().backward()

    assert "has not reduced" in error_of(step)


@on_ranks(1, 2)
def test_a_logical_rank_that_is_done_twice(ctx):
    model = wrapped(ctx, net(), 4, hang_timeout=10)

    def step():
        for leaf in model.each_logical_rank():
            for _ in range(2):
                model(batch(0, leaf)).square().mean().backward()

    assert "A second backward reduces in logical rank" in error_of(step)


@on_ranks(1, 2)
def test_a_backward_with_a_graph_of_its_own(ctx):
    model = wrapped(ctx, net(), 4, hang_timeout=10)

    def step():
        for leaf in model.each_logical_rank():
            model(batch(0, leaf)).square().mean().backward(create_graph=True)

    assert "graph of their own" in error_of(step)


@on_ranks(1, 2)
def test_after_reset_the_step_is_the_same(ctx):
    """An error in the loop leaves no trace in gradients, buffers or random numbers."""
    module, twin = net(), net()
    model = wrapped(ctx, module, 4, hang_timeout=10)
    plainly = wrapped(ctx, twin, 4)
    random.seed(1)
    torch.manual_seed(1)

    def fails():
        for leaf in model.each_logical_rank():
            model(batch(0, leaf)).square().mean().backward()
            if leaf % 2 == 0:
                raise ValueError("out of luck")

    error_of(fails, ValueError)
    model.reset()
    module.zero_grad()
    assert (random.random(), float(torch.rand(()))) == drawn(1)
    trained(model)
    trained(plainly)
    grads = [[p.grad for p in each.parameters()] for each in (module, twin)]
    assert same(*grads)
    assert same(list(module.buffers()), list(twin.buffers()))


def drawn(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    return random.random(), float(torch.rand(()))


@on_ranks(1, 2)
def test_random_numbers_outside_are_those_without_a_loop(ctx):
    model = wrapped(ctx, net(), 4)
    random.seed(2)
    torch.manual_seed(2)
    trained(model)
    assert (random.random(), float(torch.rand(()))) == drawn(2)


@on_ranks(1, 2)
def test_a_loop_inside_no_sync(ctx):
    model = wrapped(ctx, net(), 4)
    with model.no_sync():
        assert "inside no_sync()" in error_of(model.each_logical_rank)


@on_ranks(1, 2)
def test_two_models_in_one_loop(ctx):
    both = [wrapped(ctx, net(), 4) for _ in "ab"]
    random.seed(2)
    torch.manual_seed(2)
    for leaf, _ in zip(*(each.each_logical_rank() for each in both), strict=True):
        outputs = [model(batch(0, leaf)) for model in both]
        (outputs[0] * outputs[1]).mean().backward()
    assert (random.random(), float(torch.rand(()))) == drawn(2)
    for model in both:
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_an_evaluation_has_the_buffers_of_logical_rank_0(ctx):
    module = net()
    model = wrapped(ctx, module, 4)
    trained(model)
    with torch.no_grad():
        model(batch(0, 0))
    return list(module.buffers())  # the same on both ranks


@on_ranks(2)
def test_a_copy_has_the_same_logical_ranks(ctx):
    model = wrapped(ctx, net(), 4)
    twin = copy.deepcopy(model)
    trained(model)
    trained(twin)
    later = copy.deepcopy(model)
    assert later.logical_state["first_step"] == 1
    both = [[p.grad for p in each.parameters()] for each in (model, twin)]
    assert same(*both)


def trained_and_evaluated(ctx, times):
    """Return the module's state after some steps, and the losses of evaluations."""
    module, losses = net(), []
    torch.manual_seed(7)
    options = {"process_group": ctx.group, "hang_timeout": 10}
    model = DataParallel(module, logical_ranks=6, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        trained(model, step)
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
        for _ in range(times):
            with torch.no_grad():
                losses.append(model(batch(step, 99)).square().mean())
        module.train()
    return [each.clone() for each in module.state_dict().values()], losses


@pytest.mark.parametrize("who", ["rank 0", "the last rank", "all"])
@on_ranks(1, 2, 3)
def test_anybody_may_evaluate_between_steps(ctx, who):
    """Also alone, and more often than others: it sends nothing."""
    last = ctx.world_size - 1
    evaluates = who == "all" or ctx.rank == (0 if who == "rank 0" else last)
    expected, _ = trained_and_evaluated(ctx, 0)
    state, losses = trained_and_evaluated(ctx, 1 + ctx.rank if evaluates else 0)
    assert same(expected, state)
    return state, set(map(float, losses)) if who == "all" else ()
