"""How buckets are averaged in one backward: who divides, when, and what travels how.

======================  =====================  ======================================
without a comm hook     each gradient divided  all-reduce (SUM) of the buffer
``batched_grad_copy``   whole buffer divided   all-reduce (SUM) of the buffer
with a comm hook        nobody divides         what the hook does
======================  =====================  ======================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from ._bucket import Bucket, Division
from ._collectives import all_reduce
from ._comm_hook import CommHook
from ._grad_bucket import GradBucket, Turn
from ._groups import is_python_group
from ._waiting import Work

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Averaging:
    """Starts the collective of a bucket.

    Args:
        group: who averages together.
        batched: divide whole buffers.
    """

    def __init__(self, group: ProcessGroup, *, batched: bool) -> None:
        self.group = group
        self.num_contributors: int | None = None  # ranks to average over; None: all
        self.comm_hook: CommHook | None = None
        self.division = Division()
        self.hook_now: CommHook | None = None  # the one of this backward
        self.doing = ""  # while the last collectives are awaited
        self._batched = batched

    @property
    def divisor(self) -> int:
        """How many ranks to average over."""
        return self.num_contributors or self.group.size()

    def begin(self) -> None:
        """A backward begins: from here on it is settled how it averages."""
        self.hook_now = self.comm_hook
        self.doing = "waiting for the all-reduce"
        if self.hook_now is not None:
            self.doing = f"waiting for the comm hook {self.hook_now.name}, call"
        if self.hook_now is not None:
            self.division = Division()
        elif self._batched:
            self.division = Division(of_buffer=self.divisor)
        else:
            self.division = Division(at_copy=self.divisor)

    @contextmanager
    def without_comm_hook(self) -> Iterator[None]:
        """Average plainly, whatever hook is registered."""
        hook, self.comm_hook = self.comm_hook, None
        try:
            yield
        finally:
            self.comm_hook = hook

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Work:
        """Start what averages a full bucket."""
        group, hook = self.group, self.hook_now
        if hook is None:
            is_alone = group.size() == 1 and not is_python_group(group)
            return bucket.launch(partial(all_reduce, group=group), is_alone=is_alone)
        turn = Turn(number, is_last, self.divisor, group)
        return bucket.launch(
            lambda payload: hook.start(
                GradBucket(bucket.plan, payload, bucket.params, turn),
                bucket.names,
                group.rank(),
            )
        )

    def move_to(self, group: ProcessGroup) -> None:
        """Average over another group; a hook whose state is the old one follows."""
        if self.comm_hook is not None and self.comm_hook.state is self.group:
            self.comm_hook.state = group
        self.group = group
