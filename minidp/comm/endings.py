"""Let a process leave a group whose collectives still run, and end without an abort.

On a device that is not enough: streams wait for such a collective, and all that is
queued on them. There `abort` ends it.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable

from minidp import world

from .groups import ProcessGroup, groups_beside
from .work import Work

EXIT_SECONDS = 2.0
SETTLE_SECONDS = 0.05  # ten times the interpreter's switch interval

_left_behind: world.PerProcess[list[Work]] = world.PerProcess(list)
# Groups of works that had not ended. Python frees this list at exit, but not them.
_leaked: world.PerProcess[list[tuple[ProcessGroup, list[Work]]]] = world.PerProcess(
    list
)


def keep_for_good(group: ProcessGroup, in_flight: Iterable[Work]) -> None:
    """Leak a group until the process ends, if some of its works still run.

    The groups beside it (`groups_beside`) are leaked as well, because they may run some
    of these works.

    Who frees a Gloo group waits for its works, until their timeout of perhaps 30
    minutes, and that holds for the exit of the process, too. A leaked group delays the
    exit by 2 s at most. Nothing is waited for here.

    Args:
        group: The group.
        in_flight: Its works, which are kept alive as well. Those in shared memory do
            not count, because no group waits for them.
    """
    works = [work for work in in_flight if getattr(work, "is_left_behind", True)]
    endless = [work for work in works if not work.is_completed()]
    if not endless:
        return
    for each in (group, *groups_beside().get(group, {}).values()):
        world.keep_for_good(each)
        _leaked().append((each, endless))
    call_once_at_exit(_wait_for_left_behind)
    # Works hold buckets: drop those that have ended since.
    left = _left_behind()
    left[:] = [work for work in left if not work.is_completed()]
    left.extend(endless)


def abort(group: ProcessGroup) -> bool:
    """End all collectives of a group, whether they are complete or not.

    The device goes on with what is queued behind them. The group cannot be used again.
    This may wait for the device.

    Returns:
        Whether each of its backends could do it. All of them have been asked.
    """
    is_done = True
    for device in group._device_types:
        try:
            group._get_backend(device).abort()
        except RuntimeError:  # a backend without this method
            is_done = False
    return is_done


def free_left_behind() -> None:
    """Let go of leaked groups whose works have ended.

    Most of them end when other ranks free their own groups.
    """
    leaked = _leaked()
    for row in list(leaked):
        if all(work.is_completed() for work in row[1]):
            leaked.remove(row)
            world.let_go(row[0])


def call_once_at_exit(function: Callable[[], None]) -> None:
    """Let a function run once at exit, before those that were registered earlier."""
    atexit.unregister(function)
    atexit.register(function)


def settle() -> None:
    """Sleep 0.05 s at exit, so that Gloo's threads release the last collectives.

    Such a thread needs the GIL to free tensors. If it asks for that when the
    interpreter is finalizing, the process aborts: 2 of 70 short runs did, also with
    torch's DDP.
    """
    world.sleep(SETTLE_SECONDS)


def _wait_for_left_behind() -> None:
    """Wait at exit for collectives that `keep_for_good` left running, for 2 s at most.

    They fail when other ranks end. If Python is finalizing at that time, the process
    aborts.
    """
    deadline = world.now() + EXIT_SECONDS
    while not all(work.is_completed() for work in _left_behind()):
        if world.now() > deadline:
            break
        world.sleep(SETTLE_SECONDS)
