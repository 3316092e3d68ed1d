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
from tests.support.both import Two, modes

# Words of each error, and of its remedy.
QUIET = (
    "belongs to a forward inside no_sync()",
    "or call sync_gradients() on all ranks",
)
AGAIN = ("(two forwards, then two backwards; or one graph twice)", "sum of the losses")
NESTED = ("use_reentrant=True", "pass use_reentrant=False")
INSTEAD = ("ran without its wrapper", "call the wrapper, model(x)")
BESIDES = ("or a loss was made of its parameters alone", "add that loss to the one of")
UNFINISHED = ("parameters that were not used in producing loss", "call reset() on all")
INTERRUPTED = ("before it brought all gradients", "call reset() on all ranks, then")
FAILED = ("An earlier backward failed; gradients are not", "call reset() on all ranks")
CTRL_C = ("An earlier backward was interrupted; gradients", "call reset() on all ranks")
NEVER = ("announced a synchronised backward that never came", "call backward() on what")
INSIDE = ("steps inside the backward", "step after backward() returned")
CAST = ("Parameters were cast or moved after", "wrap the module again after a cast")
X = torch.tensor([2.0])


class Setting:
    def __init__(self, group, **options):
        self.ddp = DataParallel(Two(), process_group=group, **options)
        self.a, self.b = self.ddp.module.a, self.ddp.module.b
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)

    def train_step(self, use="ab"):
        self.optimizer.zero_grad()
        self.ddp(X, use).backward()
        self.optimizer.step()

    def local_backward(self, use="ab"):
        with self.ddp.no_sync():
            self.ddp(X, use).backward()

    def penalty(self):
        """Equal on all ranks: it may stay local."""
        with self.ddp.no_sync():
            self.a.square().sum().backward()

    def refuses(self, words, names, step=None):
        """The step is refused; parameters stay as they are."""
        before = self.a.item(), self.b.item()
        with pytest.raises(UnsyncedGradientsError) as caught:
            (step or self.optimizer.step)()
        text = str(caught.value)
        assert text.startswith("[rank 0] ")
        assert all(each in text for each in words), text
        assert f"Parameters: {names}." in text or f"for rank 0: {names}." in text, text
        assert (self.a.item(), self.b.item()) == before
        return text


@pytest.fixture
def setting(lone_group):
    return Setting(lone_group)


def fail(_):
    raise KeyError("user code")


def ctrl_c(*_):
    raise KeyboardInterrupt


# ------------------------------------------------------------- (a) not finished


def test_pending_reduction(setting):
    setting.ddp(X, "a").backward()
    setting.refuses(UNFINISHED, "b")
    setting.optimizer = torch.optim.SGD([setting.a], lr=0.1)  # holds the other half
    setting.refuses(UNFINISHED, "b")
    setting.ddp.reset()
    setting.train_step()
    assert setting.a.item() == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("hook", "kind"), [(fail, KeyError), (ctrl_c, KeyboardInterrupt)]
)
def test_aborted_backward(setting, hook, kind):
    setting.a.register_hook(hook)  # b, used last, gets its gradient first
    with pytest.raises(kind):
        setting.ddp(X).backward()
    setting.refuses(INTERRUPTED, "a")
    with pytest.raises(UnfinishedReductionError, match="raised, or was interrupted"):
        setting.ddp(X)


def test_interrupted_backward_inside_our_own_code(setting):
    setting.ddp.register_comm_hook(None, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        setting.ddp(X).backward()
    setting.refuses(CTRL_C, "a, b")
    with pytest.raises(ReducerFailedError, match="An earlier backward was interrupted"):
        setting.ddp(X)


def test_failed_backward(setting):
    half = setting.ddp(X, "a")
    half.backward(retain_graph=True)
    with pytest.raises(MarkedTwiceError, match="Parameters: a"):
        half.backward()
    setting.refuses(FAILED, "a")


# ----------------------------------------------------------------- (b) local parts


def two_forwards(ddp):
    first, second = ddp(X), ddp(X)
    first.backward()
    second.backward()


def retained_graph(ddp):
    out = ddp(X)
    out.backward(retain_graph=True)
    out.backward()


def method_of_the_module(ddp):
    ddp(X).backward()
    ddp.module(X, "b").backward()


def module_alone(ddp):
    ddp.module(X, "b").backward()


@pytest.mark.parametrize(
    ("mistake", "words", "names"),
    [
        (two_forwards, AGAIN, "a, b"),
        (retained_graph, AGAIN, "a, b"),
        (method_of_the_module, BESIDES, "b"),
        (module_alone, INSTEAD, "b"),
    ],
)
def test_local_part(setting, mistake, words, names):
    mistake(setting.ddp)
    setting.refuses(words, names)


@pytest.mark.parametrize(
    ("synchronise", "expected"),
    [
        (lambda ddp: ddp(X).backward(), 0.6),  # averages what was accumulated
        (DataParallel.sync_gradients, 0.8),
    ],
)
def test_it_stays_refused_until_synchronised(setting, synchronise, expected):
    setting.local_backward()
    setting.refuses(QUIET, "b", torch.optim.SGD([setting.b]).step)
    for _ in range(2):
        setting.refuses(QUIET, "a, b")
    synchronise(setting.ddp)
    setting.optimizer.step()
    assert setting.a.item() == pytest.approx(expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_dropped_gradients_do_not_matter(setting, set_to_none):
    setting.train_step()
    setting.local_backward()
    setting.optimizer.zero_grad(set_to_none=set_to_none)
    setting.optimizer.step()
    setting.train_step()
    assert setting.a.item() == pytest.approx(0.6)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("first", ["no_sync", "module"])
def test_a_dropped_local_gradient_is_forgotten_for_good(lone_group, set_to_none, first):
    setting = Setting(lone_group, find_unused_parameters=True)
    if first == "module":
        setting.ddp(X).backward()
        setting.ddp.module(X, "a").backward()
    else:
        setting.local_backward()
    setting.optimizer.zero_grad(set_to_none=set_to_none)
    setting.ddp(X, "b").backward()
    setting.optimizer.step()
    assert setting.a.item() == 1.0
    setting.penalty()
    setting.ddp(X, "b").backward()
    setting.optimizer.step()
    assert setting.a.item() == pytest.approx(0.8)


@pytest.mark.parametrize("zero", [torch.Tensor.zero_, lambda g: g.mul_(0)])
def test_only_what_is_not_zero_is_named(setting, zero):
    setting.local_backward()
    zero(setting.a.grad)
    setting.refuses(QUIET, "b")
    setting.b.grad[0] = torch.nan  # not zero either
    setting.refuses(QUIET, "b")


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


def test_a_layer_that_is_checkpointed_twice(setting, lone_group):
    class Twice(nn.Linear):
        def forward(self, x):
            for _ in range(2):
                x = checkpoint(super().forward, x, use_reentrant=True)
            return x

    ddp = DataParallel(Twice(1, 1), process_group=lone_group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(1, 1, requires_grad=True)).sum().backward()
    setting.refuses(NESTED, "weight, bias", optimizer.step)


def test_several_mistakes_are_told_together(setting):
    setting.local_backward("a")
    setting.ddp.module(X, "b").backward()
    setting.refuses(QUIET, "a, b")  # the forward still waits
    setting.ddp(X).backward()
    out = setting.ddp(X, "ab")
    out.backward(retain_graph=True)
    setting.ddp.module(X, "b").backward()
    out.backward(inputs=[setting.a])
    setting.refuses(AGAIN + BESIDES, "a, b")


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
    new.module(X).backward()
    old.refuses(["never averaged"], "a, b")  # by neither


def test_a_wrapper_inside_no_sync_vouches_for_nobody(lone_group):
    """Not every local gradient is noted there."""
    old = Setting(lone_group)
    old.train_step()
    new = DataParallel(old.ddp.module, process_group=lone_group)
    with old.ddp.no_sync():
        new.module(X).backward()
        old.refuses(["never averaged"], "a, b")


# ----------------------------------------------- (c) announced, but never reduced


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_left_out_on_all_ranks(setting, set_to_none, other_rank):
    """The other rank does the same; see `test_skipped` for one that does not."""
    other_rank.is_equal = True
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
    setting.ddp(X)
    setting.refuses(NEVER, "a, b")  # gradients of the last step
    setting.optimizer.zero_grad(set_to_none=False)
    setting.b.grad += 1e-30
    setting.refuses(NEVER, "a, b")


def test_gradients_by_hand(setting):
    grads = torch.autograd.grad(setting.ddp(X), [setting.a, setting.b])
    setting.a.grad, setting.b.grad = grads
    for _ in range(3):  # trying again does not help
        setting.refuses(NEVER, "a, b")


def test_cast_after_wrapping(setting):
    setting.ddp(X).backward()
    setting.ddp.double()
    text = setting.refuses(CAST, "a, b")
    assert "(torch.float32 on cpu before, torch.float64 on cpu now)" in text
    setting.refuses(CAST, "a, b", lambda: setting.ddp(X.double()))
    with setting.ddp.no_sync():  # nobody asks for equal replicas here
        setting.ddp(X.double())


def test_a_cast_names_every_parameter(lone_group):
    ddp = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(ddp.parameters())
    ddp(torch.ones(1, 2)).sum().backward()
    names = "0.weight, 0.bias, 1.weight, 1.bias"
    ddp.bfloat16()
    with pytest.raises(UnsyncedGradientsError, match=f"Parameters: {names}[.]"):
        optimizer.step()
    ddp.module[0].float()  # those that differ now, and no others
    with pytest.raises(UnsyncedGradientsError, match=r"Parameters: 1.weight, 1.bias\."):
        optimizer.step()


def test_a_move_that_makes_new_parameters_is_called_a_move(lone_group):
    ddp = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(ddp.parameters())
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.to("meta")
    names = "0.weight, 0.bias, 1.weight, 1.bias"
    for call in (optimizer.step, lambda: ddp(torch.ones(1, 2, device="meta"))):
        with pytest.raises(UnsyncedGradientsError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith("[rank 0] Parameters were cast or moved after wrapping")
        assert "(torch.float32 on cpu before, torch.float32 on meta now)" in text
        assert f"Parameters: {names}." in text
        assert "joined the module" not in text


def test_every_optimizer_has_its_own_count(setting):
    one, other = torch.optim.SGD([setting.a]), torch.optim.SGD([setting.b])
    setting.ddp(X).backward()
    one.step()
    setting.ddp(X).backward()
    one.step()
    other.step()  # two reductions since its last step: fine
    setting.ddp(X)
    setting.refuses(NEVER, "a", one.step)
    setting.refuses(NEVER, "b", other.step)


# --------------------------------------------------------------- (d) too early


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_step_inside_the_backward(lone_group, options):
    setting = Setting(lone_group, **options)
    setting.ddp(X).backward()  # must not vouch for the next one
    setting.b.register_post_accumulate_grad_hook(lambda _: setting.optimizer.step())
    setting.refuses(INSIDE, "a, b", setting.ddp(X).backward)


# --------------------------------------------------------------------- closures


def test_lbfgs_may_backward_in_its_closure(setting):
    optimizer = torch.optim.LBFGS(setting.ddp.parameters(), lr=0.1, max_iter=4)
    uses, losses = iter(["ab"] * 4 + ["ab", "ab", "a"]), []

    def closure():
        optimizer.zero_grad()
        loss = (setting.ddp(X, next(uses)) - 1).square()
        loss.backward()
        losses.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    assert len(losses) == 4
    assert losses[-1] < losses[0] == loss.item()
    with pytest.raises(UnsyncedGradientsError, match=r"for rank 0: b\."):
        optimizer.step(closure)


def test_local_backward_in_a_closure(setting):
    def closure():
        loss = setting.ddp(X)
        loss.backward()
        return loss

    assert setting.optimizer.step(closure).item() == 4.0
    assert setting.a.item() == pytest.approx(0.8)
    setting.optimizer.zero_grad()
    with setting.ddp.no_sync():
        loss = setting.ddp(X)
    closure = lambda: loss.backward() or loss  # noqa: E731
    setting.refuses(QUIET, "a, b", lambda: setting.optimizer.step(closure=closure))


def test_grad_scaler(setting):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, torch.inf, 1.0):  # it skips the second step
        setting.optimizer.zero_grad()
        scaler.scale(setting.ddp(X) * factor).backward()
        scaler.step(setting.optimizer)
        scaler.update()
    assert setting.a.item() == pytest.approx(0.6)
    setting.optimizer.zero_grad()
    with setting.ddp.no_sync():
        scaler.scale(setting.ddp(X)).backward()
    setting.refuses(QUIET, "a, b", lambda: scaler.step(setting.optimizer))


# ---------------------------------------------------------------- what stays legal


def accumulation(setting):
    setting.optimizer.zero_grad()
    setting.local_backward()
    setting.ddp(X).backward()
    setting.optimizer.step()


def local_sgd(setting):
    with setting.ddp.no_sync():
        setting.train_step()


def forward_before_the_step(setting):
    for grad_enabled in (True, False):
        setting.optimizer.zero_grad()
        setting.ddp(X).backward()
        with torch.set_grad_enabled(grad_enabled):
            setting.ddp(X)  # for a metric, or an evaluation
        setting.optimizer.step()


def with_penalty(setting):
    setting.optimizer.zero_grad()
    setting.ddp(X).backward()
    setting.penalty()
    setting.optimizer.step()


def two_losses_in_one_backward(setting):
    setting.optimizer.zero_grad()
    (setting.ddp(X) + setting.ddp(X)).backward()
    setting.optimizer.step()


def two_optimizers(setting):
    setting.ddp.zero_grad()
    setting.ddp(X).backward()
    for param in (setting.a, setting.b):
        torch.optim.SGD([param], lr=0.1).step()


@modes
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (Setting.train_step, 0.4),
        (accumulation, 0.0),
        (local_sgd, 0.4),
        (forward_before_the_step, 0.0),
        (with_penalty, (0.8 * 0.8 - 0.2) * 0.8 - 0.2),
        (two_losses_in_one_backward, 0.0),
        (two_optimizers, 0.4),
    ],
)
def test_legal_training(lone_group, mode, step, expected):
    setting = Setting(lone_group, **mode)
    for each in (Setting.train_step, step, step):
        each(setting)
    assert setting.a.item() == pytest.approx(expected, abs=1e-6)
    setting.optimizer.zero_grad()
    setting.ddp.module(X).backward()
    with pytest.raises(UnsyncedGradientsError):  # it is watched all the same
        setting.optimizer.step()


def test_one_reduction_in_two_backward_calls(setting):
    first, second = setting.ddp(X, "a"), setting.ddp.module(X, "b")
    first.backward()
    second.backward()
    setting.optimizer.step()
    assert setting.b.item() == pytest.approx(0.8)


def test_step_without_gradients(setting):
    setting.ddp(X)
    setting.optimizer.step()
    with setting.ddp.no_sync():
        setting.ddp(X)
    setting.optimizer.step()
    assert setting.a.item() == 1.0


def test_foreign_parameters(setting, lone_group):
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    setting.optimizer.add_param_group({"params": [other]})
    setting.ddp(X).backward()
    setting.optimizer.step()
    setting.ddp(X, "a").backward()  # pending
    torch.optim.SGD([other], lr=0.1).step()
    assert other.item() == pytest.approx(0.8)
    fine = Setting(lone_group)
    fine.train_step()
    assert fine.a.item() == pytest.approx(0.8)


# ------------------------------------------------------------- policies, lifetime


@pytest.mark.parametrize(("policy", "num_warnings"), [("warn", 1), ("ignore", 0)])
def test_policies_that_let_the_step_run(lone_group, policy, num_warnings):
    setting = Setting(lone_group, unsynced=policy)
    setting.local_backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        setting.optimizer.step()
    # They point at the step.
    assert [w.filename for w in caught] == [__file__] * num_warnings
    assert all("never averaged" in str(w.message) for w in caught)
    assert setting.a.item() == pytest.approx(0.8)


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
