"""Tests that are rank functions: their body runs on every rank.

    @on_ranks(2, 3)                          # on two ranks, and on three
    @pytest.mark.parametrize("view", [False, True])
    def test_mean(ctx, view):
        ...
        assert ddp.module.w.grad == 1.5      # on each rank
        return grads(ddp)                    # and the same bits on all of them

    @on_simulated_ranks(2)                   # by day on threads, see `simulated`
    def test_failure(ctx): ...

    @as_in_torch(2)
    def test_mean_of_torch(ctx, wrap): ...   # returns what torch's DDP must give, too

Parameters are sent by value, as `Pool.run` does; of fixtures only those that can be
pickled (``tmp_path``). A rank that fails an assertion sends its variables along.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support import oracle, simulated
from tests.support.both import Raised, on_both, same
from tests.support.fresh import run_fresh

Test = Callable[..., None]
Where = int | tuple[int, ...]


def on_ranks(
    *places: Where, fresh: dict[str, Any] | None = None, limit: float = 45.0
) -> Callable[[Callable[..., Any]], Test]:
    """Make a test of a rank function ``test_*(ctx, *parameters)``.

    What ranks return (if not None) must be the same on all of them, bit for bit.

    Args:
        *places: World sizes or prepared groups, see `Pool.run`; one test for each. If
            there are none, the test is parametrised with ``where``.
        fresh: Use new processes for each test, with these options of `run_fresh`.
        limit: Seconds after which a rank counts as hung.
    """

    def decorate(scenario: Callable[..., Any]) -> Test:
        function = (scenario,)
        return _made(scenario, function, places, _same, fresh=fresh, limit=limit)

    return decorate


def on_simulated_ranks(
    *places: int, fresh: dict[str, Any] | None = None
) -> Callable[[Callable[..., Any]], Test]:
    """Make a test as `on_ranks` does, which by day runs on threads of this process.

    For ranks that fail, hang or spoil their groups, where no process, signal or message
    of Gloo is what the test is about. With ``MINIDP_NATIVE=1``, and at night, the ranks
    are real: see `tests.support.simulated`.

    Args:
        *places: World sizes, one test for each.
        fresh: Of real ranks, see `on_ranks`.
    """
    if simulated.ARE_REAL:
        return on_ranks(*places, fresh=fresh)
    return lambda scenario: _made(
        scenario, (scenario,), places, _same, fresh=None, is_simulated=True
    )


def _same(results: Sequence[Any]) -> None:
    for rank, result in enumerate(results):
        assert same(results[0], result), f"rank {rank}: {result}, {results[0]}"


def as_in_torch(
    *places: Where, fresh: dict[str, Any] | None = None
) -> Callable[[Callable[..., Any]], Test]:
    """Make a test of ``test_*(ctx, wrap, *parameters)``; arguments as of `on_ranks`.

    It runs on torch's DDP and on minidp (`on_both`); what it returns must be the same,
    bit for bit, and neither may raise. A parameter ``mode`` holds options of both: the
    test is skipped if torch's DDP is too old for them.
    """

    def decorate(scenario: Callable[..., Any]) -> Test:
        def check(results: Sequence[Any]) -> None:
            for rank, (theirs, ours) in enumerate(results):
                assert not isinstance(theirs, Raised), f"torch fails: {theirs}"
                text = f"rank {rank}: torch {theirs}, minidp {ours}"
                assert same(theirs, ours), text

        return _made(scenario, (on_both, scenario), places, check, fresh=fresh)

    return decorate


def _made(
    scenario: Callable[..., Any],
    function: tuple[Any, ...],  # what a rank calls, and its first arguments
    places: Sequence[Where],
    check: Callable[[Sequence[Any]], None],
    *,
    fresh: dict[str, Any] | None,
    limit: float = 45.0,
    is_simulated: bool = False,
) -> Test:
    # Those before are what a rank gets from `Pool.run` and `on_both`.
    parameters = list(inspect.signature(scenario).parameters.values())[len(function) :]
    names = [parameter.name for parameter in parameters]

    def test(**given: Any) -> None:
        if function[0] is on_both:
            oracle.skip_unless_torch_takes(given.get("mode", ()))
        call, *more = *function, *(given[name] for name in names)
        where: Any = given["where"] if "where" in given else places[0]
        if is_simulated:
            check(simulated.run(call, where, *more))
        elif fresh is None:
            check(given["pool"].run(call, where, *more, limit=limit))
        else:
            assert isinstance(where, int)  # groups are the pool's
            check(run_fresh(call, where, *more, **fresh))

    has_pool = fresh is None and not is_simulated
    added = ["pool"] * has_pool + ["where"] * (len(places) != 1)
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters += [inspect.Parameter(name, kind) for name in added]
    parameters = [parameter.replace(kind=kind) for parameter in parameters]
    made: Any = test
    made.__signature__ = inspect.Signature(parameters)
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(made, name, getattr(scenario, name))
    made.pytestmark = getattr(scenario, "pytestmark", [])
    if len(places) > 1:
        made = pytest.mark.parametrize("where", places)(made)
    # A rank imports the module and looks here for the function.
    made.on_rank, scenario.__qualname__ = scenario, f"{scenario.__qualname__}.on_rank"
    return made  # type: ignore[no-any-return]
