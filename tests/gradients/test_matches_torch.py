"""minidp's gradients, module buffers and errors are torch's, bit for bit."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support import oracle
from tests.support.models import ModelSpec, ParamShape
from tests.support.sessions import Session, first_difference, run_session
from tests.support.tracing import collective_trace

pytestmark = pytest.mark.laws

# Torch defects that minidp does not share; README lists them as differences.
TORCH_DEFECTS = (
    "undefined, but still allreduced",  # a local backward pollutes the used-map
    "INTERNAL ASSERT",
    "refer to a single memory location",  # broadcast of a lone (n, 1) column
)


def compare_on_rank(ctx: Any, session: Session) -> tuple[str, str, list[Any]]:
    """(difference, torch's error message, minidp's collectives) on one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run_session(ctx, session, "torch")
        with collective_trace() as trace:
            found = run_session(ctx, session, "minidp")
    return first_difference(session, expected, found), expected.message, trace


shapes = st.sampled_from(
    [(), (1,), (7,), (0, 3), (2, 3), (5, 1), (3, 4, 2), (2, 3, 2, 2), (33,)]
)
params = st.builds(
    ParamShape,
    shape=shapes,
    dtype=st.sampled_from(["fp32"] * 4 + ["fp64", "bf16", "fp16", "complex64"]),
    strides=st.sampled_from(
        ["contiguous"] * 3 + ["transposed", "holes", "channels_last"]
    ),
    frozen=st.sampled_from([False] * 7 + [True]),
)
CAPS = [
    (),
    (("bucket_cap_mb", 25),),
    (("bucket_cap_mb", 0),),
    (("bucket_cap_mb", 64 / 2**20),),
    (("bucket_cap_mb_list", (16 / 2**20, 200 / 2**20)),),
]
caps = st.sampled_from([c for c in CAPS if not c or c[0][0] in oracle.TAKES])


FLAGS = ["gradient_as_bucket_view"]
FLAGS += [
    name
    for name in ["batched_grad_copy", "lazy_bucket_allocation"]
    if name in oracle.TAKES
]
flags = st.sets(st.sampled_from(FLAGS))
skipping = st.booleans()
if "skip_all_reduce_unused_params" not in oracle.TAKES:
    skipping = st.just(False)
# Torch skips buckets that only local backwards used, so that they stay local.
SKIPPING = ["forward", "no_grad", "sum", "zero", "zero to 0", "eval", "train mode"]
SKIPPING += ["next mask", "freeze"]


@st.composite
def models(draw: st.DrawFn, mode: str) -> ModelSpec:
    chosen = draw(st.lists(params, min_size=1, max_size=6))
    if all(p.frozen for p in chosen):
        chosen.append(ParamShape((3,)))
    indices = st.integers(0, len(chosen) - 1)
    branches = draw(
        st.lists(st.lists(indices, min_size=1, max_size=5), min_size=1, max_size=4)
    )
    everything = tuple(range(len(chosen)))
    return ModelSpec(
        tuple(chosen),
        (everything, *map(tuple, branches)),
        batch_norm=draw(st.booleans()),
        # In the other modes torch leaves the gradients of the second part local.
        in_two_parts=mode == "default" and draw(st.booleans()),
    )


FB = "forward, oldest"


@st.composite
def sessions(draw: st.DrawFn, mode: str, actions: list[str]) -> Session:
    model = draw(models(mode))
    num_branches = len(model.branches)
    uses = st.lists(st.booleans(), min_size=num_branches, max_size=num_branches)
    everything = (True,) * num_branches
    options = dict(draw(caps)) | dict.fromkeys(draw(flags), True)
    if mode != "default":
        options[mode] = True
    skips = mode == "find_unused_parameters" and draw(skipping)
    if skips:
        options["skip_all_reduce_unused_params"] = True
        # Torch divides an old gradient in a skipped bucket, see test_pairs_of_features.
        options.pop("gradient_as_bucket_view", None)
        actions = SKIPPING
    # Without find_unused_parameters ranks must use the same branches, else torch hangs.
    # With it each rank still needs something to run backward on: the batch norm.
    per_rank = mode == "find_unused_parameters" and model.batch_norm and not skips
    num_ranks = 4 if per_rank else 1
    one_mask = st.lists(uses.map(tuple), min_size=num_ranks, max_size=num_ranks)
    masks = draw(st.lists(one_mask.map(tuple), min_size=1, max_size=2))
    if mode == "default" or draw(st.booleans()):
        masks = [(everything,), *masks]
    pieces = [FB, FB, FB, "forward, forward, sum", "zero", "zero to 0", *actions]
    pieces += [] if skips else ["forward, forward, oldest, oldest", "quiet, oldest"]
    drawn = draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=9))
    frozen = draw(st.integers(0, len(model.params) - 1))
    text = ", ".join(drawn).replace("freeze", f"freeze(params.{frozen})")
    return Session(
        model,
        tuple(options.items()),
        # Torch's static graph breaks when its first backward is local.
        f"{FB}, {text}" if mode == "static_graph" else text,
        tuple(masks),
        has_grads=draw(st.booleans()),
        has_hook=draw(st.sampled_from([False, False, True])),
        delayed=draw(st.just(()) | indices_of(model)),
    )


def indices_of(model: ModelSpec) -> st.SearchStrategy[tuple[int, ...]]:
    trainable = [i for i, param in enumerate(model.params) if not param.frozen]
    return st.lists(st.sampled_from(trainable), max_size=3, unique=True).map(tuple)


def check(pool: Any, world_size: int, session: Session) -> None:
    if world_size > 2:
        session = dataclasses.replace(session, delayed=())
    results = pool.run(compare_on_rank, world_size, session)
    for rank, (difference, torch_message, _) in enumerate(results):
        if not any(defect in torch_message for defect in TORCH_DEFECTS):
            assert not difference, f"rank {rank} of {world_size}: {difference}"
    traces = [trace for _, _, trace in results]
    assert all(trace == traces[0] for trace in traces), "collectives differ by rank"


def test_every_cap_is_compared() -> None:
    oracle.skip_unless_torch_takes(name for c in CAPS for name, _ in c)


world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
# Four ranks use no other code than three, and take as long as the others together.
mostly_few = pytest.mark.parametrize(
    "world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.nightly)]
)
ACTIONS = ["forward", "quiet", "no_grad", "oldest", "backward", "sum", "zero"]
ACTIONS += ["zero to 0", "eval", "train mode", "next mask", "freeze"]


# A bucket in flight while the backward of its forward is interrupted.
INTERRUPTED = Session(
    ModelSpec((ParamShape((7,)),) * 2, ((0, 1),), in_two_parts=True),
    (("bucket_cap_mb_list", (16 / 2**20,)),),
    f"{FB}, {FB}, {FB}",
    (((True,),),),
)


@mostly_few
def test_default_mode(pool: Any, world_size: int) -> None:
    @example(INTERRUPTED)
    @given(sessions("default", [*ACTIONS, "retain"]))
    def run(session: Session) -> None:
        check(pool, world_size, session)

    run()


# Found by the nightly profile: torch re-averages an unused gradient view in place.
DRIFT = Session(
    ModelSpec((ParamShape((7,)),), ((0,), (0,)), batch_norm=True),
    (("find_unused_parameters", True), ("gradient_as_bucket_view", True)),
    f"{FB}, {FB}, freeze(params.0), {FB}",
    (((False, False), (False, False), (False, True), (False, False)),),
)
HALF_DRIFT = Session(
    ModelSpec((ParamShape((7,), dtype="fp16"),), ((0,),), batch_norm=True),
    (("find_unused_parameters", True), ("gradient_as_bucket_view", True)),
    f"{FB}, next mask, {FB}",
    (((True,),), ((False,),)),
)


@world_sizes
def test_find_unused_parameters(pool: Any, world_size: int) -> None:
    @example(DRIFT)
    @example(HALF_DRIFT)
    @given(sessions("find_unused_parameters", ACTIONS))
    def run(session: Session) -> None:
        check(pool, world_size, session)

    run()


# Found by the nightly profile: the rebuild makes also a gradient of a local backward a
# view, which is divided where it would have been multiplied.
TIED = Session(
    ModelSpec((ParamShape((2, 3)),), ((0,),), batch_norm=False),
    (("static_graph", True), ("gradient_as_bucket_view", True)),
    f"{FB}, forward, {FB}, zero, oldest, {FB}",
    (((True,),),),
)

# Found by the nightly profile: a parameter that joins a static graph late.
LATE = Session(
    ModelSpec((ParamShape(()),), ((0,), (0,)), batch_norm=True),
    (("static_graph", True),),
    f"{FB}, next mask, {FB}",
    (((False, False),), ((False, True),)),
)


@mostly_few
def test_static_graph(pool: Any, world_size: int) -> None:
    @example(TIED)
    @example(LATE)
    @given(sessions("static_graph", ACTIONS))
    def run(session: Session) -> None:
        check(pool, world_size, session)

    run()
