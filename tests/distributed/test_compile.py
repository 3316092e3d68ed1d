"""torch.compile around, inside and far outside the wrapper, next to torch's DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.both import grads, on_both, same
from tests.support.compiling import Counting, clean_compiler, compiled_backwards

MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m) or "default")


class Net(nn.Module):
    """Has module buffers, and two parameters that some modes may leave out."""

    def __init__(self, *, checkpointed: str = "") -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.last = nn.Linear(5, 2)
        self.spare = nn.Linear(2, 2)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, use_spare: bool = True) -> torch.Tensor:
        x = self.first(x)
        if self.checkpointed:
            reentrant = self.checkpointed == "reentrant"
            x = checkpoint(self.last, x, use_reentrant=reentrant)
        else:
            x = self.last(x)
        return self.spare(x) if use_spare else x


def input_of(ctx: Any, step: int) -> torch.Tensor:
    return torch.cos(torch.arange(12.0).reshape(4, 3) * (step + 2) + 5 * ctx.rank)


# What is compiled -> (wrapped module, the step to run), given a way to wrap.
Build = Callable[[Any, nn.Module, Any], tuple[nn.Module, Callable[..., Any]]]


def backward_of(call: Callable[..., Any]) -> Callable[..., None]:
    def step(x: torch.Tensor, *more: Any) -> None:
        call(x, *more).pow(2).sum().backward()

    return step


def compile_nothing(wrap: Any, module: nn.Module, backend: Any) -> Any:
    ddp = wrap(module)
    return ddp, backward_of(ddp)


def compile_wrapper(wrap: Any, module: nn.Module, backend: Any) -> Any:
    ddp = wrap(module)
    return ddp, backward_of(torch.compile(ddp, backend=backend))


def compile_in_place(wrap: Any, module: nn.Module, backend: Any) -> Any:
    ddp = wrap(module)
    ddp.compile(backend=backend)
    return ddp, backward_of(ddp)


def compile_module(wrap: Any, module: nn.Module, backend: Any) -> Any:
    ddp = wrap(torch.compile(module, backend=backend))
    return ddp, backward_of(ddp)


def compile_step(wrap: Any, module: nn.Module, backend: Any) -> Any:
    """Forward, backward and optimizer in one compiled function."""
    ddp = wrap(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def step(x: torch.Tensor, *more: Any) -> None:
        ddp.zero_grad()
        ddp(x, *more).pow(2).sum().backward()
        optimizer.step()

    return ddp, step


def history(
    ctx: Any, wrap: Any, build: Build, mode: Any, backend: Any, use_spare: bool
) -> list[Any]:
    """Gradients of three steps, and module buffers after them."""
    torch.manual_seed(0)
    ddp, step = build(lambda m: wrap(m, **mode), Net(), backend)
    found = []
    for i in range(3):
        if build is not compile_step:
            ddp.zero_grad()
            if "static_graph" not in mode:  # where torch's DDP fails an assertion
                with ddp.no_sync():
                    step(input_of(ctx, 10 + i), use_spare)
        step(input_of(ctx, i), use_spare)
        found.append(grads(ddp))
    return [found, [b.clone() for b in ddp.buffers()]]


def compiled_on_both(
    ctx: Any, build: Build, mode: Any, backend: str, use_spare: bool
) -> Any:
    def scenario(ctx: Any, wrap: Any) -> Any:
        counting = Counting()
        with clean_compiler():
            found = history(ctx, wrap, build, mode, backend or counting, use_spare)
        return found, counting.num_graphs

    with clean_compiler():
        return on_both(ctx, scenario)


def uncompiled_on_both(ctx: Any, mode: Any, use_spare: bool) -> Any:
    def scenario(ctx: Any, wrap: Any) -> Any:
        return history(ctx, wrap, compile_nothing, mode, None, use_spare)

    return on_both(ctx, scenario)


def assert_as_torch_and_uncompiled(
    pool: Any, build: Build, mode: Any, backend: str = "", world_size: int = 2
) -> None:
    use_spare = mode in MODES[:2]
    plain = pool.run(uncompiled_on_both, world_size, mode, use_spare)
    compiled = pool.run(compiled_on_both, world_size, build, mode, backend, use_spare)
    first_rank = compiled[0][1][0][0]
    for (_, ours_plain), (theirs, ours) in zip(plain, compiled, strict=True):
        assert same(theirs, ours), f"torch {theirs}, minidp {ours}"
        if build is not compile_step:
            assert same(ours_plain, ours[0])
        assert same(first_rank, ours[0][0])  # the same gradients on all ranks


@modes
def test_compiled_wrapper(pool: Any, mode: Any) -> None:
    assert_as_torch_and_uncompiled(pool, compile_wrapper, mode)


@pytest.mark.parametrize("build", [compile_in_place, compile_module, compile_step])
def test_places_to_compile(pool: Any, build: Build) -> None:
    assert_as_torch_and_uncompiled(pool, build, {"gradient_as_bucket_view": True})


def test_aot_autograd(pool: Any) -> None:
    assert_as_torch_and_uncompiled(pool, compile_wrapper, {}, "aot_eager")


@pytest.mark.slow
@modes
def test_compiled_step(pool: Any, mode: Any) -> None:
    assert_as_torch_and_uncompiled(pool, compile_step, mode, "aot_eager")


def test_one_rank(pool: Any) -> None:
    assert_as_torch_and_uncompiled(pool, compile_wrapper, {}, world_size=1)


def test_python_reducer_of_torch_changes_nothing(pool: Any) -> None:
    plain = pool.run(uncompiled_on_both, 2, {}, True)
    compiled = pool.run(under_python_reducer, 2)
    for (_, expected), found in zip(plain, compiled, strict=True):
        assert same(expected, found)


def under_python_reducer(ctx: Any) -> Any:
    def scenario(ctx: Any, wrap: Any) -> Any:
        return history(ctx, wrap, compile_wrapper, {}, Counting(), True)

    with clean_compiler(optimize_ddp="python_reducer"):
        return on_both(ctx, scenario)[1]


@pytest.mark.slow
def test_inductor(pool: Any) -> None:
    plain = pool.run(uncompiled_on_both, 2, {}, True)
    compiled = pool.run(
        compiled_on_both, 2, compile_wrapper, {}, "inductor", True, limit=200
    )
    for (_, expected), (_, ours) in zip(plain, compiled, strict=True):
        torch.testing.assert_close(ours[0], expected)
    assert same(compiled[0][1][0][0], compiled[1][1][0][0])


# -- with other features ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_checkpoint_in_a_compiled_module(pool: Any, kind: str) -> None:
    results = pool.run(checkpointed, 2, kind)
    for theirs, ours in results:
        assert same(theirs, ours), f"torch {theirs}, minidp {ours}"
        assert same(ours, results[0][1])


def checkpointed(ctx: Any, kind: str) -> Any:
    def scenario(ctx: Any, wrap: Any) -> Any:
        ddp = wrap(Net(checkpointed=kind))
        step = backward_of(torch.compile(ddp, backend="eager"))
        found = []
        for i in range(2):
            ddp.zero_grad()
            step(input_of(ctx, i))
            found.append(grads(ddp))
        return found

    with clean_compiler():
        return on_both(ctx, scenario)


def test_autocast_and_scaler_around_a_compiled_wrapper(pool: Any) -> None:
    results = pool.run(with_amp, 2)
    for theirs, ours in results:
        assert same(theirs, ours), f"torch {theirs}, minidp {ours}"
        assert same(ours, results[0][1])


def with_amp(ctx: Any) -> Any:
    def scenario(ctx: Any, wrap: Any) -> Any:
        ddp = wrap(Net())
        compiled = torch.compile(ddp, backend="eager")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for i in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = compiled(input_of(ctx, i)).float().pow(2).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in ddp.parameters()]

    with clean_compiler():
        return on_both(ctx, scenario)


# -- compiled autograd -----------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.last = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def steps_on_both(ctx: Any, autograd: str, mode: Any, is_module_compiled: bool) -> Any:
    def scenario(ctx: Any, wrap: Any) -> Any:
        with clean_compiler():
            ddp = wrap(Pair(), bucket_cap_mb=1, **mode)
            call = torch.compile(ddp, backend="eager") if is_module_compiled else ddp
            step, found = backward_of(call), []
            for i in range(3):
                ddp.zero_grad()
                with in_backwards(autograd):
                    with ddp.no_sync():
                        step(input_of(ctx, 10 + i))
                    step(input_of(ctx, i))
                found.append(grads(ddp))
            return found

    return on_both(ctx, scenario)


def in_backwards(autograd: str) -> Any:
    if not autograd:
        return contextlib.nullcontext()
    if autograd == "captured":
        return compiled_backwards()
    return compiled_backwards(autograd)


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda m: "-".join(m) or "default")
@pytest.mark.parametrize(
    ("autograd", "is_module_compiled"),
    [
        ("captured", False),
        pytest.param("eager", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_autograd_gives_the_same_gradients(
    pool: Any, mode: Any, autograd: str, is_module_compiled: bool
) -> None:
    """Torch refuses."""
    plain = pool.run(steps_on_both, 2, "", mode, False)
    compiled = pool.run(steps_on_both, 2, autograd, mode, is_module_compiled)
    for (_, expected), (theirs, ours) in zip(plain, compiled, strict=True):
        assert "Compiled autograd is not compatible with C++ DDP Reducer" in theirs
        assert same(expected, ours), ours


@pytest.mark.parametrize("mode", MODES[2:], ids=lambda m: "-".join(m))
def test_compiled_autograd_refuses_modes_that_need_the_end(
    pool: Any, mode: Any
) -> None:
    for theirs, ours in pool.run(refused_then_reset, 2, mode):
        assert "Compiled autograd is not compatible with C++ DDP Reducer" in theirs
        assert ours[0].startswith("[rank ")
        assert "Compiled autograd does not say when a backward ends" in ours[0]
        assert "compiled_autograd = False" in ours[0]
        assert same(ours[1], ours[2])


def refused_then_reset(ctx: Any, mode: Any) -> Any:
    def scenario(ctx: Any, wrap: Any) -> Any:
        with clean_compiler():
            ddp = wrap(Pair(), **mode)
            step = backward_of(ddp)
            try:
                with compiled_backwards():
                    step(input_of(ctx, 0))
            except RuntimeError as error:
                refusal = str(error)
            if not hasattr(ddp, "reset"):
                raise RuntimeError(refusal)
            ddp.reset()
            ddp.zero_grad()
            step(input_of(ctx, 0))
        fresh = wrap(Pair(), **mode)
        fresh.load_state_dict(ddp.state_dict())
        fresh(input_of(ctx, 0)).pow(2).sum().backward()
        return refusal, grads(ddp), grads(fresh)

    return on_both(ctx, scenario)
