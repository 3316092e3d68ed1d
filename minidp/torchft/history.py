"""Notice replicas that have come to the same step on different ways, and end it.

torchft believes the highest step, and takes replicas of the same step for equal. They
are not if a quorum has left out a replica that lives, and both have gone on::

    step      7          8          9
              0, 1, 2 -> 0, 1    -> ...   the quorum did not wait for replica 2
                      -> 2       -> ...   and 2, once it came, found nobody

When such replicas meet at the same step, an average of their gradients would be of no
one's parameters. So each replica has a number that tells in which quorum each of its
steps was committed. Whenever the quorum has changed, the replicas compare these
numbers, in one message of 16 bytes per replica. If they differ, nobody commits this
step, and all replicas but the largest part with a common history take the state of one
of that part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from minidp.errors import explain

NEW = 1  # the number of a replica that has committed nothing
# The keys of a replica's number, and of its `own_step`, in the state that it sends.
KEY, OWN_STEP = "history", "own_step"


def after(number: int, step: int, quorum: int) -> int:
    """Return the number after one more step, which a quorum has committed.

    It has 56 bits, so that it is a positive one in a message of 64-bit integers.
    """
    text = f"{number} {step} {quorum}".encode()
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "big")


def believed(numbers: Sequence[int]) -> int:
    """Return the number that most replicas have; of several, that of the first one."""
    counts = Counter(numbers)
    return max(numbers, key=counts.__getitem__)


def warning(rank: int, step: int, replicas: Sequence[int]) -> str:
    """Return what replicas say when they find different histories.

    Args:
        rank: The rank that speaks.
        step: The step that nobody commits.
        replicas: Those that take the state of the others.
    """
    who = ", ".join(map(str, replicas))
    return explain(
        rank,
        f"Replicas came to step {step} on different ways, because a quorum had left "
        "out one that was alive.",
        expected="one history",
        found=f"another one on replica {who}, which now takes the others' state",
        remedy="let the lighthouse wait longer (join_timeout_ms, "
        "heartbeat_timeout_ms), or set min_replica_size to more than half of the "
        "replicas",
    )


class History:
    """The number of one replica, of its last committed step.

    Attributes:
        own_step: The step that comes next for this replica's state, if the manager
            takes it for the state of another step, so that it is brought up to date.
    """

    def __init__(self) -> None:
        self.own_step: int | None = None
        self._number = NEW
        self._next: tuple[int, int] | None = None  # a step, and the number after it
        self._received: object = None  # the last state that came from another replica

    def at(self, step: int) -> int:
        """Return the number of the state in which ``step`` is the next step to commit.

        Any thread may call this.
        """
        number, coming = self._number, self._next
        return coming[1] if coming is not None and step > coming[0] else number

    def begin(self, step: int, quorum: int) -> None:
        """Note in which quorum a step is tried; whether it is committed shows later."""
        self._number = self.at(step)
        self._next = step, after(self._number, step, quorum)

    def state(self, step: int) -> dict[str, Any]:
        """Return what to send with the state in which ``step`` is the next step."""
        return {KEY: self.at(step), OWN_STEP: self.own_step}

    def receive(self, state: dict[str, Any]) -> None:
        """Take over the number of the state that another replica has sent.

        The manager passes each state again when it loads it, which changes nothing.
        """
        if state is not self._received:
            self._received = state
            self._number, self._next = state.get(KEY, NEW), None
            self.own_step = state.get(OWN_STEP)
