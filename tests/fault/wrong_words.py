"""Words of wrong uses: plain data, drawn in the parent, played on every rank.

A letter is an operation, and perhaps the rank that is odd: it leaves the operation out,
or is the only one that does it (see `Op`). A rank that fails a letter says so and goes
on with the next one, as users do; so ranks may be out of step, and nothing that the
harness itself needs goes through the group that the word breaks: ranks return what they
saw, and the parent compares.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.futures import Future

from minidp import DataParallel
from minidp.comm.groups import fresh_group

# hang_timeout of every word; longer on a machine that does other things meanwhile.
HANG_SECONDS = float(os.environ.get("MINIDP_WORDS_HANG", "1.0"))
MEETING_SECONDS = 60  # for ranks that wait in several hangs, one after the other
DOCUMENTED = (RuntimeError, ValueError, TypeError)
EACH_SKIPS = ("forward", "branch", "quiet", "eval", "backward", "oldest", "retain")
EACH_SKIPS += ("part", "grad", "method", "sync")
ONLY_ODD = ("freeze", "unfreeze", "replace", "cast", "raising hook")
ONLY_ODD += ("nulling hook", "bad hook", "None hook", "NaN")
ALL_DO = (
    "add",
    "step",
    "step others",
    "step half",
    "zero to None",
    "zero to 0",
    "reset",
)


@dataclass(frozen=True)
class Op:
    """One letter.

    ``odd``: the rank that leaves it out (a letter of `EACH_SKIPS`), or the only one
    that does it (`ONLY_ODD`); -1: all do it.
    """

    name: str
    odd: int = -1

    def is_done_by(self, rank: int) -> bool:
        if self.odd < 0:
            return True
        return (rank == self.odd) == (self.name in ONLY_ODD)


@dataclass(frozen=True)
class Word:
    """A training that goes wrong."""

    ops: tuple[Op, ...]
    options: tuple[tuple[str, Any], ...] = ()
    has_hook: bool = False
    has_norm: bool = False


def is_out_of_step(word: Word) -> bool:
    """Whether ranks leave collectives out, so that others pair up wrongly."""
    return any(op.odd >= 0 for op in word.ops)


@dataclass
class Story:
    """What one rank saw."""

    # Of each stretch between resets: (where it was, digest of all parameters; "" if
    # raised), of each optimizer step with gradients. Where: how many synchronised
    # backwards so far, and which letter.
    steps: list[list[tuple[tuple[int, int], str]]] = field(default_factory=lambda: [[]])
    ends: list[str] = field(default_factory=list)  # likewise, where no letter raised
    errors: list[tuple[int, str]] = field(default_factory=list)  # (letter, text)
    undocumented: str = ""
    longest: float = 0.0  # seconds of one letter
    ending: str = ""  # why it does not train after reset(); empty if it does


# ------------------------------------------------------------------------- the module


class Net(nn.Module):
    """Two outputs, of which one may leave a layer out."""

    def __init__(self, *, has_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4, affine=False) if has_norm else None

    def forward(self, x: torch.Tensor, *, skip: bool = False) -> list[torch.Tensor]:
        y = torch.tanh(self.a(x.to(self.a.weight.dtype)))
        if self.norm is not None:
            y = self.norm(y)
        first = y.pow(2).mean()
        if not skip:
            y = torch.tanh(self.b(y.to(self.b.weight.dtype)))
        if hasattr(self, "extra"):
            y = y * self.extra
        return [first, self.c(y.to(self.c.weight.dtype)).pow(2).mean()]


def inputs_of(rank: int, i: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * rank + i))


def raise_in_hook(_grad: torch.Tensor) -> None:
    raise ValueError("a hook of the word")


def null_in_hook(param: torch.Tensor) -> None:
    param.grad = None


class OnceBadHook:
    """A comm hook that averages, except when it is told otherwise."""

    next = ""

    def __call__(self, state: Any, bucket: Any) -> Any:
        how, self.next = self.next, ""
        if how == "bad hook":
            raise ValueError("a comm hook of the word")
        if how == "None hook":
            return None
        buffer = bucket.buffer().div_(bucket.divisor())
        options = {"group": bucket.process_group(), "async_op": True}
        future: Future[Any] = dist.all_reduce(buffer, **options).get_future()
        return future.then(lambda done: done.value()[0])


# ------------------------------------------------------------------------- the player


class Player:
    """One rank's part of a word."""

    def __init__(self, ctx: Any, word: Word, key: str) -> None:
        self.rank, self.world_size = ctx.rank, ctx.world_size
        self.word = word
        self.story = Story()
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"words/{key}", store)
        self.group = fresh_group(ctx.group, f"words/{key}")
        self.count = 0  # forwards
        self.meetings = 0
        self.letter = 0
        self.num_errors = 0  # before this stretch
        self.build()

    def build(self) -> None:
        """Collective: a new module, wrapped."""
        self.ddp = DataParallel(
            Net(has_norm=self.word.has_norm),
            process_group=self.group,
            hang_timeout=HANG_SECONDS,
            **dict(self.word.options),
        )
        self.hook = OnceBadHook()
        if self.word.has_hook:
            self.ddp.register_comm_hook(None, self.hook)
        self.initial = {k: v.clone() for k, v in self.ddp.state_dict().items()}
        self.start()

    def start(self) -> None:
        params = [*self.ddp.parameters()]
        self.optimizers = {
            "step": torch.optim.SGD(params, lr=0.1),
            "step others": torch.optim.AdamW(params, lr=0.01, foreach=True),
            "step half": torch.optim.Adam(params[: len(params) // 2], lr=0.01),
        }
        self.losses: list[list[torch.Tensor]] = []
        self.handles: list[Any] = []
        self.has_nan = False
        self.is_changed = False
        self.before = self.ddp._reducer.ledger.finalized

    def play(self) -> Story:
        story = self.story
        for i, op in enumerate(self.word.ops):
            if op.is_done_by(self.rank):
                begin = time.monotonic()
                self.attempt(i, op.name)
                if op.name != "reset":  # which begins with a meeting
                    story.longest = max(story.longest, time.monotonic() - begin)
        try:
            self.recover()
            story.ending = self.train_rightly()
        except Exception as error:
            story.ending = f"{type(error).__name__}: {error}"
        return story

    def attempt(self, i: int, name: str) -> None:
        self.letter = i
        try:
            self.perform(name)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.story.errors.append((i, text))
            if not isinstance(error, DOCUMENTED) or "INTERNAL ASSERT" in text:
                self.story.undocumented = f"letter {i} ({name}): {text}"

    def perform(self, name: str) -> None:
        match name:
            case "step" | "step others" | "step half":
                self.step(self.optimizers[name])
            case "forward" | "branch" | "quiet" | "eval":
                self.forward(name)
            case "backward" | "oldest" | "retain" | "part" | "grad":
                self.backward(name)
            case "method":
                sum(self.ddp.module(self.next_input())).backward()
                self.unhook()
            case "sync":
                self.ddp.sync_gradients()
            case "reset":
                self.recover()
                self.story.steps.append([])
            case "zero to None" | "zero to 0":
                self.ddp.zero_grad(set_to_none=name == "zero to None")
            case _:
                self.change(name, self.ddp.module)

    def change(self, name: str, module: Any) -> None:
        """Of the module, or of what comes next."""
        match name:
            case "bad hook" | "None hook":
                self.hook.next = name
            case "NaN":
                self.has_nan = True
            case "freeze" | "unfreeze":
                module.b.weight.requires_grad_(name == "unfreeze")
            case "raising hook":
                self.handles.append(module.a.bias.register_hook(raise_in_hook))
            case "nulling hook":
                add = module.c.weight.register_post_accumulate_grad_hook
                self.handles.append(add(null_in_hook))
            case "replace":
                module.a.weight = nn.Parameter(module.a.weight.detach().clone())
            case "cast":
                module.double()
            case "add" if not hasattr(module, "extra"):
                module.extra = nn.Parameter(torch.ones(4))
                self.optimizers["step"].add_param_group({"params": [module.extra]})
        self.is_changed |= name in ("replace", "cast", "add")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        steps = self.story.steps[-1]
        held = [p for g in optimizer.param_groups for p in g["params"]]
        if not any(p.grad is not None for p in held):
            optimizer.step()  # of nothing: no step
            return
        where = (self.ddp._reducer.ledger.finalized - self.before, self.letter)
        try:
            optimizer.step()
        except Exception:
            steps.append((where, ""))
            raise
        steps.append((where, digest(self.ddp)))

    # -- letters -----------------------------------------------------------------------

    def next_input(self) -> torch.Tensor:
        self.count += 1
        x = inputs_of(self.rank, self.count)
        if self.has_nan:
            self.has_nan = False
            x[0, 0] = float("nan")
        return x

    def forward(self, name: str) -> None:
        self.ddp.train(mode=name != "eval")
        quiet = self.ddp.no_sync() if name == "quiet" else nullcontext()
        with quiet, torch.set_grad_enabled(name != "eval"):
            losses = self.ddp(self.next_input(), skip=name == "branch")
        if name != "eval":
            self.losses.append(losses)

    def backward(self, name: str) -> None:
        if not self.losses:
            return
        which = 0 if name == "oldest" else -1
        losses = self.losses[-1] if name == "retain" else self.losses.pop(which)
        if name == "part":
            losses[0].backward()
        elif name == "grad":
            params = [p for p in self.ddp.parameters() if p.requires_grad]
            torch.autograd.grad(sum(losses), params, allow_unused=True)
        else:
            sum(losses).backward(retain_graph=name == "retain")
        self.unhook()

    def unhook(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    # -- recovery ----------------------------------------------------------------------

    def meet(self, news: str) -> None:
        """All ranks come here, and learn what each has to say."""
        self.meetings += 1
        mine = f"{self.meetings}/{self.rank}"
        self.store.set(mine, news)
        keys = [f"{self.meetings}/{rank}" for rank in range(self.world_size)]
        self.store.wait(keys, timedelta(seconds=MEETING_SECONDS))
        self.others = [self.store.get(key).decode() for key in keys]

    def recover(self) -> None:
        """What README asks for after any failure."""
        has_raised = len(self.story.errors) > self.num_errors
        self.story.ends.append("" if has_raised else digest(self.ddp))
        self.num_errors = len(self.story.errors)
        self.unhook()
        self.meet(f"changed {self.is_changed}")
        self.ddp.reset()
        self.group = self.ddp.process_group
        if len(set(self.others)) > 1 or self.is_changed:
            self.build()
        self.hook.next = ""
        self.ddp.train()
        for param in self.ddp.parameters():
            param.requires_grad_()
        self.ddp.load_state_dict(self.initial)
        self.ddp.zero_grad()
        self.start()

    def train_rightly(self) -> str:
        """Three steps against all ranks' gradients, computed here."""
        ddp, plain = self.ddp, Net(has_norm=self.word.has_norm)
        for i in range(3):
            state = ddp.module.state_dict()
            ddp.zero_grad()
            sum(ddp(inputs_of(self.rank, -i))).backward()
            plain.load_state_dict(state)
            plain.zero_grad()
            for rank in range(self.world_size):
                (sum(plain(inputs_of(rank, -i))) / self.world_size).backward()
            named = ddp.module.named_parameters()
            for (name, p), q in zip(named, plain.parameters(), strict=True):
                if p.grad is None or not torch.allclose(p.grad, q.grad, atol=1e-6):
                    return f"step {i}: {name}.grad is {p.grad}, expected {q.grad}"
            self.optimizers["step"].step()
        return ""


def digest(module: nn.Module) -> str:
    """Of all parameters; one NaN is as good as another."""
    text = hashlib.sha1(usedforsecurity=False)
    for name, param in module.named_parameters():
        values = param.detach().double().nan_to_num(nan=1e300, posinf=2e300)
        text.update(name.encode() + values.numpy().tobytes())
    return text.hexdigest()[:12]


def play(ctx: Any, word: Word, key: str) -> Story:
    """On a rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        player = Player(ctx, word, key)
        story = player.play()
        if not story.errors and not story.ending:  # else it may wait for ever
            dist.destroy_process_group(player.group)
        del player
        gc.collect()
        return story


# --------------------------------------------------------------------------- the laws


def judge(word: Word, stories: Sequence[Story]) -> str:
    """Which law a word broke, in words; empty: none."""
    for rank, story in enumerate(stories):
        if story.undocumented:
            return f"rank {rank}: {story.undocumented}"
    endings = [story.ending for story in stories]
    if any(endings):
        return f"does not train after reset(): {endings}"
    for stretch in zip(*(story.steps for story in stories), strict=True):
        difference = _first_difference(word, stretch)
        if difference:
            return difference
    for ends in zip(*(story.ends for story in stories), strict=True):
        if all(ends) and len(set(ends)) > 1:
            return f"silently different in the end: {ends}"
    return ""


def _first_difference(word: Word, stretch: Sequence[Any]) -> str:
    """Replicas that differ although no rank was refused a step before.

    Ranks that left something out may be a backward ahead of others: their gradients
    then pair up with those of another step, until one waits in vain. Nobody can know
    before (but for ``check_replicas_every``), so they are compared only where they are
    at the same letter, and at the end if none of them has raised.
    """
    for number, events in enumerate(zip(*stretch, strict=False)):
        digests = [found for _, found in events]
        if not all(digests):
            return ""  # from here on it is no secret
        if is_out_of_step(word) and len({where for where, _ in events}) > 1:
            return ""
        if len(set(digests)) > 1:
            return f"silently different after step {number}: {digests}"
    return ""


# ------------------------------------------------------------------------- strategies

UNUSED, STATIC = ("find_unused_parameters", True), ("static_graph", True)
VIEWS = ("gradient_as_bucket_view", True)
EACH_ALONE, TWO_BUCKETS = ("bucket_cap_mb", 0), ("bucket_cap_mb", 40 / 2**20)
OPTIONS: list[tuple[tuple[str, Any], ...]] = [
    *((), (EACH_ALONE,), (VIEWS, TWO_BUCKETS), (STATIC, TWO_BUCKETS)),
    *((UNUSED,), (UNUSED, EACH_ALONE), (UNUSED, VIEWS)),
]
RIGHT_STEP = ("zero to None", "forward", "backward", "step")


def words(world_size: int) -> st.SearchStrategy[Word]:
    """Letters that all do rightly, and some that go wrong."""
    odd = st.integers(-1, world_size - 1)
    wrong = st.builds(Op, st.sampled_from(EACH_SKIPS + ONLY_ODD), odd)
    right = st.sampled_from([*map(Op, ALL_DO), *map(Op, RIGHT_STEP), Op("forward")])
    whole_step = st.just(tuple(map(Op, RIGHT_STEP)))
    piece = st.one_of(whole_step, st.tuples(right), st.tuples(wrong))
    pieces = st.lists(piece, min_size=1, max_size=9)
    return st.builds(
        Word,
        ops=pieces.map(lambda parts: tuple(itertools.chain(*parts))),
        options=st.sampled_from(OPTIONS),
        has_hook=st.booleans(),
        has_norm=st.booleans(),
    )
