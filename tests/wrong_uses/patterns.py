"""The matrix: wrong uses of data parallelism, each written once for both wrappers.

A pattern trains two ranks on different data: right steps, the wrong one, then right
steps again, so that an error may come late. Its row says how torch 2.13 ends. minidp
must end in right gradients or in a named error, and must train right after reset().
A row is a text of actions: see `tests.support.actions` and `wrong_actions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import tests.wrong_uses.wrong_actions  # noqa: F401  (its actions)
from tests.support.actions import Loss, Net, Stage, plain, run


class Outcome(Enum):
    """How a pattern ends, from best to worst."""

    RIGHT = "right"
    NAMED = "named error"
    WARNED = "named warning"  # where the same may be meant: local SGD, say
    ERROR = "error"  # in time, but without rank, parameters or remedy
    LATE = "late error"  # replicas had drifted, or gradients were wrong, before it
    SILENT = "SILENT"
    HANG = "hang"  # until the group's timeout, which names nobody
    CRASH = "crash"


BOTH, SECOND = frozenset({0, 1}), frozenset({1})


def net(_rank: int = 0, frozen: str = "") -> nn.Module:
    """Make the module of most patterns, with some layers frozen."""
    made = Net()
    for name in frozen:
        getattr(made, name).requires_grad_(False)
    return made


@dataclass(frozen=True)
class Pattern:
    """A row of the matrix: one wrong use in one mode."""

    name: str
    text: str  # its actions
    torch: Outcome  # how torch's DDP ends
    names: tuple[str, ...] = ()  # one of these parameters is named in the error
    culprits: frozenset[int] = BOTH
    mode: Mapping[str, Any] = field(default_factory=dict)  # options
    of_rank: tuple[Mapping[str, Any], ...] = ({}, {})  # more options of each rank
    ours: Mapping[str, Any] = field(default_factory=dict)  # options torch lacks
    is_legal: bool = False  # minidp must end right, without a warning
    make: Callable[[int], nn.Module] = net  # of a rank number
    loss: Loss = plain


RIGHT, ERROR, LATE = Outcome.RIGHT, Outcome.ERROR, Outcome.LATE
SILENT, HANG, CRASH = Outcome.SILENT, Outcome.HANG, Outcome.CRASH
FIND, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}
MODES = {"default": {}, "find_unused": FIND, "static_graph": STATIC, "views": VIEW}
ALL, FEW, ONE = " ".join(MODES), "default find_unused", "default"
OF_A, OF_B = ("a.weight", "a.bias"), ("b.weight", "b.bias")
A, B, AB = {"names": OF_A}, {"names": OF_B}, {"names": OF_A + OF_B}
ON_1 = {"culprits": SECOND}
LEGAL = {"is_legal": True}
PATTERNS: list[Pattern] = []


def row(name, ends, text, modes=ALL, find=None, static=None, views=None, **more):
    """Add a pattern for each mode: ``text`` between two right steps and two more.

    torch ends as ``ends`` says, or as the keyword of the mode does. Other keywords are
    ``before`` and ``after`` (actions in the place of those steps), and of `Pattern`.
    """
    others = {"find_unused": find, "static_graph": static, "views": views}
    around = [more.pop(where, "train, train") for where in ("before", "after")]
    text = ", ".join(part for part in (around[0], text, around[1]) if part)
    for mode in modes.split():
        full = name if mode == "default" else f"{name}, {mode}"
        ends_here = others.get(mode) or ends
        PATTERNS.append(Pattern(full, text, ends_here, mode=MODES[mode], **more))


def times(count, text):
    return ", ".join([text] * count)


WHOLE = {"before": "", "after": ""}  # the text is all that happens
BACKWARD = "zero, forward, backward"
STEP, BLIND = f"{BACKWARD}, step", f"{BACKWARD}, blind step"

# A parameter is unused.
LAST = ", in the last step"
row("unused on one rank", HANG, "train(ab a)", find=RIGHT, **B, **ON_1)
row("unused on all ranks", LATE, "train(a)", find=RIGHT, **B)
END = {"find": RIGHT, "after": "", **B}
row(f"unused on one rank{LAST}", HANG, "train(ab a)", FEW, **END, **ON_1)
row(f"unused on all ranks{LAST}", SILENT, "train(a)", **END)
row("other layer unused on each rank", LATE, "train(a b)", find=RIGHT, **AB)

# Backwards that do not belong to a forward.
row("backward of distributed autograd", RIGHT, "steps of distributed autograd")
METHOD = "zero, method, backward"
row("method other than forward", SILENT, f"{METHOD}, step", **AB)
row("... after the main backward", SILENT, f"{BACKWARD}, method, backward, step", **AB)
row(
    "a part of .module called alone", SILENT, f"{BACKWARD}, only b, backward, step", **B
)
TWO = "zero, forward, forward, backward, backward"
row("two forwards, then two backwards", SILENT, f"{TWO}, step", **AB)
TWICE = "zero, forward, retain, backward, step"
row("retained graph, backward twice", SILENT, TWICE, **AB)
# Its gradients are averaged together with those of the main one.
STRAY = "zero, bare, backward, forward, backward, step"
row("stray backward before the main one", RIGHT, STRAY)
row(
    "stray backward on one rank, after the main one",
    SILENT,
    f"{BACKWARD}, penalty @1, step",
    **(B | ON_1),
)
# Legal: a penalty's gradient is looked at, and dropped.
row("penalty on one rank before zero_grad", RIGHT, "penalty @1")

# Around the forward, the backward, or both.
for what, ends, text in [
    ("the forward only", SILENT, "quiet, backward"),
    ("the backward only", RIGHT, "forward, no_sync, backward, synced"),
    ("both, then step", SILENT, "no_sync, forward, backward, synced"),
]:
    row(f"no_sync() around {what}", ends, f"zero, {text}, step", **AB)
# Legal: replicas differ on purpose until they are averaged.
LOCAL = f"no_sync, {BACKWARD}, unseen step, synced"
text = f"{times(2, LOCAL)}, average"
row("local SGD inside no_sync()", RIGHT, text, **LEGAL)
name = "local SGD, averaged before each synchronised step"
text = times(2, f"{text}, {BLIND}")
row(name, RIGHT, text, static=ERROR, **LEGAL, **WHOLE)
row("torch.jit.trace of the wrapper", RIGHT, f"trace, {STEP}", **LEGAL)
# A hook that averages over few ranks (here one), then parameters.
text = times(3, f"{times(4, f'{BACKWARD}, unseen step')}, average, note")
name, text = "post-local SGD with a comm hook", f"local hook, {text}"
row(name, RIGHT, text, "default views", **LEGAL, **WHOLE)
name = "optimizer.step() indented into no_sync()"
text = times(2, f"{times(2, f'no_sync, {BLIND}, synced')}, {BLIND}")
row(name, SILENT, text, static=ERROR, **AB, **WHOLE)
name = "optimizer.step() indented into no_sync(), after some right steps"
row(name, SILENT, f"{times(4, STEP)}, {text}", FEW, **AB, **WHOLE)
text = times(3, f"{BACKWARD}, forward, drop, step")
row("a forward between backward and step", RIGHT, text, **WHOLE)

# Legal: a loss that is NaN on all ranks. Momentum moves the parameters.
for what, text in [
    ("skip a backward, gradients", "zero to 0, forward, drop"),
    ("drop accumulated gradients,", "no_sync, forward, backward, synced, zero to 0"),
]:
    text = f"momentum, train, {times(2, f'{text}, blind step')}"
    row(f"all ranks {what} zeroed", RIGHT, text, **LEGAL)
# Legal: other weights for a forward, on each rank its own; then back.
MOVED = "zero to 0, forward, backward, restore, blind step"
name = "sharpness-aware minimisation, gradients zeroed"
text = times(3, f"save, no_sync, forward, backward, synced, climb, {MOVED}")
row(name, RIGHT, text, static=ERROR, **LEGAL, **WHOLE)
name = "weights disturbed on each rank for the forward"
row(name, RIGHT, times(3, f"save, disturb, {MOVED}"), **LEGAL, **WHOLE)

# Legal: a backward that needs no gradient of the parameters announces nothing that
# concerns them; then they change alike on all ranks.
SAVED = "save, shrink(scale)"
for what, text in [
    ("a generator's turn, then clipped weights", "generator's turn, shrink"),
    ("inputs' gradients, then clipped weights", "saliency(inputs), shrink"),
    ("torch.autograd.grad of inputs, then a checkpoint", "saliency, reload"),
    ("a saliency map on other weights, then back", f"{SAVED}, saliency, restore"),
    ("a saliency map on one rank, then a checkpoint", "saliency @0, reload"),
]:
    text = times(2, f"{text}, {BLIND}, note")
    row(what, RIGHT, text, "default find_unused views", **LEGAL, **WHOLE)
HAND_STEP = "zero, forward, backward, hand step(keep), note"
text = times(3, f"saliency, {HAND_STEP}")
row("updates by hand after a saliency map", RIGHT, text, FEW, **LEGAL, **WHOLE)
name = "sharpness-aware minimisation by torch.autograd.grad"
text = "save, forward, climb by grad, zero, forward, backward, restore, blind step"
row(name, RIGHT, times(3, text), FEW, **LEGAL, **WHOLE)

# Legal: other weights for an evaluation, in the middle of an accumulation.
LOCAL_ONE = "no_sync, forward, backward, synced"
SWAPPED = f"zero, {LOCAL_ONE}, {SAVED}, forward, drop, restore, forward, backward, step"
name = "other weights for an evaluation between micro-batches"
row(name, RIGHT, times(2, SWAPPED), FEW, **LEGAL, **WHOLE)
SWAPPED = SWAPPED.replace("forward, backward", "forward(a), backward")
row(f"{name}, last layer unused", RIGHT, times(2, SWAPPED), "find_unused", **LEGAL)
text = f"zero, {LOCAL_ONE}, {LOCAL_ONE}, average .grad, blind step"
name = "micro-batches in no_sync(), averaged by hand, then a step"
row(name, RIGHT, times(3, text), FEW, **LEGAL, **WHOLE)
# Legal: ranks make different steps, and send each other the results.
HALVES = f"zero, {LOCAL_ONE}, average .grad"
name = "each rank steps a part of the model, and sends it"
row(name, RIGHT, times(3, f"{HALVES}, step a part, note"), FEW, **LEGAL, **WHOLE)
name = "each rank steps a part of the model, and sends nothing"
text = f"{HALVES}, step a part(keep)"
row(name, SILENT, text, FEW, **AB)
text = f"{times(3, f'{METHOD}, step a part(keep)')}, note"
row(f"{name}, nor calls the wrapper", SILENT, text, FEW, **WHOLE, **AB)
name = "one rank steps for all, and sends the parameters"
row(name, RIGHT, times(5, f"{BACKWARD}, serve, note"), FEW, **LEGAL, **WHOLE)
for how in ("object", "copy"):
    name = f"averages put back after a local backward on one rank ({how})"
    text = times(3, f"{BACKWARD}, look at own gradients({how}) @0, blind step")
    row(name, RIGHT, text, FEW, **LEGAL, **WHOLE)
name = "two steps on one averaged backward, a forward between"
text = times(2, f"{BACKWARD}, step, forward, drop, blind step")
row(name, RIGHT, text, **LEGAL, **WHOLE)
for how in ("evaluate", "backward", "inner"):
    name = f"functional_call with lent parameters, {how}"
    row(name, RIGHT, f"lent weights({how}), {BLIND}", ONE, **LEGAL)
name = "two steps on one averaged backward, the second on one rank"
row(name, SILENT, f"{BACKWARD}, step, blind step @1", FEW, **AB, after=times(2, STEP))
for name, how in [("", ""), (" through the wrapper", "(wrapper)")]:
    text = f"zero, gradients by torch.func{how}, average .grad, blind step"
    full = f"gradients by torch.func{name}, averaged by hand"
    row(full, RIGHT, times(4, text), ONE if name else FEW, **LEGAL, **WHOLE)
    text = f"zero, gradients by torch.func{how}, blind step"
    full = f"gradients by torch.func{name}, not averaged"
    row(full, SILENT, text, ONE if name else FEW, **AB)
for what in ("gradients", "parameters"):
    name = f"local gradients, and an optimizer that averages {what} in its step"
    text = (
        f"optimizer that averages({what}), {times(4, f'zero, {LOCAL_ONE}, blind step')}"
    )
    row(name, RIGHT, text, FEW, **LEGAL, **WHOLE)
name = "local gradients, and an optimizer that steps another one, then averages"
text = (
    f"averaging optimizer around another, {times(4, f'zero, {LOCAL_ONE}, blind step')}"
)
row(name, RIGHT, text, FEW, **LEGAL, **WHOLE)
name = "local gradients, and an optimizer that averages nothing in its step"
text = f"optimizer that averages(nothing), zero, {LOCAL_ONE}, blind step"
row(name, SILENT, text, FEW, **AB)
name = "an optimizer that takes each rank's noise off first"
text = f"noisy optimizer, {times(4, 'noise, zero, forward, backward, blind step')}"
row(name, RIGHT, text, **LEGAL, **WHOLE)

# Legal: contexts of the user in which buckets are rebuilt, and maps allocated.
FIRST = {"before": "train", "after": times(3, "train")} | LEGAL
for what, find, text in [
    ("a forward inside torch.func.grad", ERROR, "transformed"),
    ("a forward with fake tensors", RIGHT, "faked"),
]:
    row(f"{what} when buckets are to be rebuilt", ERROR, text, FEW, find, **FIRST)

# One replica changes.
END = {"before": "", "after": "train, train, train"}
row("checkpoint loaded on one rank, after wrapping", SILENT, "load @1", **AB, **END)
PRETRAINED = {"make": partial(net, frozen="a")}
row("... of a frozen part", SILENT, "load(a) @1", ONE, **A, **PRETRAINED, **END)
row("one rank leaves out a step", SILENT, f"{BACKWARD}, step !1", **AB, **END)
name = "one rank leaves out the step of one of two optimizers"
HALF_STEPS = f"{BACKWARD}, step half(a), step half(b)"
text = f"{HALF_STEPS}, {HALF_STEPS} !1"
row(name, SILENT, text, **AB, **END)
name = "one rank steps for all, and sends nothing after a while"
text = f"{times(3, f'{BACKWARD}, serve')}, {BACKWARD}, serve(keep)"
row(name, SILENT, text, FEW, **AB, **END)
row("one replica changed by hand", SILENT, "add a half @1", **B, **END)

# Gradients by other ways.
GRAD = "zero, forward, grad"
row("torch.autograd.grad into .grad", SILENT, f"{GRAD}(kept), step", **AB)
row("torch.autograd.grad, applied by hand", SILENT, f"{GRAD}(applied)", **AB)
# Legal, on all ranks or on one.
text = "penalised, train, train, penalised on rank 0"
row("gradient penalty by torch.autograd.grad", RIGHT, text)
HAND = ", applied by hand"
NO_SYNC = "zero, no_sync, forward, backward, synced, hand step(keep)"
UNUSED = "zero, forward(a), backward, hand step"
for name, ends, text, names in [
    ("two forwards, then two backwards", SILENT, f"{TWO}, hand step", AB),
    ("method other than forward", SILENT, f"{METHOD}, hand step", AB),
    ("no_sync() around both", SILENT, NO_SYNC, AB),
    ("unused on all ranks", ERROR, UNUSED, B),
]:
    row(name + HAND, ends, text, ONE, **names)
name = "functional_call with tensors made from the parameters"
row(name, RIGHT, "fast weights, train, train, train, plain")
name = "functional_call with tensors of their own"
row(name, SILENT, "foreign weights(optimizer)", ONE, **AB)
row("... applied by hand", SILENT, "foreign weights(hand)", ONE, **AB)

# The module changes after wrapping.
NEW = {"after": f"new optimizer, {times(3, BLIND)}"}
OLD = {"after": times(3, BLIND)}
BY_HAND = f"{BACKWARD}, hand step"
# Only the next forward can tell.
BY_HAND = {"after": f"new optimizer, {BY_HAND}, {times(2, f'{BY_HAND}, note')}"}
AFTER, BEFORE = " after wrapping", ", optimizer of before"
FROZEN = {"make": partial(net, frozen="b")}
C, SCALE = {"names": ("c.weight",)}, {"names": ("scale",)}
BC = {"names": (*OF_B, "c.weight")}
row("frozen" + AFTER, LATE, "freeze(b.)", find=RIGHT, **B, **NEW)
row("frozen on one rank", HANG, "freeze(b.) @1", FEW, SILENT, **B, **ON_1, **NEW)
row("unfrozen" + AFTER, SILENT, "unfreeze(b.)", **B, **FROZEN, **NEW)
row("layer added" + AFTER, SILENT, "layer added", **C, **NEW)
row("parameter added", SILENT, "parameter added", ONE, **SCALE, **NEW)
row("layer replaced" + AFTER, LATE, "layer replaced", find=SILENT, **B, **NEW)
row("parameter replaced", LATE, "parameter replaced", ONE, **B, **NEW)
row("layer replaced" + BEFORE, LATE, "layer replaced", ONE, **B, **OLD)
row("unfrozen" + HAND, SILENT, "unfreeze(b.)", FEW, **BC, **FROZEN, **BY_HAND)
row("layer added" + HAND, SILENT, "layer added", FEW, **BC, **BY_HAND)
row("layer replaced" + HAND, ERROR, "layer replaced", FEW, SILENT, **BC, **BY_HAND)
for name, modes, dtypes in [
    (".double()", ALL, "double"),
    (".half()", FEW, "half"),
    (".to(bfloat16)", FEW, "bfloat16"),
    (".to(float64) and back", ALL, "float64 float32"),
]:
    row(name + AFTER, SILENT, f"cast({dtypes})", modes, **AB, **NEW)
    for how, after in [(BEFORE, OLD), (HAND, BY_HAND)]:
        row(name + AFTER + how, SILENT, f"cast({dtypes})", ONE, **AB, **after)
name = "a layer .double()"
row(name + AFTER, LATE, "cast b(double)", find=ERROR, **B, **NEW)
row(f"{name}.float(){AFTER}", LATE, "cast b(double float)", find=SILENT, **B, **NEW)
row(".to() of what it is already", RIGHT, "nothing", ONE, **NEW)

# Several backward calls.


class Heads(nn.Module):
    """A shared trunk (if any) and two outputs."""

    def __init__(self, _rank, *, has_trunk):
        super().__init__()
        self.trunk = nn.Linear(3, 3) if has_trunk else nn.Identity()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = torch.tanh(self.trunk(x))
        return self.a(x), self.b(x)


for what, has_trunk, ends, static in [
    ("disjoint", False, RIGHT, SILENT),
    ("overlapping", True, ERROR, LATE),
]:
    name = f"backward calls on {what} parameters"
    text = times(3, "zero, forward, part, backward, step")
    more = {"make": partial(Heads, has_trunk=has_trunk), "after": ""}
    more |= {"names": (*OF_A, *OF_B, "trunk.weight", "trunk.bias")}
    row(name, ends, text, "default find_unused views", find=LATE, **more)
    row(name, static, text, "static_graph", before="", **more)


class Checkpointed(nn.Module):
    def __init__(self, _rank, *, calls, use_reentrant):
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
    more = {"make": partial(Checkpointed, calls=calls, use_reentrant=use_reentrant)}
    more |= A if ends is SILENT else {}
    text = "no reentrance afterwards, train, train, train, train"
    row(name, ends, text, find=find, static=static, **more, **WHOLE)

# A static graph.
name, text = "static graph: a parameter more", times(3, "train(a)")
more = {"before": "", "of_rank": (STATIC, STATIC)}
row(name, ERROR, text, ONE, **more, **B)
TWICE = {"after": times(2, "train(abb)")}
row("a layer used twice later on", RIGHT, "train", **TWICE)
text = f"no_sync, forward, backward, synced, zero, {times(4, 'train')}"
row("first backward under no_sync()", RIGHT, text, static=ERROR, **WHOLE)


@dataclass
class Box:
    value: torch.Tensor


class Boxed(Net):
    def forward(self, x):
        return Box(super().forward(x))


def of_box(module, x, _rank):
    return [module(x).value.pow(2).sum()]


BOXED = {"make": lambda _rank: Boxed(), "loss": of_box}
row("output is a dataclass", RIGHT, "train, train", static=SILENT, after="", **BOXED)

# Copies, wrappers, hooks, optimizers.
COPIED = {"before": times(3, "train"), "after": times(3, "train")}
for what in ("deepcopy", "unpickle"):
    name, text = f"{what} of a trained object", f"{what}, new optimizer"
    row(name, RIGHT, text, static=SILENT, **COPIED)
text = times(3, "zero, outer, backward, step")
row("wrapped twice", RIGHT, text, views=ERROR, **AB, **WHOLE)
# Legal: the old object is still there, somewhere.
AGAIN = {"before": "train, wrap again"}
row("two live wrappers, the new one is used", RIGHT, "train, train", after="", **AGAIN)
AGAIN = {"before": "train, wrap again, train, train", "after": "", **AB}
name = "two live wrappers, .module is called"
row(name, SILENT, "zero, bare, backward, step", **AGAIN)
row("backward interrupted by Ctrl-C", ERROR, "interrupted", **A)
for name, ends, text, more in [
    ("sets .grad to None on one rank", RIGHT, "drop .grad @1", B | ON_1),
    ("sets .grad to None on all ranks", RIGHT, "drop .grad", B),
    ("replaces .grad", RIGHT, "replace .grad @1", {}),
    ("replaces .grad by an expanded tensor", HANG, "expand .grad @1", {"views": RIGHT}),
]:
    step = STEP if text.startswith("replace") else BLIND
    text = times(3, f"{text}, {step}")
    row(f"a hook {name}", ends, text, before="train", after="", **more)


def with_optimizer(_rank):
    """Make a module and an optimizer of it, then replace a layer."""
    made = Net()
    made.optimizers = [torch.optim.SGD(made.parameters(), lr=0.1)]
    made.b = nn.Linear(3, 3)
    return made


THREE = {"before": "", "after": times(3, "train")}
name = "optimizer built before a layer was replaced and wrapped"
text = "optimizer of the first module"
row(name, RIGHT, text, ONE, make=with_optimizer, **THREE)
row("optimizer of a copy", RIGHT, "optimizer of a copy", ONE, **THREE)

# Ranks that differ.
row("one rank makes fewer steps", HANG, "train, train @0", ONE, after="", **ON_1)
# Continue on one rank: a batch that is thrown away.
row("one rank skips a step, and goes on", HANG, "train @0", ONE, **ON_1)
# And steps all the same: weight decay, momentum.
text = "momentum, train, train, zero to 0, forward, backward @0, step"
row("one rank has no backward", HANG, text, ONE, **AB, **ON_1)
text = "zero, no_sync @1, forward, backward, synced, step"
row("one rank is under no_sync()", HANG, text, ONE, **AB, **ON_1)
# The same parameters, in another order: nothing is wrong with that.
OTHERS = {"after": times(2, "train(ab ba)")}
row("ranks take different branches", RIGHT, "train", **OTHERS)


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


def odd_on_1(differ, rank):
    module = Net()
    module.register_buffer("mean", torch.zeros(2))
    if rank == 1:
        differ(module)
    return module


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
    more = {"make": partial(odd_on_1, differ), **WHOLE}
    row(f"one rank's module differs: {name}", ends, times(2, BLIND), ONE, **more)

for name, options, ends in [
    ("bucket_cap_mb", ({**FIND, "bucket_cap_mb": 0}, FIND), HANG),
    ("find_unused_parameters", (FIND, {}), HANG),
    ("static_graph", (STATIC, {}), CRASH),
    ("gradient_as_bucket_view", (VIEW, {}), RIGHT),
]:
    row(f"ranks differ in {name}", ends, "train, train", ONE, after="", of_rank=options)
TEXT = ({"find_unused_parameters": "no"},) * 2
row("a text for a flag", Outcome.NAMED, "train, train", ONE, after="", of_rank=TEXT)


def ignore(module):
    module._ddp_params_and_buffers_to_ignore = ["b.weight", "b.bias"]


more = {"make": partial(odd_on_1, ignore), "after": ""}
row("ranks differ in what they ignore", ERROR, "", ONE, **more)
CAPS = ({"bucket_cap_mb": 25}, {"bucket_cap_mb": "many"})
name = "one rank's arguments are rejected"
row(name, HANG, "", ONE, after="", of_rank=CAPS, **ON_1)

# What minidp does not have.
LOW = {"mixed_precision": _MixedPrecision(*[torch.bfloat16] * 3)}
row("mixed_precision", ERROR, "train", ONE, before="", after="", of_rank=(LOW, LOW))
name = "mixed_precision on one rank"
row(name, HANG, "train", ONE, before="", after="", of_rank=({}, LOW), **ON_1)
text = "zero, forward, compiled backward, step"
row("backward under compiled autograd", ERROR, text)

# Comm hooks: for one step on some ranks.
for name, on_all, on_one in [
    ("hook raises", ERROR, HANG),
    ("hook's future raises", ERROR, HANG),
    ("hook returns None", CRASH, CRASH),
    ("hook returns a tensor", ERROR, HANG),
    ("hook's future brings None", ERROR, HANG),
    ("hook's future brings a list", ERROR, HANG),
    ("hook's future is too short", ERROR, HANG),
    ("hook's future is too long", RIGHT, RIGHT),
    ("hook's future has another dtype", RIGHT, RIGHT),
    ("hook brings NaN", SILENT, SILENT),
]:
    ours = {"check_finite_grads": True} if name == "hook brings NaN" else {}
    more = {"before": "hook, train, train", "ours": ours, **AB}
    row(f"comm {name} on all ranks", on_all, f"{name}, train", ONE, **more)
    row(f"comm {name} on one rank", on_one, f"{name} @1, train", ONE, **more, **ON_1)

# Ways back to training: a rank has raised between its backward and its step.
MISSED = f"{BACKWARD}, step @0"
row("a rank misses a step, then reset()", SILENT, f"{MISSED}, plain reset", **AB)
MENDED = "copying reset, note @1"
row("... reset(copy_from=0)", SILENT, f"{MISSED}, {MENDED}", **LEGAL)
MISSED = "schedule, train, schedule @0"
name = "a rank misses a scheduler's step, then reset(copy_from=0)"
text = f"{MISSED}, copying reset, train, schedule"
row(name, SILENT, text, FEW, **LEGAL)


def seeded(rank):
    torch.manual_seed(rank)
    return net()


ALONE = {"of_rank": ({"init_sync": False},) * 2, "make": seeded}
row("other weights, init_sync=False", SILENT, "train", ONE, before="", **ALONE, **AB)
text = "drop the wrapper, zero, forward, backward, blind step"
row("the wrapper is gone, training goes on", SILENT, text, after="", **AB)

BY_NAME = {pattern.name: pattern for pattern in PATTERNS}


def play_by_name(ctx, wrapper, name):
    """Play a pattern on a rank."""
    pattern = BY_NAME[name]
    options = {**pattern.mode, **pattern.of_rank[ctx.rank]}
    stage = Stage(
        ctx,
        wrapper,
        partial(pattern.make, ctx.rank),
        options=options | (pattern.ours if wrapper == "minidp" else {}),
        loss=pattern.loss,
    )
    torch.manual_seed(0)
    return run(stage, pattern.text)
