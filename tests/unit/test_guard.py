"""The optimizer guard: what it stops, what it says, what stays legal.

The guard looks at its own rank only, so one rank is enough to see all of it.
"""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidp import (
    DataParallel,
    MarkedTwiceError,
    ReducerFailedError,
    UnfinishedReductionError,
    UnsyncedGradientsError,
)

ON_ALL_RANKS = "call sync_gradients() on all ranks before the update"
NEVER_AVERAGED = (
    "[rank 0] Gradients were never averaged over ranks: {}. Parameters: {{}}. What to "
    "do: {}."
)
QUIET = NEVER_AVERAGED.format(
    "every backward since the last averaged one belongs to a forward inside no_sync()",
    "run the last forward and backward before the update outside no_sync(), or "
    f"{ON_ALL_RANKS}; if replicas are meant to differ for a while (local SGD), update "
    "inside no_sync(), too (or pass unsynced='ignore')",
)
AGAIN = NEVER_AVERAGED.format(
    "a backward through outputs of the wrapper came after the one that averaged (two "
    "forwards, then two backwards; or one graph twice)",
    f"run one backward over the sum of the losses, or {ON_ALL_RANKS}",
)
NESTED = NEVER_AVERAGED.format(
    "a layer runs several times under checkpoint(..., use_reentrant=True)",
    "pass use_reentrant=False",
)
INSTEAD = NEVER_AVERAGED.format(
    "the module ran without its wrapper (model.module(x), another method, a part; "
    "after attach() model.forward(x), or inside alone()) "
    "instead of model(x)",
    "call the wrapper, model(x); other methods can be called from forward()",
)
BESIDES = NEVER_AVERAGED.format(
    "the module ran without its wrapper (model.module(x), another method, a part; "
    "after attach() model.forward(x), or inside alone()), or "
    "a loss was made of its parameters alone, besides model(x)",
    "add that loss to the one of model(x), for one backward over the sum, or "
    f"{ON_ALL_RANKS}; run a penalty that is equal on all ranks inside no_sync()",
)
UNFINISHED = (
    "[rank 0] The last backward did not finish its reduction. Expected: a gradient for "
    "every parameter before optimizer.step(). Found: no gradient for the parameters "
    "below. Parameters: {}. What to do: pass find_unused_parameters=True if they are "
    "unused on purpose, freeze them before wrapping, or run the backward that brings "
    "them; call reset() on all ranks to go on."
)
INTERRUPTED = (
    "[rank 0] The last backward did not finish its reduction: it raised, or was "
    "interrupted, before it brought all gradients. Parameters: {}. What to do: call "
    "reset() on all ranks, then zero_grad(); the next batch may follow."
)
FAILED = (
    "[rank 0] An earlier backward failed; gradients are not averaged over ranks. "
    "Parameters: {}. What to do: call reset() on all ranks, then zero_grad()."
)
NEVER = (
    "[rank 0] A forward announced a synchronised backward that never came, so the "
    "gradients present are not those of this step. Parameters: {}. What to do: call "
    "backward() on what the forward returned (not torch.autograd.grad), and do not "
    "cast or replace parameters after wrapping."
)
INSIDE = (
    "[rank 0] An optimizer steps inside the backward, before its gradients are "
    "averaged over ranks. Parameters: {}. What to do: step after backward() returned."
)
X = torch.tensor([2.0])


class Two(nn.Module):
    """The loss may use one of the parameters, or both."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x, use="ab"):
        return sum(getattr(self, name) * x for name in use)


class Setting:
    def __init__(self, group, **options):
        self.ddp = DataParallel(Two(), process_group=group, **options)
        self.a, self.b = self.ddp.module.a, self.ddp.module.b
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)

    def train_step(self):
        self.optimizer.zero_grad()
        self.ddp(X).backward()
        self.optimizer.step()

    def refused(self):
        """The text with which the step is refused; parameters stay as they are."""
        before = self.a.item(), self.b.item()
        with pytest.raises(UnsyncedGradientsError) as caught:
            self.optimizer.step()
        assert (self.a.item(), self.b.item()) == before
        return str(caught.value)


@pytest.fixture
def setting(lone_group):
    return Setting(lone_group)


# ------------------------------------------------------------- (a) not finished


def test_pending_reduction(setting):
    setting.ddp(X, "a").backward()
    assert setting.refused() == UNFINISHED.format("b")


def test_pending_reduction_of_an_optimizer_that_holds_the_other_half(setting):
    setting.ddp(X, "a").backward()
    setting.optimizer = torch.optim.SGD([setting.a])
    assert setting.refused() == UNFINISHED.format("b")


def test_aborted_backward(setting):
    def fail(_):
        raise KeyError("user code")

    setting.a.register_hook(fail)  # b, used last, gets its gradient first
    with pytest.raises(KeyError, match="user code"):
        setting.ddp(X).backward()
    assert setting.refused() == INTERRUPTED.format("a")


def ctrl_c(_):
    raise KeyboardInterrupt


def interrupted(setting, *, inside_ours):
    """Ctrl-C reaches python code of a hook of the user, or of ours."""
    if inside_ours:
        setting.ddp.register_comm_hook(None, lambda _state, _bucket: ctrl_c(None))
    else:
        setting.a.register_hook(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        setting.ddp(X).backward()


def test_interrupted_backward(setting):
    interrupted(setting, inside_ours=False)
    assert setting.refused() == INTERRUPTED.format("a")
    with pytest.raises(UnfinishedReductionError) as caught:
        setting.ddp(X)
    assert str(caught.value) == (
        "[rank 0] Expected to have finished reduction in the prior iteration before "
        "starting a new one. The last backward raised, or was interrupted, before it "
        "brought all gradients. Parameters: a. What to do: call reset() on all ranks, "
        "then zero_grad(); the next batch may follow."
    )


def test_interrupted_backward_inside_our_own_code(setting):
    interrupted(setting, inside_ours=True)
    assert setting.refused() == FAILED.replace("failed", "was interrupted").format(
        "a, b"
    )
    with pytest.raises(ReducerFailedError, match="An earlier backward was interrupted"):
        setting.ddp(X)


def test_failed_backward(setting):
    half = setting.ddp(X, "a")
    half.backward(retain_graph=True)
    with pytest.raises(MarkedTwiceError, match="Parameters: a"):
        half.backward()
    assert setting.refused() == FAILED.format("a")


def test_reset_and_zero_grad_are_the_remedy(setting):
    setting.ddp(X, "a").backward()
    setting.refused()
    setting.ddp.reset()
    setting.train_step()
    assert setting.a.item() == pytest.approx(0.8)


# ----------------------------------------------------------------- (b) local parts


def test_second_backward_of_two_forwards(setting):
    first, second = setting.ddp(X), setting.ddp(X)
    first.backward()
    second.backward()
    assert setting.refused() == AGAIN.format("a, b")


def test_retained_graph(setting):
    out = setting.ddp(X)
    out.backward(retain_graph=True)
    out.backward()
    assert setting.refused() == AGAIN.format("a, b")


def test_method_of_the_module(setting):
    setting.ddp(X).backward()
    setting.ddp.module(X, "b").backward()
    assert setting.refused() == BESIDES.format("b")


def test_module_alone(setting):
    setting.ddp.module(X, "b").backward()
    assert setting.refused() == INSTEAD.format("b")


def test_no_sync_then_step(setting):
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    assert setting.refused() == QUIET.format("a, b")


def test_only_parameters_of_this_optimizer_are_named(setting):
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    setting.optimizer = torch.optim.SGD([setting.b])
    assert setting.refused() == QUIET.format("b")


def test_it_stays_refused_until_synchronised(setting):
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    setting.refused()
    setting.refused()
    setting.ddp(X).backward()  # averages what was accumulated
    setting.optimizer.step()
    assert setting.a.item() == pytest.approx(0.6)


def test_sync_gradients_is_the_remedy(setting):
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    setting.ddp.sync_gradients()
    setting.optimizer.step()
    assert setting.a.item() == pytest.approx(0.8)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_a_synchronised_step_go_on(setting, set_to_none):
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    setting.optimizer.zero_grad(set_to_none=set_to_none)
    setting.train_step()
    assert setting.a.item() == pytest.approx(0.8)


def test_a_dropped_local_gradient_is_forgotten_for_good(lone_group):
    setting = Setting(lone_group, find_unused_parameters=True)
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    setting.optimizer.zero_grad()  # to None: nothing local is left
    setting.ddp(X, "b").backward()
    with setting.ddp.no_sync():
        setting.a.square().sum().backward()  # a penalty that is meant
    setting.optimizer.step()
    assert setting.a.item() == pytest.approx(0.8)


def test_dropped_gradients_do_not_matter(setting):
    setting.ddp.module(X, "b").backward()
    setting.b.grad = None
    setting.optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_zeroed_gradients_are_nothing_to_average(setting, momentum):
    setting.optimizer = torch.optim.SGD(
        setting.ddp.parameters(), lr=0.1, momentum=momentum
    )
    setting.train_step()
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    setting.optimizer.zero_grad(set_to_none=False)
    setting.optimizer.step()
    setting.train_step()
    assert setting.a.item() == pytest.approx(0.6 if not momentum else 0.258)


@pytest.mark.parametrize("zero", [torch.Tensor.zero_, lambda g: g.mul_(0)])
def test_only_what_is_not_zero_is_named(setting, zero):
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    zero(setting.a.grad)
    assert setting.refused() == QUIET.format("b")
    setting.b.grad[0] = torch.nan  # not zero either
    assert setting.refused() == QUIET.format("b")


def test_a_zeroed_part_is_forgotten_for_good(lone_group):
    setting = Setting(lone_group, find_unused_parameters=True)
    setting.ddp(X).backward()
    setting.ddp.module(X, "a").backward()
    setting.optimizer.zero_grad(set_to_none=False)
    setting.ddp(X, "b").backward()
    setting.optimizer.step()
    assert setting.a.item() == 1.0
    with setting.ddp.no_sync():
        setting.a.square().sum().backward()  # a penalty that is meant
    setting.optimizer.step()


def test_zeros_of_a_sparse_gradient(lone_group):
    table = nn.Embedding(3, 2, sparse=True)
    ddp = DataParallel(table, process_group=lone_group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.no_sync():
        ddp(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsyncedGradientsError):
        optimizer.step()
    table.weight.grad.mul_(0)
    optimizer.step()


def test_a_layer_that_is_checkpointed_twice(lone_group):
    class Twice(nn.Linear):
        def forward(self, x):
            for _ in range(2):
                x = checkpoint(super().forward, x, use_reentrant=True)
            return x

    ddp = DataParallel(Twice(1, 1), process_group=lone_group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(1, 1, requires_grad=True)).sum().backward()
    with pytest.raises(UnsyncedGradientsError) as caught:
        optimizer.step()
    assert str(caught.value) == NESTED.format("weight, bias")


def test_several_mistakes_are_told_together(setting):
    with setting.ddp.no_sync():
        setting.ddp(X, "a").backward()
    setting.ddp.module(X, "b").backward()
    assert setting.refused() == QUIET.format("a, b")  # the forward still waits
    setting.ddp(X).backward()
    out = setting.ddp(X, "ab")
    out.backward(retain_graph=True)
    setting.ddp.module(X, "b").backward()
    out.backward(inputs=[setting.a])
    text = setting.refused()
    assert "(two forwards, then two backwards; or one graph twice); and the " in text
    assert "; add that loss to the one of model(x)" in text


# --------------------------------------------------- two live objects, one module


def test_the_other_wrapper_averages(lone_group):
    """As in torch: an old wrapper, not yet let go of, has nothing to say."""
    old = Setting(lone_group)
    old.train_step()
    new = DataParallel(old.ddp.module, process_group=lone_group)
    for ddp in (new, old.ddp, new, new):
        old.optimizer.zero_grad()
        ddp(X).backward()
        old.optimizer.step()
    assert old.a.item() == pytest.approx(0.0, abs=1e-6)


def test_neither_of_two_wrappers_averages(lone_group):
    old = Setting(lone_group)
    old.train_step()
    new = DataParallel(old.ddp.module, process_group=lone_group)
    new(X).backward()
    old.optimizer.step()
    new.module(X).backward()
    assert "never averaged" in old.refused()


def test_a_wrapper_inside_no_sync_vouches_for_nobody(lone_group):
    """Not every local gradient is noted there."""
    old = Setting(lone_group)
    old.train_step()
    new = DataParallel(old.ddp.module, process_group=lone_group)
    with old.ddp.no_sync():
        new.module(X).backward()
        assert "never averaged" in old.refused()


# ----------------------------------------------- (c) announced, but never reduced


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_left_out_on_all_ranks(setting, set_to_none):
    """Here the only one; for two ranks see `test_skip`."""
    setting.train_step()
    for _ in range(2):
        setting.optimizer.zero_grad(set_to_none=set_to_none)
        setting.ddp(X)
        setting.optimizer.step()
    assert setting.a.item() == pytest.approx(0.8)
    setting.train_step()
    assert setting.a.item() == pytest.approx(0.6)


def test_one_gradient_that_is_not_zero_is_enough(setting):
    setting.train_step()
    setting.optimizer.zero_grad(set_to_none=False)
    setting.ddp(X)
    setting.b.grad += 1e-30
    assert setting.refused() == NEVER.format("a, b")


def test_gradients_by_hand(setting):
    grads = torch.autograd.grad(setting.ddp(X), [setting.a, setting.b])
    setting.a.grad, setting.b.grad = grads
    assert setting.refused() == NEVER.format("a, b")


def test_trying_again_does_not_help(setting):
    grads = torch.autograd.grad(setting.ddp(X), [setting.a, setting.b])
    setting.a.grad, setting.b.grad = grads
    for _ in range(3):
        assert setting.refused() == NEVER.format("a, b")


def test_forward_whose_backward_is_forgotten(setting):
    setting.train_step()
    setting.ddp(X)
    assert setting.refused() == NEVER.format("a, b")  # gradients of the last step


CAST = (
    "[rank 0] Parameters were cast after wrapping; on other ranks they may not be. "
    "Parameters: a, b. What to do: wrap the module again after a cast (.double(), "
    ".half(), .to())."
)


def test_cast_after_wrapping(setting):
    setting.ddp.double()
    with pytest.raises(UnsyncedGradientsError) as caught:
        setting.ddp(X.double())
    assert str(caught.value) == CAST
    with setting.ddp.no_sync():  # nobody asks for equal replicas here
        setting.ddp(X.double())


def test_cast_between_backward_and_step(setting):
    setting.ddp(X).backward()
    setting.ddp.double()
    assert setting.refused() == CAST


def test_every_optimizer_has_its_own_count(setting):
    one, other = torch.optim.SGD([setting.a]), torch.optim.SGD([setting.b])
    setting.ddp(X).backward()
    one.step()
    setting.ddp(X).backward()
    one.step()
    other.step()  # two reductions since its last step: fine
    setting.ddp(X)
    for optimizer in (one, other):
        with pytest.raises(UnsyncedGradientsError, match="never came"):
            optimizer.step()


# --------------------------------------------------------------- (d) too early


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_step_inside_the_backward(lone_group, options):
    setting = Setting(lone_group, **options)
    optimizers = {param: torch.optim.SGD([param]) for param in (setting.a, setting.b)}
    for param in optimizers:
        param.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(UnsyncedGradientsError) as caught:
        setting.ddp(X).backward()
    assert str(caught.value) in (INSIDE.format("a"), INSIDE.format("b"))
    assert (setting.a.item(), setting.b.item()) == (1.0, 1.0)


def test_step_inside_a_later_backward(setting):
    """The reduction before this one must not vouch for it."""
    setting.ddp(X).backward()
    setting.b.register_post_accumulate_grad_hook(lambda _: setting.optimizer.step())
    with pytest.raises(UnsyncedGradientsError) as caught:
        setting.ddp(X).backward()
    assert str(caught.value) == INSIDE.format("a, b")
    assert (setting.a.item(), setting.b.item()) == (1.0, 1.0)


# --------------------------------------------------------------------- closures


def test_lbfgs_may_backward_in_its_closure(setting):
    optimizer = torch.optim.LBFGS(setting.ddp.parameters(), lr=0.1, max_iter=4)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = (setting.ddp(X) - 1).square()
        loss.backward()
        calls.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    assert len(calls) > 1
    assert calls[-1] < calls[0]
    assert loss.item() == calls[0]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_local_backward_in_a_closure(setting, by_keyword):
    def closure():
        with setting.ddp.no_sync():
            loss = setting.ddp(X)
            loss.backward()
        return loss

    args, kwargs = ((), {"closure": closure}) if by_keyword else ((closure,), {})
    with pytest.raises(UnsyncedGradientsError) as caught:
        setting.optimizer.step(*args, **kwargs)
    assert str(caught.value) == QUIET.format("a, b")
    assert setting.a.item() == 1.0


def test_unfinished_backward_in_a_later_call_of_a_closure(setting):
    optimizer = torch.optim.LBFGS(setting.ddp.parameters(), lr=0.1, max_iter=4)
    uses = iter(["ab", "ab", "a"])

    def closure():
        optimizer.zero_grad()
        loss = (setting.ddp(X, next(uses)) - 1).square()
        loss.backward()
        return loss

    with pytest.raises(UnsyncedGradientsError) as caught:
        optimizer.step(closure)
    assert str(caught.value) == UNFINISHED.format("b")


def test_closure_result_and_arguments_pass_through(setting):
    setting.optimizer.zero_grad()

    def closure():
        loss = setting.ddp(X)
        loss.backward()
        return loss

    assert setting.optimizer.step(closure).item() == 4.0
    assert setting.a.item() == pytest.approx(0.8)


def test_grad_scaler(setting):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        setting.optimizer.zero_grad()
        scaler.scale(setting.ddp(X)).backward()
        scaler.step(setting.optimizer)
        scaler.update()
    assert setting.a.item() == pytest.approx(0.6)
    setting.optimizer.zero_grad()
    with setting.ddp.no_sync():
        scaler.scale(setting.ddp(X)).backward()
    with pytest.raises(UnsyncedGradientsError, match="never averaged"):
        scaler.step(setting.optimizer)


def test_grad_scaler_may_skip_a_step(setting):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(setting.ddp(X) * torch.inf).backward()
    scaler.step(setting.optimizer)
    scaler.update()
    assert setting.a.item() == 1.0
    setting.train_step()
    assert setting.a.item() == pytest.approx(0.8)


# ---------------------------------------------------------------- what stays legal


@pytest.fixture(
    params=[
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
def any_setting(lone_group, request):
    return Setting(lone_group, **request.param)


def test_plain_training(any_setting):
    for _ in range(4):
        any_setting.train_step()
    assert any_setting.a.item() == pytest.approx(0.2)


def test_accumulation(any_setting):
    any_setting.train_step()
    for _ in range(2):
        any_setting.optimizer.zero_grad()
        with any_setting.ddp.no_sync():
            any_setting.ddp(X).backward()
        any_setting.ddp(X).backward()
        any_setting.optimizer.step()
    assert any_setting.a.item() == pytest.approx(0.0, abs=1e-6)


def test_local_sgd_inside_no_sync(any_setting):
    any_setting.train_step()
    with any_setting.ddp.no_sync():
        for _ in range(3):
            any_setting.train_step()
    assert any_setting.a.item() == pytest.approx(0.2)


def test_forward_between_backward_and_step(any_setting):
    for _ in range(3):
        any_setting.optimizer.zero_grad()
        any_setting.ddp(X).backward()
        any_setting.ddp(X)  # for a metric
        any_setting.optimizer.step()
    assert any_setting.a.item() == pytest.approx(0.4)


def test_evaluation_between_backward_and_step(any_setting):
    for _ in range(3):
        any_setting.optimizer.zero_grad()
        any_setting.ddp(X).backward()
        with torch.no_grad():
            any_setting.ddp(X)
        any_setting.optimizer.step()
    assert any_setting.a.item() == pytest.approx(0.4)


def test_penalty_inside_no_sync(any_setting):
    for _ in range(2):
        any_setting.optimizer.zero_grad()
        any_setting.ddp(X).backward()
        with any_setting.ddp.no_sync():
            any_setting.a.square().sum().backward()  # equal on all ranks
        any_setting.optimizer.step()
    assert any_setting.a.item() == pytest.approx((1 - 0.2 - 0.2) * 0.8 - 0.2)


def test_two_losses_in_one_backward(setting):
    for _ in range(2):
        setting.optimizer.zero_grad()
        (setting.ddp(X) + setting.ddp(X)).backward()
        setting.optimizer.step()
    assert setting.a.item() == pytest.approx(0.2)


def test_one_reduction_in_two_backward_calls(setting):
    first, second = setting.ddp(X, "a"), setting.ddp.module(X, "b")
    first.backward()
    second.backward()
    setting.optimizer.step()
    assert setting.b.item() == pytest.approx(0.8)


def test_two_optimizers(setting):
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (setting.a, setting.b)]
    for _ in range(2):
        setting.ddp.zero_grad()
        setting.ddp(X).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert setting.a.item() == pytest.approx(0.6)


def test_step_without_gradients(setting):
    setting.ddp(X)
    setting.optimizer.step()
    with setting.ddp.no_sync():
        setting.ddp(X)
    setting.optimizer.step()
    assert setting.a.item() == 1.0


def test_optimizers_of_other_parameters(setting):
    setting.ddp(X, "a").backward()  # pending
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other], lr=0.1).step()
    assert other.item() == pytest.approx(0.9)


def test_foreign_parameters_beside_ours(setting):
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    setting.optimizer.add_param_group({"params": [other]})
    setting.ddp(X).backward()
    setting.optimizer.step()
    assert other.item() == pytest.approx(0.9)


def test_two_objects_are_watched_apart(lone_group):
    broken, fine = Setting(lone_group), Setting(lone_group)
    broken.ddp(X, "a").backward()
    fine.train_step()
    assert fine.a.item() == pytest.approx(0.8)
    assert broken.refused() == UNFINISHED.format("b")


def test_frozen_branch_of_a_gan(lone_group):
    """The generator's loss leaves gradients on the discriminator; nobody steps them."""
    gen, dis = Setting(lone_group), Setting(lone_group)
    for _ in range(2):
        dis.optimizer.zero_grad()
        dis.ddp(gen.ddp(X).detach()).backward()
        dis.optimizer.step()
        gen.optimizer.zero_grad()
        dis.ddp(gen.ddp(X)).backward()
        gen.optimizer.step()


# ------------------------------------------------------------------------ policies


def test_warn(lone_group):
    setting = Setting(lone_group, unsynced="warn")
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    with pytest.warns(UserWarning, match="never averaged") as caught:
        setting.optimizer.step()
    assert [str(w.message) for w in caught] == [QUIET.format("a, b")]
    assert setting.a.item() == pytest.approx(0.8)


def test_warning_points_at_the_step(lone_group):
    setting = Setting(lone_group, unsynced="warn")
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    with pytest.warns(UserWarning, match="never averaged") as caught:
        setting.optimizer.step()
    assert caught[0].filename == __file__


def test_ignore(lone_group):
    setting = Setting(lone_group, unsynced="ignore")
    with setting.ddp.no_sync():
        setting.ddp(X).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setting.optimizer.step()
    assert setting.a.item() == pytest.approx(0.8)


# ----------------------------------------------------------------------- lifetime


@pytest.mark.usefixtures("no_gc")
def test_optimizers_are_not_kept(setting):
    setting.train_step()
    optimizer = weakref.ref(setting.optimizer)
    setting.optimizer = None
    assert optimizer() is None


def test_a_dropped_object_watches_no_more(lone_group):
    setting = Setting(lone_group)
    setting.ddp(X, "a").backward()
    module, optimizer = setting.ddp.module, setting.optimizer
    del setting
    optimizer.step()
    assert module.a.item() == pytest.approx(0.8)


def test_wrapped_again_with_others_trainable(lone_group):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].requires_grad_(False)
    first = DataParallel(module)  # still alive in the second stage
    first(torch.ones(1, 2)).sum().backward()
    module.requires_grad_(True)
    module[0].requires_grad_(False)
    second = DataParallel(module)
    optimizer = torch.optim.SGD(module[1].parameters(), lr=0.1)
    second(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_clamp_after_the_generators_turn(lone_group):
    critic = DataParallel(nn.Linear(2, 1))
    for _ in range(2):
        with torch.no_grad():
            for param in critic.parameters():
                param.clamp_(-0.01, 0.01)
        critic(torch.ones(1, 2)).sum().backward()
        critic.requires_grad_(False)
        critic(torch.ones(1, 2, requires_grad=True)).sum().backward()
        critic.requires_grad_(True)


def test_ignored_parameters_of_a_compiled_module(lone_group):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module._ddp_params_and_buffers_to_ignore = ["1.weight"]
    ddp = DataParallel(module)
    ddp.module = nn.Sequential(module)  # other names, as torch.compile gives
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(1, 2)).sum().backward()
    optimizer.step()
