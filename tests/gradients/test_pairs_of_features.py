"""Every pair of features: minidp, torch's DDP and plain averages side by side.

All pairs are compared with `Plain`, and between ranks; and with torch's DDP bit for
bit, unless they stand in `ODDITIES`, with what torch does there, or torch is too old.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch

from tests.support import oracle
from tests.support.both import Scalars, on_both, x_of
from tests.support.combined import combined
from tests.support.training import Log, Plain, Training, difference, train_both

# Which forwards use the part that may be unused, and on which ranks.
CHANGING = ((True,), (True, False), (False,), (True,), (False, True), (False,))
ALIKE = ((True,), (False,), (True,), (True,), (False,), (False,))
FIXED = ((True, False),)
ALWAYS = ((True,),)


@dataclass(frozen=True)
class Feature:
    """What it adds to a training."""

    options: dict[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    hook: str = ""
    joins: bool | None = None
    is_quiet: bool = False
    delays: bool = False


MAY_BE_UNUSED = ("spare", "never")
FEATURES = {
    "allreduce_hook": Feature(hook="allreduce"),
    "fp16_hook": Feature(hook="fp16"),
    "join": Feature(joins=True),
    "join_by_active": Feature(joins=False),
    "no_sync": Feature(is_quiet=True),
    "find_unused": Feature({"find_unused_parameters": True}, MAY_BE_UNUSED),
    "static_graph": Feature({"static_graph": True}, MAY_BE_UNUSED),
    "views": Feature({"gradient_as_bucket_view": True}),
    "batched_copy": Feature({"batched_grad_copy": True}),
    "lazy": Feature({"lazy_bucket_allocation": True}),
    "sparse": Feature(parts=("sparse",)),
    "complex": Feature(parts=("complex",)),
    "ignored": Feature(parts=("ignored",)),
    "skip_unused": Feature(
        {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
        MAY_BE_UNUSED,
    ),
    "small_buckets": Feature({"bucket_cap_mb": 32 / 2**20}),
    "batch_norm": Feature({"forward_sync_buffers": True}, ("batch_norm",)),
    "channels_last": Feature(parts=("channels_last",)),
    "delayed": Feature(parts=("spare",), delays=True),
}
ONE_ARGUMENT = {"join", "join_by_active"}  # two values of it: no pair


class Torch(Enum):
    """What torch's DDP does."""

    DIFFERS = "other numbers than the plain average"
    ABORTS = "mismatched collectives abort the process, or hang: not run"
    RACES = "does not wait for its own collective: not run"
    RAISES = "an error, and so does minidp"


class Oddity(NamedTuple):
    """Where minidp is not compared with torch bit for bit."""

    features: frozenset[str]
    torch: Torch
    why: str  # of an error: its text


def odd(features: str, does: Torch, why: str) -> Oddity:
    return Oddity(frozenset(features.split()), does, why)


STALE_MAP = "a joined rank sends the used-map of its last backward again"
NO_MAP = "a joined rank reduces a used-map that the others do not send"
JOINED_SKIPS = "a joined rank reduces the buckets that the others skip"
QUIET_SKIPS = "a bucket that only the no_sync part used is skipped: replicas drift"
ODDITIES = [
    odd("delayed", Torch.RACES, "the all-reduce of delayed gradients is not awaited"),
    odd("allreduce_hook fp16_hook", Torch.RAISES, "can only be called once"),
    odd("fp16_hook sparse", Torch.RAISES, "not implemented for 'Half'"),
    odd("join find_unused no_sync", Torch.DIFFERS, STALE_MAP),
    odd("skip_unused no_sync small_buckets", Torch.DIFFERS, QUIET_SKIPS),
    odd("skip_unused static_graph small_buckets", Torch.ABORTS, "others skip it"),
]
for join in ("join", "join_by_active"):
    ODDITIES += [
        odd(f"{join} skip_unused", Torch.DIFFERS, STALE_MAP),
        odd(f"{join} skip_unused small_buckets", Torch.ABORTS, JOINED_SKIPS),
        odd(f"{join} static_graph find_unused", Torch.ABORTS, NO_MAP),
        odd(f"{join} static_graph skip_unused", Torch.ABORTS, NO_MAP),
    ]
PAIRS = [
    frozenset(pair)
    for n in (1, 2)
    for pair in itertools.combinations(FEATURES, n)
    if not set(pair) >= ONE_ARGUMENT
]
MORE = [
    frozenset(words.split())
    for words in [
        "views small_buckets no_sync",
        "views find_unused small_buckets",
        "views find_unused no_sync",
        "views static_graph no_sync",
        "views batched_copy small_buckets",
        "views batched_copy complex channels_last",
        "views join_by_active small_buckets no_sync",
        "views join_by_active batched_copy",
        "join_by_active allreduce_hook small_buckets",
        "join batch_norm no_sync",
        "join_by_active static_graph small_buckets",
        "join find_unused small_buckets views",
        "sparse complex channels_last small_buckets views",
        "sparse join small_buckets no_sync",
        "skip_unused small_buckets views",
        "skip_unused small_buckets batched_copy",
        "skip_unused small_buckets allreduce_hook",
        "skip_unused small_buckets sparse complex",
        "find_unused small_buckets allreduce_hook no_sync",
        "static_graph small_buckets allreduce_hook views",
        "fp16_hook small_buckets no_sync complex channels_last",
        "ignored batch_norm join small_buckets",
        "delayed find_unused small_buckets views",
        "delayed join_by_active no_sync small_buckets",
        "delayed skip_unused small_buckets batched_copy",
    ]
]
MORE += [oddity.features for oddity in ODDITIES if len(oddity.features) > 2]


def training_of(features: frozenset[str], world_size: int) -> Training:
    """One training in which all of the features take part."""
    chosen = [feature for name, feature in FEATURES.items() if name in features]
    options = {k: v for feature in chosen for k, v in feature.options.items()}
    joins = [feature.joins for feature in chosen if feature.joins is not None]
    return Training(
        parts=frozenset(part for feature in chosen for part in feature.parts),
        options=tuple(sorted(options.items())),
        delayed=any(feature.delays for feature in chosen),
        hooks=tuple(feature.hook for feature in chosen if feature.hook),
        counts=(3, 6, 5)[:world_size] if joins else (6,) * world_size,
        joins=joins[0] if joins else None,
        quiet=frozenset({1, 3} if any(f.is_quiet for f in chosen) else ()),
        zeroing="Zz-",
        spare=use_of_spare(features),
    )


def use_of_spare(features: frozenset[str]) -> tuple[tuple[bool, ...], ...]:
    if "static_graph" in features:
        return FIXED
    if "skip_unused" in features:  # ranks have to be alike in torch
        return ALIKE
    return CHANGING if "find_unused" in features else ALWAYS


def oddities_of(features: frozenset[str]) -> list[Oddity]:
    return [oddity for oddity in ODDITIES if oddity.features <= features]


def check(pool: Any, features: frozenset[str], world_size: int) -> None:
    training = training_of(features, world_size)
    odds = {oddity.torch: oddity for oddity in oddities_of(features)}
    is_known = {name for name, _ in training.options} <= oracle.TAKES
    runs_torch = is_known and not odds.keys() & {Torch.ABORTS, Torch.RACES}
    results = pool.run(train_both, world_size, training, runs_torch)
    ours = [mine for mine, _ in results]
    if Torch.RAISES in odds:
        # In the same group: what minidp leaves there would be met by torch.
        for log in itertools.chain.from_iterable(results):
            assert log is None or odds[Torch.RAISES].why in log.error
        return
    check_numbers(training, ours)
    if not is_known:  # to an older torch
        return
    against_torch = [difference(theirs, mine) for mine, theirs in results if theirs]
    if odds:
        assert runs_torch == any(against_torch), "no longer odd"
        assert not any(theirs.error for _, theirs in results if theirs)
    else:
        assert against_torch == [""] * world_size


def check_numbers(training: Training, logs: list[Log]) -> None:
    """Against the plain averages, and that replicas are equal to the bit."""
    tolerance = 1e-2 if "fp16" in training.hooks else 1e-4
    for rank, (plain, log) in enumerate(zip(Plain(training).run(), logs, strict=True)):
        found = difference(plain, log, tolerance=tolerance)
        assert not found, f"rank {rank}: {found}"
        for name, value in log.state.items():
            if not name.startswith(("ignored.", "norm.running")):
                assert torch.equal(value, logs[0].state[name]), f"{name} of rank {rank}"


def named(cases: Iterable[frozenset[str]]) -> list[Any]:
    return [pytest.param(case, id="+".join(sorted(case))) for case in cases]


@pytest.mark.parametrize(("features", "world_size"), combined(PAIRS, [2, 3]))
def test_pair(pool: Any, features: frozenset[str], world_size: int) -> None:
    check(pool, features, world_size)


@pytest.mark.parametrize("features", named(MORE))
def test_more_at_once(pool: Any, features: frozenset[str]) -> None:
    check(pool, features, 2)


def test_oddities_are_of_these_features_and_each_is_tested() -> None:
    for oddity in ODDITIES:
        assert oddity.features <= FEATURES.keys()
        assert oddity.features in PAIRS + MORE


def skipped_view(ctx: Any, wrap: Any) -> float:
    module = Scalars(2)
    module.w[1].grad = torch.tensor([3.0])
    options = training_of(frozenset({"skip_unused", "views"}), 2).options
    ddp = wrap(module, bucket_cap_mb=0, **dict(options))
    ddp(x_of(ctx), [0]).sum().backward()
    return module.w[1].grad.item()


def test_difference_old_gradient_view_in_a_skipped_bucket(pool: Any) -> None:
    """Torch divides it by the number of ranks, and then does not sum it."""
    oracle.skip_unless_torch_takes(FEATURES["skip_unused"].options)
    assert pool.run(on_both, 2, skipped_view) == [(1.5, 3.0)] * 2
