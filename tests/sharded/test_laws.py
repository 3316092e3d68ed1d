"""Random modules, optimizers and loops: divided steps have the bits of torch's DDP."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from minidp import DataParallel
from tests.support import oracle
from tests.support.models import ModelSpec, ParamShape, Patchwork

pytestmark = pytest.mark.laws

Mask = tuple[bool, ...]


@dataclass(frozen=True)
class Step:
    """What all ranks do in one turn of the loop."""

    masks: tuple[Mask, ...]  # by rank (%): which branches it uses
    quiet: int = 0  # backwards inside no_sync() before
    clip: tuple[float, float] | None = None  # to this norm, of this order
    applies: bool = True  # or the step is left out
    to_none: bool = True  # how gradients are zeroed after it
    looks: str = ""  # a forward before the step: "eval" or "train"


@dataclass(frozen=True)
class Case:
    """What is trained, how it is wrapped, and the loop."""

    model: ModelSpec
    options: tuple[tuple[str, Any], ...]
    kinds: tuple[str, ...]  # of optimizers; parameters are dealt out to them
    settings: tuple[tuple[str, Any], ...]
    steps: tuple[Step, ...]
    scale: float | None = None  # of a GradScaler
    overlaps: bool = False  # overlap_param_gather
    split: float | None = None  # split_from_mb
    # Optimizers step in the backward, and each of them clips to this if it is not None.
    # Then steps have no norm of their own, and are not left out.
    early: bool = False
    early_clip: float | None = None


def optimizers_of(case: Case, params: list[Any]) -> list[Any]:
    found = []
    for number, kind in enumerate(case.kinds):
        mine = params[number :: len(case.kinds)]
        groups = [{"params": mine[::2]}, {"params": mine[1::2], "weight_decay": 0.02}]
        groups = [group for group in groups if group["params"]]
        if groups:
            found.append(getattr(torch.optim, kind)(groups, **dict(case.settings)))
    return found


def train(ctx: Any, case: Case, kind: Any) -> list[torch.Tensor]:  # noqa: C901
    """Return what this rank saw, and the parameters at the end."""
    is_ours = kind is DataParallel
    module = Patchwork(case.model)
    ddp = kind(module, process_group=ctx.group, **dict(case.options))
    params = [p for p in module.parameters() if p.requires_grad]
    optimizers = optimizers_of(case, params)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale or 1.0)
    scales = case.scale is not None
    if is_ours:
        ddp.sharded_step(
            *optimizers,
            grad_scaler=scaler if scales else None,
            overlap_param_gather=case.overlaps,
            split_from_mb=case.split,
        )
        for each in optimizers if case.early else ():
            ddp.step_in_backward(each, clip_grad_norm=case.early_clip)
    seen: list[torch.Tensor] = []

    def forward(number: int, mask: Mask) -> Any:
        generator = torch.Generator().manual_seed(1000 * ctx.rank + number)
        return ddp(torch.randn(4, 3, generator=generator), mask)[0]

    def clip(to: float, order: float) -> torch.Tensor:
        if is_ours:
            return ddp.clip_grad_norm_(to, order)
        return clip_grad_norm_(ddp.parameters(), to, order)

    for number, step in enumerate(case.steps):
        mask = step.masks[ctx.rank % len(step.masks)]
        for micro in range(step.quiet + 1):
            is_last = micro == step.quiet
            with nullcontext() if is_last else ddp.no_sync():
                loss = forward(10 * number + micro, mask)
                (scaler.scale(loss) if scales else loss).backward()
        if case.early and not is_ours:
            for each in optimizers:
                clip_and_step(each, case.early_clip)
        if step.looks:
            ddp.train(step.looks == "train")
            with nullcontext() if step.looks == "train" else torch.no_grad():
                seen.append(forward(10 * number + 9, mask).detach())
            ddp.train()
        for each in optimizers if scales and step.clip else ():
            scaler.unscale_(each)
        if step.clip:
            seen.append(clip(*step.clip))
        if step.applies and not case.early:
            for each in optimizers:
                scaler.step(each) if scales else each.step()
        if scales and (step.clip or step.applies):
            scaler.update()
            seen.append(torch.tensor(scaler.get_scale()))
        for each in optimizers:
            each.zero_grad(set_to_none=step.to_none)
    return [*seen, *(p.detach().clone() for p in module.parameters())]


def clip_and_step(optimizer: Any, norm: float | None) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if norm is not None:
        clip_grad_norm_(held, norm)
    optimizer.step()


def compare_on_rank(ctx: Any, case: Case) -> str:
    """Return what differs on this rank, or ""; also if torch refuses the case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = train(ctx, case, DistributedDataParallel)
        except Exception:
            return ""  # a dtype for which this optimizer, or clipping, is not made
        ours = train(ctx, case, DataParallel)
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a.dtype != b.dtype or not torch.equal(plain(a), plain(b)):
            return f"number {number} of {len(theirs)} is {b}, expected {a}"
    return ""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.nan_to_num(nan=12345.0)


flag = st.booleans()
rate = st.sampled_from([0.1, 0.01])
decay = st.sampled_from([0.0, 0.1])
way = st.sampled_from([{}, {}, {"foreach": True}, {"foreach": False}])
fused = way | st.just({"fused": True})


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return settings of an optimizer of torch.optim."""
    common = {"lr": rate, "weight_decay": decay, "maximize": flag}
    momentum = st.sampled_from([0.0, 0.9])
    special: dict[str, Any] = {
        "SGD": {"momentum": st.just(0.9), "nesterov": flag} | common,
        "Adam": {"amsgrad": flag, "decoupled_weight_decay": flag} | common,
        "AdamW": {"amsgrad": flag} | common,
        "RMSprop": {"momentum": momentum, "centered": flag} | common,
        "NAdam": {"decoupled_weight_decay": flag} | common,
        "RAdam": {"decoupled_weight_decay": flag} | common,
        "ASGD": {"t0": st.sampled_from([1, 1000000])} | common,
        "Rprop": {"lr": rate, "maximize": flag},
        "Adafactor": {"eps": st.just((1e-7, 1e-3))} | common,  # see `known`
    }
    has_fused = kind in ("SGD", "Adam", "AdamW", "Adagrad")
    ways = fused if has_fused else way if kind != "Adafactor" else st.just({})
    chosen = st.fixed_dictionaries(special.get(kind, common))
    return st.tuples(chosen, ways).map(lambda pair: pair[0] | pair[1])


KINDS = ["SGD", "SGD", "Adam", "AdamW", "AdamW", "Adagrad", "Adadelta", "Adamax"]
KINDS += ["NAdam", "RAdam", "RMSprop", "ASGD", "Adafactor", "Rprop"]
shapes = st.sampled_from(
    [(), (1,), (7,), (0, 3), (2, 3), (5, 1), (3, 4, 2), (2, 3, 2, 2)]
)
strides = st.sampled_from(["contiguous"] * 3 + ["transposed", "holes", "channels_last"])
CAPS = [(), (("bucket_cap_mb", 0),), (("bucket_cap_mb", 64 / 2**20),)]
FLAGS = ["gradient_as_bucket_view", "batched_grad_copy"]
flags = st.sets(st.sampled_from([each for each in FLAGS if each in oracle.TAKES]))
orders = st.sampled_from([2.0, 2.0, 1.0, float("inf")])
clips = st.none() | st.tuples(st.sampled_from([0.1, 1.0, 1e9]), orders)


def clipped_for(split: float | None, step: Step) -> Step:
    """Return the step with a norm that has torch's bits also if it is that of rows."""
    if split is None or step.clip is None:
        return step
    return replace(step, clip=(step.clip[0], math.inf))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mode = draw(st.sampled_from(["", "", "find_unused_parameters", "static_graph"]))
    scale = draw(st.sampled_from([None, None, 256.0, 2.0**120]))
    dtypes = ["fp32"] * 5 + ["fp64", "bf16"]
    dtypes += ["fp16", "complex64"] if scale is None else []
    a_param = st.builds(
        ParamShape,
        shape=shapes,
        dtype=st.sampled_from(dtypes),
        strides=strides,
        frozen=st.sampled_from([False] * 7 + [True]),
    )
    params = draw(st.lists(a_param, min_size=1, max_size=7))
    if all(param.frozen for param in params):
        params.append(ParamShape((3,)))
    indices = st.integers(0, len(params) - 1)
    some = st.lists(indices, min_size=1, max_size=4).map(tuple)
    branches = (tuple(range(len(params))), *draw(st.lists(some, max_size=3)))
    if mode:  # then not every forward uses everything
        branches = branches[1:] or branches
    norm = draw(st.booleans())
    model = ModelSpec(tuple(params), branches, batch_norm=norm)
    everything = (True,) * len(branches)
    a_mask = st.lists(flag, min_size=len(branches), max_size=len(branches)).map(tuple)
    ranks = 2 if norm else 1  # without the norm a rank might have nothing to do
    masks = st.lists(a_mask, min_size=ranks, max_size=ranks).map(tuple)
    if not norm:
        masks = masks.map(lambda each: each if any(each[0]) else (everything,))
    if mode != "find_unused_parameters":
        same = draw(masks)[:1] if mode and norm else (everything,)
        masks = st.just(same)
    a_step = st.builds(
        Step,
        masks=masks,
        quiet=st.sampled_from([0, 0, 0, 1, 2]),
        clip=clips,
        applies=st.sampled_from([True] * 5 + [False]),
        to_none=st.just(draw(flag)) | flag,
        looks=st.sampled_from(["", "", "", "eval", "train"]),
    )
    steps = draw(st.lists(a_step, min_size=5, max_size=8))
    for k, before in enumerate(steps[:-1]):
        if before.looks == "train":  # then the next backward is no local one
            steps[k + 1] = replace(steps[k + 1], quiet=0)
    if mode == "static_graph":  # torch's breaks if its first backward is local
        steps[0] = Step(steps[0].masks)
    kinds = [draw(st.sampled_from(KINDS))]
    if draw(st.sampled_from([False, False, True])):
        kinds *= 2
    options = dict(draw(st.sampled_from(CAPS))) | dict.fromkeys(draw(flags), True)
    if mode:
        options[mode] = True
    chosen = draw(settings(kinds[0]))
    split = draw(st.sampled_from([None, None, 0.0, 32 / 2**20]))
    steps = [clipped_for(split, step) for step in steps]
    case = Case(
        model,
        tuple(options.items()),
        tuple(kinds),
        tuple(chosen.items()),
        tuple(steps),
        scale,
        overlaps=draw(flag),
        split=split,
    )
    may_be_early = draw(flag) and scale is None
    clips_early = early_clips if split is None else st.none()  # rows have other bits
    return early(case, draw(clips_early)) if may_be_early else case


early_clips = st.sampled_from([None, None, 0.1, 1.0])


def early(case: Case, clip: float | None) -> Case:
    """Return the same training with steps inside the backward."""
    steps = tuple(replace(step, clip=None, applies=True) for step in case.steps)
    return replace(case, steps=steps, early=True, early_clip=clip)


# A GradScaler's stand-in for a gradient, when buckets of a static graph are rebuilt.
MOVES = Case(
    ModelSpec((ParamShape(()),), ((0,),), batch_norm=True),
    (("gradient_as_bucket_view", True), ("static_graph", True)),
    ("SGD",),
    (("momentum", 0.9), ("lr", 0.1), ("weight_decay", 0.1)),
    (Step(((False,),)), Step(((False,),), applies=False), *[Step(((False,),))] * 3),
    scale=256.0,
)


def test_any_loop(pool: Any) -> None:
    @example(MOVES)
    @given(cases())
    def run(case: Case) -> None:
        results = pool.run(compare_on_rank, 2, case)
        for rank, difference in enumerate(results):
            assert not difference, f"rank {rank}: {difference}"

    run()
