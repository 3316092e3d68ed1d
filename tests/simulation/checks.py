"""What must hold after every simulated run."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from minidp.errors import MiniDPError

from .faults import LASTING, InjectedError, Kind, UsersError
from .play import Outcome, Play
from .scheduler import Death, Finding, Life
from .training import HANG_SECONDS, differ, expected

# What a wait may take beyond its limit: to find out whether a rank comes to a meeting
# (5 s), then to ask who is missing (6 s), and a slice.
SLACK_SECONDS = 12.0
SOON_SECONDS = 5.0  # until others hear of a rank that calls reset()
ABSENT = re.compile(r"Missing: rank ([0-9, ]+)\.")
ELSEWHERE = re.compile(r"Rank (\d+) runs, but waits for other ranks elsewhere")


def is_harmless(play: Play) -> bool:
    """Return whether nothing went wrong for longer than a wait may take."""
    fault = play.fault
    is_short = fault.kind in LASTING and fault.seconds < HANG_SECONDS
    return not fault.has_struck or is_short


def check_all(play: Play, inputs: tuple[int, ...] | None = None) -> None:
    """Check gradients, errors, names and times of a training."""
    check_gradients(play, inputs)
    check_story(play)


def check_story(play: Play) -> None:
    """Check errors, names and times: nothing is said where nothing went wrong."""
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
    ranks = len(play.scheduler.processes)
    tolerance = 0.02 if settings.hook == "torchs in 16 bits" else 1e-5
    right = expected(settings, ranks, inputs, skipped)
    check_results(play, right, tolerance=tolerance)


def check_results(
    play: Play,
    right: Sequence[dict[str, torch.Tensor]],
    *,
    is_exact: bool = False,
    tolerance: float = 1e-5,
) -> None:
    """Let what ranks have kept of each step be right.

    Args:
        play: The run.
        right: What is right, by step.
        is_exact: Whether each bit counts.
        tolerance: By how much numbers may differ otherwise.
    """
    for outcome in play.outcomes:
        if outcome.grads:
            what = differ(
                outcome.grads,
                right[outcome.step],
                is_exact=is_exact,
                tolerance=tolerance,
            )
            if what:
                raise Finding(f"rank {outcome.rank}, step {outcome.step}: {what}")


def check_no_error(play: Play) -> None:
    """Let nothing be raised, logged or warned of."""
    for rank, error in play.ends.items():
        if error is not None:
            raise Finding(f"rank {rank} raised {type(error).__name__}: {error}")
    for rank, text in play.warned:
        if "Still" not in text:
            raise Finding(f"rank {rank} said {text}")


def check_recovered(play: Play, *, is_told: bool = True) -> None:
    """Let all ranks hear soon of one that calls `reset`, and come to their ends.

    Args:
        play: The run.
        is_told: Whether the rank where something has gone wrong tells it the others.
            Otherwise one has to find out, which takes as long as a wait may; when it
            raises, the rest hear of that soon.
    """
    for rank, error in play.ends.items():
        if error is not None:
            raise Finding(f"rank {rank} raised {type(error).__name__}: {error}")
    raised = [each.ended for each in play.outcomes if each.error is not None]
    for each in play.outcomes:
        told = each.began
        if not is_told:
            told = min((t for t in raised if each.began <= t), default=each.ended)
            took = each.ended - each.began
            busy = play.scheduler.busy_between(each.began, each.ended)
            if took > HANG_SECONDS + SLACK_SECONDS + play.fault.seconds + busy:
                raise Finding(f"rank {each.rank} waited {took:.1f} s")
        late = each.ended - told
        busy = play.scheduler.busy_between(told, each.ended)
        if late > SOON_SECONDS + play.fault.seconds + busy:
            raise Finding(
                f"rank {each.rank} heard of the error only after {late:.1f} s"
            )


def check_errors(
    play: Play,
    culprits: set[int],
    *,
    must_name: bool,
    limit: float = HANG_SECONDS,
    busy: float = 0.0,
    has_two_wrappers: bool = False,
) -> None:
    """Let errors be minidp's, name the culprit, and come in time.

    Args:
        play: The run.
        culprits: The ranks where something has gone wrong.
        must_name: Whether each error of another rank has to name one of them.
        limit: How many seconds a wait may take.
        busy: For how long a rank was busy beside that.
        has_two_wrappers: Whether a rank may truly wait elsewhere, in another wrapper,
            or be gone because of an error there.
    """
    for outcome in play.outcomes:
        if outcome.rank not in culprits:
            _check_time(play, outcome, limit, busy)
        error = outcome.error
        if error is None or _is_the_scripts(outcome):
            continue
        what = f"rank {outcome.rank}, step {outcome.step}: {_line(error)}"
        if not isinstance(error, MiniDPError):
            raise Finding(f"an error that is not minidp's: {what}")
        is_innocent = outcome.rank not in culprits
        told = str(error).partition("]")[2]
        elsewhere = {int(r) for r in ELSEWHERE.findall(told)}
        excused = culprits | elsewhere if has_two_wrappers else culprits
        # Who hears late is to blame no other rank, and is none to be blamed either.
        if is_innocent or play.fault.kind is Kind.HEARS_LATE:
            _check_names(play, told, excused, what)
        named = set(culprits)
        if has_two_wrappers:
            named |= {r for r in _failed(play) if f"Rank {r} is gone" in told}
        is_named = any(_names(r, str(error)) for r in named)
        if is_innocent and must_name and not is_named:
            raise Finding(f"the error does not name rank {culprits}: {what}")


def _failed(play: Play) -> set[int]:
    return {each.rank for each in play.outcomes if each.error is not None}


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
    return re.search(rf"[Rr]ank(s|\(s\))? (\d+, )*{rank}\b", told) is not None


def _check_names(play: Play, told: str, culprits: set[int], what: str) -> None:
    """Let an error blame no rank that has done nothing, and take no dead one to run."""
    told = told.partition("If the hook itself is right:")[0]  # the rest blames nobody
    named = {int(r) for found in ABSENT.findall(told) for r in found.split(",")}
    gave_up = {r for r in _failed(play) if _has_given_up(r, told)}
    if wrong := named - culprits - gave_up:
        raise Finding(f"the error blames rank {wrong}, not {culprits}: {what}")
    is_dead = play.fault.kind in (Kind.DIES, Kind.DIES_SILENTLY)
    if is_dead and "All ranks are running" in told:
        raise Finding(f"the error takes a dead rank for one that runs: {what}")


def _has_given_up(rank: int, text: str) -> bool:
    """Return whether an error says that a rank has given up, or is gone."""
    return any(f"ank {rank} {word}" in text for word in ("gave up", "is gone"))


def _check_time(play: Play, outcome: Outcome, limit: float, busy: float) -> None:
    if play.scheduler.processes[outcome.rank].life is Life.KILLED:
        return
    fault = play.fault
    late = fault.seconds if fault.has_struck else 0.0
    limit = limit * outcome.num_waits + SLACK_SECONDS + late + busy
    limit += play.scheduler.busy_between(outcome.began, outcome.ended)
    if outcome.is_own:  # without a limit
        return
    took = outcome.ended - outcome.began
    if took > limit and isinstance(outcome.error, MiniDPError):
        raise Finding(
            f"rank {outcome.rank} waited {took:.1f} s in step {outcome.step}, which is "
            f"more than {limit:.1f}"
        )
