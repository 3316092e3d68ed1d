"""The matrix: wrong uses of data parallelism, each written once for both wrappers.

A pattern trains two ranks on different data: a right step, the wrong one, then right
steps again, so that an error may come late. Its row says how torch 2.13 ends. minidp
must end in right gradients or in a named error, and must train right after reset().
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.fault.play import BOTH, Net, Outcome, Pattern, plain, play
from tests.support.both import done

RIGHT, ERROR, LATE = Outcome.RIGHT, Outcome.ERROR, Outcome.LATE
SILENT, HANG, CRASH = Outcome.SILENT, Outcome.HANG, Outcome.CRASH
FIND, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}
MODES = {"default": {}, "find_unused": FIND, "static_graph": STATIC, "views": VIEW}
ALL, FEW, ONE = " ".join(MODES), "default find_unused", "default"
SECOND = frozenset({1})
OF_A, OF_B = ("a.weight", "a.bias"), ("b.weight", "b.bias")
OF_AB = OF_A + OF_B
PATTERNS: list[Pattern] = []


def pattern(name, ends, modes=ALL, *, find=None, static=None, views=None, **more):
    """Decorate a use: a row for each mode, in which torch ends as the keyword says."""
    others = {"find_unused": find, "static_graph": static, "views": views}

    def add(run):
        for mode in modes.split():
            full = name if mode == "default" else f"{name}, {mode}"
            row = {"options": MODES[mode], **more}
            PATTERNS.append(Pattern(full, run, others.get(mode) or ends, **row))
        return run

    return add


def between(name, ends, modes=ALL, *, after=2, **more):
    """Decorate what happens after two right steps, and before ``after`` more."""

    def add(wrong):
        @pattern(name, ends, modes, **more)
        def run(stage):
            stage.begin()
            stage.train(2)
            wrong(stage)
            stage.train(after)

        return wrong

    return add


def step(name, ends, modes=ALL, *, loss=plain, by_hand=None, **more):
    """Decorate one wrong step among right ones, whose gradients are those of ``loss``.

    ``by_hand``: the options of `Play.by_hand`, which makes the step in the optimizer's
    place.
    """

    def add(wrong):
        @between(name, ends, modes, **more)
        def run(stage):
            stage.model.zero_grad()
            wrong(stage)
            if by_hand is None:
                stage.update(loss)
            else:
                stage.by_hand(**by_hand)

        return wrong

    return add


def twice(module, x, rank):
    return plain(module, x, rank) * 2


# -- a parameter is unused -------------------------------------------------------------


def uses(*of_rank):
    return lambda module, x, rank: module(x, of_rank[rank]).pow(2).sum()


OF_SECOND, LAST = {"names": OF_B, "culprits": SECOND}, ", in the last step"
for name, ends, modes, loss, more in [
    ("unused on one rank", HANG, ALL, uses("ab", "a"), OF_SECOND),
    ("unused on all ranks", LATE, ALL, uses("a", "a"), {"names": OF_B}),
    (f"unused on one rank{LAST}", HANG, FEW, uses("ab", "a"), OF_SECOND),
    (f"unused on all ranks{LAST}", SILENT, ALL, uses("a", "a"), {"names": OF_B}),
    ("other layer unused on each rank", LATE, ALL, uses("a", "b"), {"names": OF_AB}),
]:
    is_last = name.endswith(LAST)

    @between(name, ends, modes, find=RIGHT, after=0 if is_last else 2, **more)
    def unused(stage, loss=loss, is_last=is_last):
        stage.loss = loss
        stage.undo.append(lambda: setattr(stage, "loss", plain))
        stage.train()
        if not is_last:
            stage.loss = plain


# -- distributed autograd: gradients live in a context of RPC --------------------------


@contextlib.contextmanager
def worker_of_rpc():
    """This process alone is a world of RPC; contexts need no other workers."""
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/rpc"
        options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            rpc.shutdown()


@between("backward of distributed autograd", RIGHT)
def in_a_context(stage):
    with worker_of_rpc():
        for _ in range(2):
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [stage.forward()])
                found = dist_autograd.get_gradients(context)
                for param in stage.model.parameters():
                    param.grad = found[param].clone()
            stage.update()


# -- backwards that do not belong to a forward -----------------------------------------


@step("method other than forward", SILENT, names=OF_AB)
def other_method(stage):
    stage.model.module.other(stage.x()).pow(2).sum().backward()


@step("... after the main backward", SILENT, loss=twice, names=OF_AB)
def other_method_besides(stage):
    stage.backward()
    other_method(stage)


def with_sum_of_b(module, x, rank):
    return plain(module, x, rank) + module.b(x).sum()


@step("a part of .module called alone", SILENT, loss=with_sum_of_b, names=OF_B)
def part_called(stage):
    stage.backward()
    stage.model.module.b(stage.x()).sum().backward()


@step("two forwards, then two backwards", SILENT, loss=twice, names=OF_AB)
def two_and_two(stage):
    for loss in [stage.forward() for _ in range(2)]:
        loss.backward()


@step("retained graph, backward twice", SILENT, loss=twice, names=OF_AB)
def retained(stage):
    loss = stage.forward()
    loss.backward(retain_graph=True)
    loss.backward()


@step("stray backward before the main one", RIGHT, loss=twice)
def stray(stage):
    """Its gradients are averaged together with those of the main one."""
    stage.backward(stage.model.module)
    stage.backward()


def penalty_on_one_rank(stage):
    if stage.rank == 1:
        stage.model.module.b.weight.square().sum().backward()


@step("stray backward on one rank, after the main one", SILENT, **OF_SECOND)
def stray_on_one_rank(stage):
    stage.backward()
    penalty_on_one_rank(stage)


# Legal: a penalty's gradient is looked at, and dropped.
between("penalty on one rank before zero_grad", RIGHT)(penalty_on_one_rank)


# -- no_sync ---------------------------------------------------------------------------


for what, ends, forward, backward in [
    ("the forward only", SILENT, True, False),
    ("the backward only", RIGHT, False, True),
    ("both, then step", SILENT, True, True),
]:

    @step(f"no_sync() around {what}", ends, names=OF_AB)
    def quiet(stage, forward=forward, backward=backward):
        stage.model.require_backward_grad_sync = not forward
        loss = stage.forward()
        stage.model.require_backward_grad_sync = not backward
        loss.backward()
        stage.model.require_backward_grad_sync = True


def average_parameters(stage):
    for param in stage.model.parameters():
        torch.distributed.all_reduce(param.data, group=stage.group)
        param.data.div_(2)


@between("local SGD inside no_sync()", RIGHT, is_legal=True)
def local_sgd(stage):
    """Legal: replicas differ on purpose until they are averaged."""
    with stage.model.no_sync():
        for _ in range(2):
            stage.model.zero_grad()
            stage.backward()
            stage.optimizer.step()
    average_parameters(stage)


def indented(*, is_averaged):
    """Steps inside no_sync(), then a synchronised one: averaged before, or not."""

    def run(stage):
        stage.begin()
        for k in range(6):
            is_synchronised = stage.model.require_backward_grad_sync = k % 3 == 2
            if is_synchronised and is_averaged:
                average_parameters(stage)
            stage.model.zero_grad()
            stage.backward()
            if is_synchronised or not is_averaged:
                stage.update(None)
            else:
                stage.optimizer.step()
        stage.model.require_backward_grad_sync = True

    return run


AVERAGED = "local SGD, averaged before each synchronised step"
pattern(AVERAGED, RIGHT, static=ERROR, is_legal=True)(indented(is_averaged=True))


@pattern("post-local SGD with a comm hook", RIGHT, "default views", is_legal=True)
def post_local_sgd(stage):
    """Legal: a hook that averages over few ranks (here one), then parameters."""
    stage.begin()

    def hook(_state, bucket):  # torch reads annotations
        if stage.is_over:
            group = stage.model.process_group
            torch.distributed.all_reduce(bucket.buffer().div_(2), group=group)
        return done(bucket.buffer())

    stage.model.register_comm_hook(None, hook)
    for k in range(12):
        stage.model.zero_grad()
        stage.backward()
        stage.optimizer.step()
        if k % 4 == 3:
            average_parameters(stage)
            stage.stepped()


INDENTED = "optimizer.step() indented into no_sync()"
pattern(INDENTED, SILENT, static=ERROR, names=OF_AB)(indented(is_averaged=False))


@pattern("a forward between backward and step", RIGHT)
def forward_between(stage):
    stage.begin()
    for _ in range(3):
        stage.model.zero_grad()
        stage.backward()
        stage.forward()
        stage.update()


# -- zeroed gradients ------------------------------------------------------------------


for name, accumulates in [
    ("all ranks skip a backward, gradients zeroed", False),
    ("all ranks drop accumulated gradients, zeroed", True),
]:

    @between(name, RIGHT, is_legal=True)
    def zeroed(stage, accumulates=accumulates):
        """Legal: a loss that is NaN on all ranks. Momentum moves the parameters."""
        stage.optimizer = stage.sgd(momentum=0.9)
        stage.train()
        for _ in range(2):
            if accumulates:
                with stage.model.no_sync():
                    stage.backward()
            stage.model.zero_grad(set_to_none=False)
            if not accumulates:
                stage.forward()
            stage.update(None)


def moved_weights(move):
    """Legal: other weights for a forward, on each rank its own; then back."""

    def run(stage):
        stage.begin()
        for _ in range(3):
            params = list(stage.model.parameters())
            before = [param.detach().clone() for param in params]
            with torch.no_grad():
                move(stage, params)
            stage.model.zero_grad(set_to_none=False)
            stage.backward()
            with torch.no_grad():
                for param, old in zip(params, before, strict=True):
                    param.copy_(old)
            stage.update(None)

    return run


SAM = "sharpness-aware minimisation, gradients zeroed"


@pattern(SAM, RIGHT, static=ERROR, is_legal=True)
@moved_weights
def climb(stage, params):
    """To the worst case nearby, for this rank's data."""
    with torch.enable_grad(), stage.model.no_sync():
        stage.backward()
    for param in params:
        param += 0.05 * param.grad


@pattern("weights disturbed on each rank for the forward", RIGHT, is_legal=True)
@moved_weights
def disturb(stage, params):
    generator = torch.Generator().manual_seed(stage.rank)
    for param in params:
        param += 0.1 * torch.randn(param.shape, generator=generator)


# -- one replica changes ---------------------------------------------------------------


def load(module):
    module.load_state_dict({n: v + 0.5 for n, v in module.state_dict().items()})


def add_half(model):
    model.module.b.weight.data[0, 0] += 0.5


for name, modes, names, is_a_frozen, change in [
    ("checkpoint loaded on one rank, after wrapping", ALL, OF_AB, False, load),
    # A pretrained backbone:
    ("... of a frozen part", ONE, OF_A, True, lambda model: load(model.module.a)),
    ("one replica changed by hand", ALL, OF_B, False, add_half),
]:

    @pattern(name, SILENT, modes, names=names)
    def changed_on_one(stage, is_a_frozen=is_a_frozen, change=change):
        module = Net()
        module.a.requires_grad_(not is_a_frozen)
        stage.begin(module)
        if stage.rank == 1:
            change(stage.model)
        stage.train(3)


# -- gradients by other ways -----------------------------------------------------------


def grads_of(stage):
    params = list(stage.model.parameters())
    with torch.enable_grad():
        grads = torch.autograd.grad(stage.forward(), params)
    return zip(params, grads, strict=True)


@step("torch.autograd.grad into .grad", SILENT, names=OF_AB)
def grad_function(stage):
    for param, grad in grads_of(stage):
        param.grad = grad


@step("torch.autograd.grad, applied by hand", SILENT, by_hand={}, names=OF_AB)
def grad_function_by_hand(stage):
    with torch.no_grad():
        for param, grad in grads_of(stage):
            param -= 0.1 * grad


def penalised(module, x, _rank):
    x = x.clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.pow(2).sum() + slope.pow(2).sum()


@between("gradient penalty by torch.autograd.grad", RIGHT)
def gradient_penalty(stage):
    """Legal, on all ranks or on one."""
    stage.loss = penalised
    stage.train(2)
    stage.loss = lambda m, x, rank: (plain if rank else penalised)(m, x, rank)


def call_quietly(stage):
    with stage.model.no_sync():
        stage.backward()


def unused_by_hand(stage):
    stage.model(stage.x(), "a").pow(2).sum().backward()


for name, wrong, ends, names, hand in [
    ("two forwards, then two backwards", two_and_two, SILENT, OF_AB, {}),
    ("method other than forward", other_method, SILENT, OF_AB, {}),
    ("no_sync() around both", call_quietly, SILENT, OF_AB, {"drops_grads": False}),
    ("unused on all ranks", unused_by_hand, ERROR, OF_B, {}),
]:
    step(name + ", applied by hand", ends, ONE, by_hand=hand, names=names)(wrong)


@between("functional_call with tensors made from the parameters", RIGHT)
def fast_weights(stage):
    """Legal."""

    def loss(module, x, _rank):
        fast = {n: p * 0.5 for n, p in module.named_parameters()}
        return functional_call(module, fast, (x,)).pow(2).sum()

    stage.loss = loss
    stage.train(3)
    stage.loss = plain


def foreign_weights(stage, *, use_optimizer):
    own = dict(stage.model.named_parameters())
    others = {n: p.detach().clone().requires_grad_() for n, p in own.items()}
    optimizer = torch.optim.SGD(others.values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        functional_call(stage.model, others, (stage.x(),)).pow(2).sum().backward()
        if use_optimizer:
            optimizer.step()
        with torch.no_grad():
            for name, param in own.items():  # what the others have become
                if not use_optimizer:
                    others[name] -= 0.1 * others[name].grad
                param.copy_(others[name])
        stage.stepped()


between("functional_call with tensors of their own", SILENT, ONE, names=OF_AB)(
    partial(foreign_weights, use_optimizer=True)
)
between("... applied by hand", SILENT, ONE, names=OF_AB)(
    partial(foreign_weights, use_optimizer=False)
)


# -- the module changes after wrapping -------------------------------------------------


def changes(change, back=None, *, frozen=False, new_optimizer=True, by_hand=False):
    """Train, change the module, train on; without a way back, wrap again."""

    def run(stage):
        module = Net()
        module.b.requires_grad_(not frozen)
        stage.begin(module)
        stage.train(2)
        change(stage)
        stage.wraps_again = back is None
        if back is not None:
            stage.undo.append(lambda: back(stage))
        if new_optimizer:
            stage.optimizer = stage.sgd()
        for k in range(3):
            stage.model.zero_grad()
            stage.backward()
            if not by_hand:
                stage.update(None)
                continue
            stage.by_hand()
            if k:  # only the next forward can tell
                stage.stepped()

    return run


def freeze(stage):
    stage.model.module.b.requires_grad_(False)


def freeze_one(stage):
    stage.model.module.b.requires_grad_(stage.rank == 0)


def unfreeze(stage):
    stage.model.module.b.requires_grad_(True)


def replace(stage):
    torch.manual_seed(1)
    stage.model.module.b = nn.Linear(3, 3)


def setting(value, *path):
    """Set an attribute of a part of the module."""

    def change(stage):
        *parts, name = path
        setattr(stage.model.module.get_submodule(".".join(parts)), name, value())

    return change


def parameter(*shape):
    return nn.Parameter(torch.ones(*shape))


insert = setting(lambda: nn.Linear(3, 3), "c")
insert_parameter = setting(lambda: parameter(3), "scale")
replace_parameter = setting(lambda: parameter(3, 3), "b", "weight")


def part_to_double(stage):
    stage.undo.append(stage.model.module.b.double().float)


def part_back(stage):
    stage.model.module.b.double().float()


def nothing(stage):
    stage.model.to(torch.float32).to("cpu")


B, BC = {"names": OF_B}, {"names": (*OF_B, "c.weight")}
C, SCALE = {"names": ("c.weight",)}, {"names": ("scale",)}
HAND, BEFORE, AFTER = ", applied by hand", ", optimizer of before", " after wrapping"
BY_HAND, OLD = {"by_hand": True}, {"new_optimizer": False}
for name, modes, ends, find, of, run in [
    ("frozen" + AFTER, ALL, LATE, RIGHT, B, changes(freeze, unfreeze)),
    ("frozen on one rank", FEW, HANG, SILENT, OF_SECOND, changes(freeze_one, unfreeze)),
    ("unfrozen" + AFTER, ALL, SILENT, None, B, changes(unfreeze, frozen=True)),
    ("layer added" + AFTER, ALL, SILENT, None, C, changes(insert)),
    ("parameter added", ONE, SILENT, None, SCALE, changes(insert_parameter)),
    ("layer replaced" + AFTER, ALL, LATE, SILENT, B, changes(replace)),
    ("parameter replaced", ONE, LATE, None, B, changes(replace_parameter)),
    ("layer replaced" + BEFORE, ONE, LATE, None, B, changes(replace, **OLD)),
    (
        "unfrozen" + HAND,
        FEW,
        SILENT,
        None,
        BC,
        changes(unfreeze, frozen=True, **BY_HAND),
    ),
    ("layer added" + HAND, FEW, SILENT, None, BC, changes(insert, **BY_HAND)),
    ("layer replaced" + HAND, FEW, ERROR, SILENT, BC, changes(replace, **BY_HAND)),
]:
    pattern(name, ends, modes, find=find, **of)(run)
for name, modes, method, *dtypes in [
    (".double()", ALL, "double"),
    (".half()", FEW, "half"),
    (".to(bfloat16)", FEW, "to", torch.bfloat16),
    (".to(float64) and back", ALL, "to", torch.float64, torch.float32),
]:

    def cast(stage, method=method, dtypes=dtypes):
        stage.undo.append(stage.model.float)
        for arguments in [(dtype,) for dtype in dtypes] or [()]:
            getattr(stage.model, method)(*arguments)

    pattern(name + AFTER, SILENT, modes, names=OF_AB)(changes(cast))
    for how, options in [(BEFORE, OLD), (HAND, BY_HAND)]:
        full = name + AFTER + how
        pattern(full, SILENT, ONE, names=OF_AB)(changes(cast, **options))
for name, modes, ends, find, of, run in [
    ("a layer .double()" + AFTER, ALL, LATE, ERROR, B, changes(part_to_double)),
    ("a layer .double().float()" + AFTER, ALL, LATE, SILENT, B, changes(part_back)),
    (".to() of what it is already", ONE, RIGHT, None, {}, changes(nothing, nothing)),
]:
    pattern(name, ends, modes, find=find, **of)(run)


# -- several backward calls ------------------------------------------------------------


class Heads(nn.Module):
    """A shared trunk (if any) and two outputs."""

    def __init__(self, *, has_trunk):
        super().__init__()
        self.trunk = nn.Linear(3, 3) if has_trunk else nn.Identity()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = torch.tanh(self.trunk(x))
        return self.a(x), self.b(x)


def both_heads(module, x, _rank):
    return sum(head.pow(2).sum() for head in module(x))


HEADS = {"names": (*OF_AB, "trunk.weight", "trunk.bias")}
for what, has_trunk, ends, static in [
    ("disjoint", False, RIGHT, SILENT),
    ("overlapping", True, ERROR, LATE),
]:
    name = f"backward calls on {what} parameters"

    @pattern(name, ends, find=LATE, static=static, **HEADS)
    def head_by_head(stage, has_trunk=has_trunk):
        stage.loss = both_heads
        stage.begin(Heads(has_trunk=has_trunk))
        if "static_graph" not in stage.options:
            stage.train(2)
        for _ in range(3):
            stage.model.zero_grad()
            first, second = stage.model(stage.x())
            first.pow(2).sum().backward(retain_graph=True)
            second.pow(2).sum().backward()
            stage.update(both_heads)


class Checkpointed(nn.Module):
    def __init__(self, calls, *, use_reentrant):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls, self.use_reentrant = calls, use_reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(self.calls):
            x = checkpoint(self.a, x, use_reentrant=self.use_reentrant)
        return self.b(x)


for name, calls, use_reentrant, ends, find, static in [
    ("reentrant checkpoint of a shared layer", 2, True, SILENT, ERROR, RIGHT),
    ("reentrant checkpoint", 1, True, RIGHT, ERROR, None),
    ("checkpoint of a shared layer", 2, False, RIGHT, None, None),
]:
    names = OF_A if ends is SILENT else ()

    @pattern(name, ends, find=find, static=static, names=names)
    def checkpointed(stage, calls=calls, use_reentrant=use_reentrant):
        stage.begin(Checkpointed(calls, use_reentrant=use_reentrant))
        stage.undo.append(lambda: setattr(stage.model.module, "use_reentrant", False))
        stage.train(4)


# -- static graph ----------------------------------------------------------------------


@pattern("static graph: a parameter more", ERROR, ONE, options=STATIC, names=OF_B)
def one_more(stage):
    stage.loss = uses("a", "a")
    stage.begin()
    stage.train(3)
    stage.loss = uses("ab", "ab")
    stage.train(2)


@between("a layer used twice later on", RIGHT)
def repeated(stage):
    stage.loss = uses("abb", "abb")
    stage.undo.append(lambda: setattr(stage, "loss", plain))


@pattern("first backward under no_sync()", RIGHT, static=ERROR)
def quiet_at_first(stage):
    stage.begin()
    with stage.model.no_sync():
        stage.backward()
    stage.model.zero_grad()
    stage.train(4)


@dataclass
class Box:
    value: torch.Tensor


class Boxed(Net):
    def forward(self, x):
        return Box(super().forward(x))


@pattern("output is a dataclass", RIGHT, static=SILENT)
def boxed(stage):
    stage.loss = lambda m, x, _rank: m(x).value.pow(2).sum()
    stage.begin(Boxed())
    stage.train(4)


# -- copies, wrappers, hooks, optimizers -----------------------------------------------


def copied(make):
    def run(stage):
        stage.begin()
        stage.train(3)
        stage.model = make(stage.model)
        stage.optimizer = stage.sgd()
        stage.train(3)

    return run


pattern("deepcopy of a trained object", RIGHT, static=SILENT)(copied(copy.deepcopy))


@pattern("unpickle of a trained object", RIGHT, static=SILENT)
@copied
def by_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pattern("wrapped twice", RIGHT, views=ERROR, names=OF_AB)
def wrapped_twice(stage):
    inner = stage.begin()
    outer = stage.wrap(inner)
    outer.module = inner
    stage.undo.append(lambda: setattr(stage, "model", inner))
    for _ in range(3):
        inner.module.zero_grad()
        outer(stage.x()).pow(2).sum().backward()
        stage.model = inner
        stage.update()
        stage.model = outer


@pattern("two live wrappers, the new one is used", RIGHT)
def wrapped_again(stage):
    """Legal: the old object is still there, somewhere."""
    old = stage.begin()
    stage.train()
    stage.model = stage.wrap(old.module)
    stage.train(2)
    stage.undo.append(lambda: old)  # keeps it


@pattern("two live wrappers, .module is called", SILENT, names=OF_AB)
def wrapped_again_and_gone_around(stage):
    wrapped_again(stage)
    stage.model.zero_grad()
    stage.backward(stage.model.module)
    stage.update()


@between("backward interrupted by Ctrl-C", ERROR, names=OF_A)
def interrupted(stage):
    """On all ranks, and on with the next batch (a notebook)."""

    def ctrl_c(_grad):
        raise KeyboardInterrupt

    handle = stage.model.module.a.weight.register_hook(ctrl_c)
    with contextlib.suppress(KeyboardInterrupt):
        stage.backward()
    handle.remove()


def grad_hook(name, ends, ranks, loss=None, **more):
    """Decorate what a hook of one parameter does on some ranks."""

    def add(act):
        @pattern(name, ends, **more)
        def run(stage):
            def hook(param):
                if stage.rank in ranks and not stage.is_over:
                    act(param)

            stage.begin()
            stage.train()
            weight = stage.model.module.b.weight
            weight.register_post_accumulate_grad_hook(hook)
            for _ in range(3):
                stage.model.zero_grad()
                stage.backward()
                stage.update(loss)

        return act

    return add


@grad_hook("a hook sets .grad to None on one rank", RIGHT, SECOND, **OF_SECOND)
def drop(param):
    param.grad = None


grad_hook("a hook sets .grad to None on all ranks", RIGHT, BOTH, names=OF_B)(drop)


@grad_hook("a hook replaces .grad", RIGHT, SECOND, plain)
def swap(param):
    param.grad = param.grad.clone()


@grad_hook("a hook replaces .grad by an expanded tensor", HANG, SECOND, views=RIGHT)
def share(param):
    param.grad = torch.zeros(1).expand(3, 3)


@pattern("optimizer built before a layer was replaced and wrapped", RIGHT, ONE)
def foreign_optimizer(stage):
    """It holds parameters that the model has no more."""
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.b = nn.Linear(3, 3)
    stage.begin(module)
    stage.optimizer = optimizer
    stage.train(3)


@pattern("optimizer of a copy", RIGHT, ONE)
def optimizer_of_a_copy(stage):
    stage.begin()
    copied = copy.deepcopy(stage.model.module)
    stage.optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    stage.train(3)


# -- ranks that differ -----------------------------------------------------------------


between("one rank makes fewer steps", HANG, ONE, after=0, culprits=SECOND)(
    lambda stage: stage.train(2 - stage.rank)
)
# Continue on one rank: a batch that is thrown away.
between("one rank skips a step, and goes on", HANG, ONE, culprits=SECOND)(
    lambda stage: stage.train(1 - stage.rank)
)


@between("one rank has no backward", HANG, ONE, culprits=SECOND, names=OF_AB)
def skips_backward(stage):
    """And steps all the same: weight decay, momentum."""
    stage.optimizer = stage.sgd(momentum=0.9)
    stage.train(2)
    stage.model.zero_grad(set_to_none=False)
    loss = stage.forward()
    if stage.rank == 0:
        loss.backward()
    stage.update()


@step("one rank is under no_sync()", HANG, ONE, culprits=SECOND, names=OF_AB)
def quiet_on_one(stage):
    stage.model.require_backward_grad_sync = stage.rank == 0
    stage.backward()
    stage.model.require_backward_grad_sync = True


# The same parameters, in another order: nothing is wrong with that.
between("ranks take different branches", RIGHT)(
    lambda stage: setattr(stage, "loss", uses("ab", "ba"))
)


def other_order(module):
    first = module.a
    del module.a
    module.a = first


def other_shape(module):
    module.a, module.b = nn.Linear(3, 5), nn.Linear(5, 3)


def other_strides(module):
    module.b.weight = nn.Parameter(module.b.weight.detach().t())


def other_names(module):
    module.c, module.b = module.b, nn.Identity()


def layer_more(module):
    module.c = nn.Linear(3, 3)


for name, differ, ends in [
    ("other order", other_order, SILENT),
    ("other shape", other_shape, HANG),
    ("other dtype", lambda module: module.b.double(), CRASH),
    ("other strides", other_strides, HANG),
    ("other names", other_names, SILENT),
    ("layer more", layer_more, ERROR),
    ("frozen layer", lambda module: module.b.requires_grad_(False), ERROR),
    ("buffer more", lambda m: m.register_buffer("extra", torch.zeros(2)), RIGHT),
    ("buffer shape", lambda m: m.register_buffer("mean", torch.zeros(5)), RIGHT),
]:

    @pattern(f"one rank's module differs: {name}", ends, ONE)
    def odd_module(stage, differ=differ):
        module = Net()
        module.register_buffer("mean", torch.zeros(2))
        if stage.rank == 1:
            differ(module)
        stage.begin(module)
        for _ in range(2):
            stage.model.zero_grad()
            stage.backward()
            stage.update(None)


for name, first, second, ends in [
    ("bucket_cap_mb", {**FIND, "bucket_cap_mb": 0}, FIND, HANG),
    ("find_unused_parameters", FIND, {}, HANG),
    ("static_graph", STATIC, {}, CRASH),
    ("gradient_as_bucket_view", VIEW, {}, RIGHT),
]:

    @pattern(f"ranks differ in {name}", ends, ONE)
    def odd_options(stage, first=first, second=second):
        stage.begin(**(second if stage.rank else first))
        stage.train(4)


@pattern("ranks differ in what they ignore", ERROR, ONE)
def odd_ignore_list(stage):
    module = Net()
    if stage.rank == 1:
        module._ddp_params_and_buffers_to_ignore = ["b.weight", "b.bias"]
    stage.begin(module)
    stage.train(2)


@pattern("one rank's arguments are rejected", HANG, ONE, culprits=SECOND)
def bad_argument(stage):
    stage.begin(bucket_cap_mb="many" if stage.rank else 25)
    stage.train(2)


# -- comm hooks ------------------------------------------------------------------------


def comm_hook(act, ranks):
    """A hook that averages as it should, but for one step on some ranks."""

    def run(stage):
        is_wrong = []

        def hook(_state, bucket):  # torch reads annotations
            averaged = bucket.buffer().div_(stage.world_size)
            group = stage.model.process_group
            work = torch.distributed.all_reduce(averaged, group=group, async_op=True)
            if is_wrong and stage.rank in ranks and not stage.is_over:
                work.wait()
                return act(averaged)
            return work.get_future().then(lambda summed: summed.value()[0])

        stage.begin()
        stage.model.register_comm_hook(None, hook)
        stage.train(2)
        is_wrong.append(True)
        stage.train()
        is_wrong.clear()
        stage.train(2)

    return run


def fail(_buffer):
    raise ValueError("user code")


NAN = " brings NaN"
for name, act, on_all, on_one in [
    (" raises", fail, ERROR, HANG),
    ("'s future raises", lambda buffer: done(buffer).then(fail), ERROR, HANG),
    (" returns None", lambda _buffer: None, CRASH, CRASH),
    (" returns a tensor", lambda buffer: buffer, ERROR, HANG),
    ("'s future brings None", lambda _buffer: done(None), ERROR, HANG),
    ("'s future brings a list", lambda buffer: done([buffer]), ERROR, HANG),
    ("'s future is too short", lambda b: done(b[:-1].clone()), ERROR, HANG),
    ("'s future is too long", lambda b: done(torch.cat([b, b])), RIGHT, RIGHT),
    ("'s future has another dtype", lambda b: done(b.double()), RIGHT, RIGHT),
    (NAN, lambda b: done(torch.full_like(b, float("nan"))), SILENT, SILENT),
]:
    for where, ranks, ends in [
        ("all ranks", BOTH, on_all),
        ("one rank", SECOND, on_one),
    ]:
        ours = {"check_finite_grads": True} if name == NAN else {}
        row = {"names": OF_AB, "culprits": ranks, "ours": ours}
        run = comm_hook(act, ranks)
        pattern(f"comm hook{name} on {where}", ends, ONE, **row)(run)

BY_NAME = {row.name: row for row in PATTERNS}


def play_by_name(ctx, wrapper, name):
    """Play a pattern on a rank."""
    return play(ctx, wrapper, BY_NAME[name])
