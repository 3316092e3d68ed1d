"""What must hold after every simulated run."""

from __future__ import annotations

import re

from minidp.errors import MiniDPError

from .faults import LASTING, InjectedError, Kind, UsersError
from .play import Outcome, Play
from .scheduler import Death, Finding, Life
from .training import HANG_SECONDS, differ, expected

# What a wait may take beyond its limit: to ask who is missing, and a slice.
SLACK_SECONDS = 12.0
ABSENT = re.compile(r"Missing: rank ([0-9, ]+)\.")


def is_harmless(play: Play) -> bool:
    """Return whether nothing went wrong for longer than a wait may take."""
    fault = play.fault
    is_short = fault.kind in LASTING and fault.seconds < HANG_SECONDS
    return not fault.has_struck or is_short


def check_all(play: Play, inputs: tuple[int, ...] | None = None) -> None:
    """Check gradients, errors, names and times of a training."""
    check_gradients(play, inputs)
    fault = play.fault
    if is_harmless(play):
        check_no_error(play)
    elif fault.kind is Kind.HEARS_LATE:
        check_errors(play, {play.fault.rank}, must_name=False)
    else:
        check_errors(play, {fault.rank}, must_name=True)


def check_gradients(
    play: Play,
    inputs: tuple[int, ...] | None = None,
    skipped: int | None = None,
) -> None:
    """Let all gradients that a step ended with be the reference's."""
    settings = getattr(play.settings, "training", play.settings)
    right = expected(settings, len(play.scheduler.processes), inputs, skipped)
    for outcome in play.outcomes:
        if outcome.grads and (what := differ(outcome.grads, right[outcome.step])):
            raise Finding(f"rank {outcome.rank}, step {outcome.step}: {what}")


def check_no_error(play: Play) -> None:
    """Let nothing be raised, logged or warned of."""
    for rank, error in play.ends.items():
        if error is not None:
            raise Finding(f"rank {rank} raised {type(error).__name__}: {error}")
    for rank, text in play.warned:
        if "Still" not in text:
            raise Finding(f"rank {rank} said {text}")


def check_errors(play: Play, culprits: set[int], *, must_name: bool) -> None:
    """Let errors be minidp's, name the culprit, and come in time.

    Args:
        play: The run.
        culprits: The ranks where something has gone wrong.
        must_name: Whether each error of another rank has to name one of them.
    """
    for outcome in play.outcomes:
        _check_time(play, outcome)
        error = outcome.error
        if error is None or _is_the_scripts(outcome):
            continue
        what = f"rank {outcome.rank}, step {outcome.step}: {_line(error)}"
        if not isinstance(error, MiniDPError):
            raise Finding(f"an error that is not minidp's: {what}")
        is_innocent = outcome.rank not in culprits
        # Who hears late is to blame no other rank, and is none to be blamed either.
        if is_innocent or play.fault.kind is Kind.HEARS_LATE:
            _check_names(play, str(error).partition("]")[2], culprits, what)
            if (
                is_innocent
                and must_name
                and not any(_names(r, str(error)) for r in culprits)
            ):
                raise Finding(f"the error does not name rank {culprits}: {what}")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _is_the_scripts(outcome: Outcome) -> bool:
    """Return whether an error comes from the script itself, or from a rank's death."""
    error = outcome.error
    if outcome.is_own and type(error) is RuntimeError:
        return True
    return isinstance(error, (InjectedError, UsersError, KeyboardInterrupt, Death))


def _names(rank: int, text: str) -> bool:
    told = text.partition("]")[2]  # behind the rank that tells it
    return re.search(rf"[Rr]ank(s|\(s\))? {rank}\b", told) is not None


def _check_names(play: Play, told: str, culprits: set[int], what: str) -> None:
    """Let an error blame no rank that has done nothing, and take no dead one to run."""
    failed = {each.rank for each in play.outcomes if each.error is not None}
    named = {int(r) for found in ABSENT.findall(told) for r in found.split(",")}
    gave_up = {r for r in failed if _has_given_up(r, told)}
    if wrong := named - culprits - gave_up:
        raise Finding(f"the error blames rank {wrong}, not {culprits}: {what}")
    is_dead = play.fault.kind in (Kind.DIES, Kind.DIES_SILENTLY)
    if is_dead and "All ranks are running" in told:
        raise Finding(f"the error takes a dead rank for one that runs: {what}")


def _has_given_up(rank: int, text: str) -> bool:
    """Return whether an error says that a rank has given up, or is gone."""
    return any(f"ank {rank} {word}" in text for word in ("gave up", "is gone"))


def _check_time(play: Play, outcome: Outcome) -> None:
    if play.scheduler.processes[outcome.rank].life is Life.KILLED:
        return
    fault = play.fault
    late = fault.seconds if fault.has_struck else 0.0
    limit = HANG_SECONDS * outcome.num_waits + SLACK_SECONDS + late
    if outcome.rank == fault.rank and late > HANG_SECONDS:
        return
    if outcome.is_own:  # without a limit
        return
    took = outcome.ended - outcome.began
    if took > limit and isinstance(outcome.error, MiniDPError):
        raise Finding(
            f"rank {outcome.rank} waited {took:.1f} s in step {outcome.step}, which is "
            f"more than {limit:.1f}"
        )
