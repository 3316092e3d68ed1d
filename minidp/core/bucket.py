"""Copy the gradients of one bucket into a payload, reduce it, and copy them out.

::

    entries --flatten--> payload --launch--> all ranks --wait--> payload
                                                  .grad <--copy_out---'

    FILLING -----------> FULL -------------> IN_FLIGHT ------------> REDUCED
       '--------------------------------------------------------------------'

`Bucket` has these steps, their states and their events. What moves the numbers is in
the subclasses: `DenseBucket` (a flat buffer) and `SparseBucket` (a sparse gradient).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial, wraps
from itertools import pairwise
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from minidp import accelerator, comm
from minidp.config import ReducerConfig
from minidp.errors import InternalError
from minidp.hooks import GradBucket
from minidp.layout import BucketPlan
from minidp.shared_memory import SharedBuffer
from minidp.trace import Moment, is_profiling, label

from .averaging import Averaging, DivideFactors
from .entries import Entry
from .observer import Observers


class BucketState(Enum):
    """Where a bucket is between its first gradient and its averages."""

    FILLING = "filling"  # gradients are to come
    FULL = "full"  # flattened; the buckets before it are to be launched first
    IN_FLIGHT = "in flight"  # its launch has begun; `work` is None if that raised
    REDUCED = "reduced"  # averages are in the payload, not yet in ``.grad``
    __hash__ = object.__hash__  # Enum's is a Python function: slow


Method = TypeVar("Method", bound=Callable[..., Any])
Entries = Sequence[Entry]  # per slot
Slots = Collection[int]  # numbers of slots in a bucket
_FOLLOWING = dict(pairwise([*BucketState, BucketState.FILLING]))


class _Traceable(Protocol):
    """What has methods that are `traced`."""

    observers: Observers
    plan: BucketPlan


def traced(
    doing: str, *, before: Moment | None = None, after: Moment | None = None
) -> Callable[[Method], Method]:
    """Decorate a method that does one of the steps of a bucket.

    Its object has the ``observers``, and the ``plan`` of the bucket. Each call has a
    `label` in torch.profiler. Observers with `sees_times` get one event ``before`` the
    call, and another one ``after`` it, unless it raises.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def with_events(self: _Traceable, *args: Any, **options: Any) -> Any:
            if not (self.observers.is_timed or is_profiling()):
                return method(self, *args, **options)
            if before is not None:
                self.observers.on_bucket_event(before, self.plan.number)
            with label(doing, self.plan.number):
                result = method(self, *args, **options)
            if after is not None:
                self.observers.on_bucket_event(after, self.plan.number)
            return result

        return cast("Method", with_events)

    return decorate


class Bucket(ABC):
    """The base class of buckets: gradients that one collective reduces."""

    payload: Tensor  # what is reduced: the flat buffer, or the sparse gradient

    def __init__(
        self,
        plan: BucketPlan,
        params: Mapping[str, torch.nn.Parameter],
        communicator: comm.Communicator,
        config: ReducerConfig,
        observers: Observers,
    ) -> None:
        self.plan = plan
        self.params = tuple(params.values())
        self.names = tuple(params)
        self.position = {i: k for k, i in enumerate(plan.indices)}
        self.views: list[Tensor] = []  # one per slot; none if sparse
        self.native: Any | None = None  # the extension's copies, where it has them
        # With hooks in C++: the slots that are copied as soon as their gradient comes.
        # The hook does it or, if `native` is None, the reducer (`left_to_reducer` in
        # `PendingGrads`).
        self.copied_at_once: list[int] = []
        self.state = BucketState.FILLING
        has_streams = accelerator.has_streams(plan.device)
        self.streams = accelerator.BucketStreams(plan.device) if has_streams else None
        self.communicator = communicator
        self.config = config
        self.observers = observers
        self.work: comm.Work | None = None  # the collective in flight
        self.shared: SharedBuffer | None = None  # the buffer, if all ranks map it
        # What averages are multiplied by, once: by the work, the extension or
        # `_rescale`. Each backward sets it anew (`Averaging.scale`).
        self.scale: float | Tensor = 1.0

    def copy_now(self, k: int, grad: Tensor, divisor: int) -> Entry:
        """Copy a gradient to slot ``k`` and return COPIED, or return it for later.

        The base class never copies.
        """
        return grad

    @traced("flatten", before=Moment.FULL)
    def flatten(
        self, entries: Entries, factors: DivideFactors, filled: Collection[int] = ()
    ) -> None:
        """Bring every gradient into the payload, divided, and enter FULL.

        The event `Moment.FULL`, which is older than the words of this project, comes
        before it: the bucket is ready then. The state FULL says that the payload is
        complete, too.

        On a device the current stream waits for those that have written the gradients.

        Args:
            entries: For each slot a gradient, None (which contributes zeros) or COPIED.
            factors: By what to divide.
            filled: The indices of parameters, of other buckets too, that have not come.
                They may be unused on all ranks; so if their ``.grad`` lies in the
                buffer, its values are saved for `copy_out`.

        Raises:
            GradientError: A gradient does not fit by dtype, layout, shape or device.
        """
        if self.streams is not None:
            self.streams.gather(entries)
        undecided: Slots = ()
        if filled:
            undecided = {self.position[i] for i in filled if i in self.position}
        self.copy_in(entries, factors, undecided)
        self._advance(BucketState.FULL)

    @abstractmethod
    def copy_in(
        self, entries: Entries, factors: DivideFactors, undecided: Slots = ()
    ) -> None:
        """Copy a full bucket's gradients to the payload, and divide them.

        Args:
            entries: As in `flatten`.
            factors: By what to divide.
            undecided: Slots whose ``.grad`` may have to stay. If it lies in the buffer,
                its values are saved.
        """

    # The event comes first: the collective may be over when this thread runs again.
    @traced("launch", before=Moment.LAUNCHED)
    def launch(self, averaging: Averaging, *, is_last: bool) -> None:
        """Start the all-reduce of the payload, or call the comm hook, without waiting.

        The bucket enters IN_FLIGHT. All ranks must launch the same buckets in the same
        order.

        Args:
            averaging: Has the comm hook, if there is one.
            is_last: Tells the hook that no bucket of this backward follows.
        """
        communicator, hook = self.communicator, averaging.active_comm_hook
        self._advance(BucketState.IN_FLIGHT)
        doing, number = "launching the all-reduce", self.plan.number
        with self.on_stream(), communicator.watching(doing, number):
            communicator.refuse_in_vain()
            if hook is not None:
                info = averaging.bucket_info(number, is_last=is_last)
                shown = GradBucket(self.plan, self.payload, self.params, info)
                self.work = hook.start(shown, self.names, communicator.rank)
            else:
                self.work = averaging.reduce(self.plan, self.payload, self.shared)
            communicator.note_started(self.work, self.plan.device)
        if self.observers.is_timed:
            done = partial(self.observers.on_bucket_event, Moment.DONE, number)
            self.work.get_future().add_done_callback(done)

    def bring_the_rest(self) -> None:  # noqa: B027 -- usual buckets have all
        """Bring to the payload of a full bucket what is not there yet.

        The bucket of a divided step leaves its owner's gradients where they are, until
        it needs them.
        """

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context on the stream that has filled the payload, if any."""
        return (
            accelerator.NO_CONTEXT if self.streams is None else self.streams.launching()
        )

    @traced("wait")
    def wait(self, doing: str) -> None:
        """Wait for `work`, copy a hook's result to the payload, and enter REDUCED.

        Raises:
            CollectiveError: It is late or has failed; the text says ``doing``.
            CommHookError: The hook's future has failed, or brings what does not fit.
        """
        assert self.work is not None
        with self.communicator.watching(doing, self.plan.number):
            result = self.communicator.wait(self.work)
        if isinstance(result, Tensor) and result is not self.payload:
            with torch.no_grad():
                self.payload.copy_(result)
        self.work = None
        self._advance(BucketState.REDUCED)

    @traced("copy out", after=Moment.COPIED_OUT)
    def copy_out(self, untouched: Slots = ()) -> None:
        """Write averages to ``.grad``, but not for ``untouched`` slots.

        With gradient views ``.grad`` becomes the view. The views of ``untouched`` slots
        get back the values that `flatten` has saved. The bucket enters FILLING.
        """
        self.write_averages(untouched)
        self._advance(BucketState.FILLING)

    @abstractmethod
    def write_averages(self, untouched: Slots) -> None:
        """Write the payload times `scale` to each ``.grad`` but the ``untouched``."""

    def let_go(self) -> None:  # noqa: B027 -- sparse: no buffer
        """Get ready to be dropped, perhaps after a backward that raised."""

    def alias_grads_to_views(self) -> None:  # noqa: B027 -- sparse: no views
        """Copy each ``.grad`` that fits to its view, and let that be the ``.grad``."""

    def _advance(self, state: BucketState) -> None:
        if _FOLLOWING[self.state] is not state:
            raise InternalError(
                f"[rank {self.communicator.rank}] bucket of {self.names[0]}: "
                f"{self.state.name} -> {state.name} is not allowed."
            )
        self.state = state
