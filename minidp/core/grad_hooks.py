"""Receive each gradient from the autograd engine, and record which have arrived.

`GradTable` is the storage: one entry per parameter, one counter per bucket. The usual
grad hook writes it directly, and knows one state: where the entry is UNSET, it records
the gradient. At any other it first asks the reducer (`Reducer.admit`). Outside of a
synchronised backward every entry is CLOSED. So the reducer hears of the first gradient
of a backward, which opens it, and of each gradient of a local backward. `PendingGrads`
opens and closes a backward, pauses one that another backward will complete, and records
what needs more than an entry::

    hook of a small gradient    entry, ready order, count
    hook of a large gradient    PendingGrads.mark_ready: copy (BucketQueue.copy_now),
                                entry, ready order, count
    reducer (VIA_REDUCER)       tell observers, and the same
    the bucket's last one       PendingGrads.mark_bucket_ready, from each of them

Index ``i`` is a parameter, ``k`` a slot in a bucket, ``number`` a bucket.

A grad hook sits on the parameter's AccumulateGrad *node*, as that of torch's reducer
does, so it runs after the tensor hooks of the user and after all post-accumulate hooks.
Somebody must hold the node, or it is freed together with its hooks. Its Python hooks
share one ordered dict, and a native hook runs before them. If others have hooks on the
node, too, these might change what we read later, so that gradient is copied at once.

The GIL serialises hooks on several threads; the native table has a lock. The lists are
refilled and never replaced, because hooks keep references to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from minidp import native
from minidp.accelerator import current_stream, has_streams, use_here

from .autograd import untraced
from .bucket import Bucket
from .bucket_queue import BucketQueue
from .entries import Entry, GradState, has_arrived, is_copied_at_once

GradHook = Callable[[int, Any, Any], None]  # index, grad_inputs, grad_outputs


class Owner(Protocol):
    """What the hooks know of the reducer, to which they must not hold a reference."""

    queue: BucketQueue
    pending: PendingGrads

    def admit(self, i: int) -> bool:
        """Return whether the hook of parameter ``i`` shall record its gradient."""

    def on_bucket_ready(self, number: int, entries: Sequence[Entry]) -> None:
        """Flatten and launch bucket ``number``, whose gradients are all there."""


def _small_hook(params: Sequence[Tensor], pending: PendingGrads) -> GradHook:
    """Return the hook that records a small gradient, which is the hot path.

    It copies nothing. After the last gradient of a bucket it calls
    `PendingGrads.mark_bucket_ready`.

    To save time, names are bound beforehand instead of being looked up as attributes,
    and all parameters share one function, which is bound to their index, because a
    closure for each would miss the CPU cache.
    """
    entries, bucket_of, num_left = pending.entries, pending.bucket_of, pending.num_left
    note_ready, reducer = pending.ready.append, pending.reducer
    unset = GradState.UNSET

    @untraced
    def grad_hook(i: int, _grad_inputs: Any, _grad_outputs: Any) -> None:
        if entries[i] is not unset and not _admits(reducer, i):
            return
        entries[i] = params[i].grad
        note_ready(i)
        number = bucket_of[i]
        num_left[number] = left = num_left[number] - 1  # no call: no thread switch
        if not left:
            pending.mark_bucket_ready(number)

    return grad_hook


def _large_hook(pending: PendingGrads) -> GradHook:
    """Return the hook that copies a large gradient at once, while it is cached."""
    entries, reducer, unset = pending.entries, pending.reducer, GradState.UNSET

    @untraced
    def grad_hook(i: int, _grad_inputs: Any, _grad_outputs: Any) -> None:
        if entries[i] is unset or _admits(reducer, i):
            pending.mark_ready(i)

    return grad_hook


def _admits(reducer: Owner, i: int) -> bool:
    """Return what `Reducer.admit` answers, or False if the reducer is gone.

    A hook that runs on another thread can outlive it.
    """
    try:
        admit = reducer.admit
    except ReferenceError:
        return False
    return admit(i)


def _noting_stream(
    params: Sequence[Tensor], pending: PendingGrads, hook: GradHook
) -> GradHook:
    """Return a hook that notes its stream, and then does what ``hook`` does.

    The stream that flattens the bucket later has to wait for it.
    """
    written_on, bucket_of = pending.written_on, pending.bucket_of
    devices = [param.device for param in params]

    @untraced
    def grad_hook(i: int, grad_inputs: Any, grad_outputs: Any) -> None:
        written_on[bucket_of[i]].add(current_stream(devices[i]))
        hook(i, grad_inputs, grad_outputs)

    return grad_hook


class GradTable:
    """The entry of each parameter, and how many gradients each bucket lacks.

    The extension has a table of its own with the same methods (`native_table`).
    """

    def __init__(self, num_params: int) -> None:
        self.entries: list[Entry] = [GradState.CLOSED] * num_params
        self.ready: list[int] = []  # parameter indices, in order of arrival
        self.num_left: list[int] = []  # per bucket, how many gradients are to arrive
        self.bucket_of: list[int] = [0] * num_params
        self._members: Sequence[Sequence[int]] = ()

    def adopt(self, members: Sequence[Sequence[int]]) -> None:
        """Use other buckets, given by the parameter indices of each, and `refill`."""
        self._members = members
        for number, indices in enumerate(members):
            for i in indices:
                self.bucket_of[i] = number
        self.refill()

    def refill(self) -> None:
        """Clear the ready order, and count all gradients as missing again.

        Entries stay as they are.
        """
        self.ready.clear()
        self.num_left[:] = map(len, self._members)

    def note_ready(self, i: int) -> None:
        """Append a parameter to the ready order."""
        self.ready.append(i)

    def count_down(self, i: int) -> int:
        """Count parameter ``i`` as arrived; return how many its bucket still lacks."""
        self.num_left[self.bucket_of[i]] -= 1
        return self.num_left[self.bucket_of[i]]

    def gather(self, number: int) -> Sequence[Entry]:
        """Return the present entries of a bucket, in slot order."""
        indices = self._members[number]
        found = itemgetter(*indices)(self.entries)
        return found if len(indices) > 1 else (found,)

    def used(self) -> Iterable[int]:
        """Return the indices that arrived with a gradient, in order of arrival."""
        return [i for i in self.ready if self.entries[i] is not None]


def native_table(params: Sequence[Tensor], reducer: Owner) -> Any | None:
    """Return the extension's `GradTable`, or None if the extension is not loaded.

    It serves tensors of all devices. All of its entries are CLOSED.

    Args:
        params: The parameters.
        reducer: A weak proxy of the reducer, which the table asks (`Reducer.admit`).
    """
    library = native.library()
    if library is None:
        return None

    @untraced
    def admit(i: int) -> bool:
        if not reducer.admit(i):
            return False
        table: Any = reducer.pending.native  # a strong reference would be a cycle
        # The table belongs to the thread that opened the backward, perhaps just now:
        # its native hooks go on, those on other threads leave the gradient to Python.
        if table.is_owner():
            return True
        reducer.pending.mark_ready(i)
        return False

    on_ready = untraced(lambda number: reducer.pending.mark_bucket_ready(number))
    unset, copied = GradState.UNSET, GradState.COPIED
    table = library.GradTable(
        params, tuple(GradState), unset, copied, (on_ready, admit)
    )
    table.entries[:] = [GradState.CLOSED] * len(params)
    return table


class PendingGrads:
    """The gradients of the backward that runs: which have come, and which are to come.

    One object serves all backwards. It opens and closes a table, records gradients in
    it, and fills in missing ones.

    Args:
        params: The parameters.
        reducer: A weak proxy of the reducer, because the hooks hold this object, and
            must not keep the reducer alive.
    """

    def __init__(self, params: Sequence[Tensor], reducer: Owner) -> None:
        self.reducer = reducer
        self._params = params
        self._has_streams = any(map(has_streams, {param.device for param in params}))
        self.native = native_table(params, reducer)
        self.table: GradTable = self.native or GradTable(len(params))
        # Bound once: hooks read these for every gradient.
        self.entries = self.table.entries
        self.ready = self.table.ready
        self.bucket_of = self.table.bucket_of
        self.num_left = self.table.num_left
        self.filled: set[int] = set()  # indices that were filled in as missing
        # Indices that hooks in C++ leave to the reducer, which copies them at once.
        self.left_to_reducer: list[int] = []
        self.written_on: list[set[Any]] = []  # per bucket, streams of a device
        self._paused: list[Entry] = []  # the entries of a paused backward

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Use other buckets, also in the hooks, and let go of the memory of the old."""
        self.table.adopt([bucket.plan.indices for bucket in buckets])
        self.left_to_reducer.clear()
        for bucket in buckets if self.native is not None else ():
            self._copy_at_once(bucket)
        on_cpu: set[Any] = set()  # nobody adds to it
        self.written_on[:] = [
            on_cpu if bucket.streams is None else bucket.streams.written_on
            for bucket in buckets
        ]

    def _copy_at_once(self, bucket: Bucket) -> None:
        """Let hooks in C++ copy what of a bucket is not to wait for the rest of it."""
        slots = [(k, bucket.plan.indices[k]) for k in bucket.copied_at_once]
        if bucket.native is None:
            self.left_to_reducer += [i for _, i in slots]
            return
        for k, i in slots:
            cast("Any", self.native).copy_at_once(i, bucket.native, k)

    # -- a backward begins, ends, or is interrupted ------------------------------------

    def open(
        self, usual: GradState, special: Mapping[int, GradState], divisor: int
    ) -> None:
        """Begin a backward, in which nothing has arrived so far.

        Args:
            usual: The entry that a parameter begins with, unless ``special`` has one.
            special: The entries that differ from that, by index.
            divisor: By what C++ hooks divide the gradients that they copy.
        """
        entries = [usual] * len(self.entries)
        for i, state in special.items():
            entries[i] = state
        if self.native is not None:
            self.native.scale = 1.0 / divisor
        self.table.refill()
        self.filled.clear()
        self.entries[:] = entries

    def close(self) -> None:
        """End a backward: set all entries to CLOSED, and so let go of gradients."""
        self._paused.clear()
        self.entries[:] = [GradState.CLOSED] * len(self.entries)

    def pause(self) -> None:
        """Save all entries for `resume`, and make the next hook ask the reducer.

        The user may change or zero ``.grad`` before another backward goes on. So the
        gradients that have come are copied now, but for those that
        `DenseBucket.copy_now` cannot copy. Those of full buckets were copied before.
        """
        for i, entry in enumerate(self.entries):
            is_full = not self.num_left[self.bucket_of[i]]
            if isinstance(entry, Tensor) and not is_full:
                self.entries[i] = self.reducer.queue.copy_now(i, entry)
                if has_streams(entry.device):  # no hook has noted this one
                    self.written_on[self.bucket_of[i]].add(current_stream(entry.device))
                    use_here(entry)
        self._paused = list(self.entries)
        self.entries[:] = [
            entry if has_arrived(entry) else GradState.CLOSED for entry in self.entries
        ]

    def resume(self) -> None:
        """Go on with the entries that `pause` has saved."""
        self.entries[:] = self._paused

    # -- a gradient arrives, or does not -----------------------------------------------

    def mark_ready(self, i: int, *, is_external: bool = False) -> None:
        """Record a gradient that arrived, as the next one in ready order.

        It is copied to its bucket if possible. If that is full now, it is marked ready,
        too. A gradient that was filled in before leaves `filled`, and is neither copied
        nor counted again.

        Args:
            i: The index of the parameter.
            is_external: Whether the gradient is not in ``.grad`` (`GradStore`). Then it
                is only counted, and `reread` finds it when the bucket is full.
        """
        entry: Entry = None if is_external else self._params[i].grad
        was_missing = i in self.filled
        if isinstance(entry, Tensor) and not was_missing:
            entry = self.reducer.queue.copy_now(i, entry)
        self.table.note_ready(i)
        if was_missing:
            self.filled.discard(i)
            self.entries[i] = entry
        else:
            self._set_entry(i, entry)

    def fill_missing(
        self, i: int, *, travels: bool = True, copies: bool = False
    ) -> None:
        """Fill in a gradient that is missing. Its bucket may be ready by that.

        Args:
            i: The index of the parameter.
            travels: Whether its bucket is launched in this backward. If so, the present
                ``.grad`` travels, or zeros if that is None.
            copies: Whether to copy ``.grad`` to its bucket at once. It must be certain
                that no gradient is added to it any more, and that some rank has used
                the parameter, so that an average will take its place.
        """
        self.filled.add(i)
        entry: Entry = self._params[i].grad
        if copies and isinstance(entry, Tensor):
            entry = self.reducer.queue.copy_now(i, entry)
        if travels:
            self._set_entry(i, entry)
        else:
            self.entries[i] = None

    def _set_entry(self, i: int, entry: Entry) -> None:
        self.entries[i] = entry
        if not self.table.count_down(i):
            self.mark_bucket_ready(self.bucket_of[i])

    def collect_streams(self) -> None:
        """Note the streams of C++ hooks, as those of Python note theirs."""
        if self.native is not None and self._has_streams:
            for number, streams in enumerate(self.written_on):
                streams.update(self.native.take_streams(number))

    def mark_bucket_ready(self, number: int) -> None:
        """Give a ready bucket to the reducer, with the streams of C++ hooks."""
        if self.native is not None and self._has_streams:
            self.written_on[number].update(self.native.take_streams(number))
        self.reducer.on_bucket_ready(number, self.table.gather(number))

    def reread(self, indices: Sequence[int]) -> Sequence[Entry]:
        """Record again, and return, what parameters have in ``.grad`` now."""
        for i in indices:
            self.entries[i] = self._params[i].grad
        return [self.entries[i] for i in indices]

    # -- what has arrived --------------------------------------------------------------

    def missing(self) -> list[int]:
        """Return the indices that neither arrived nor were filled in."""
        return [i for i, entry in enumerate(self.entries) if not has_arrived(entry)]

    def used(self) -> set[int]:
        """Return the indices that arrived with a gradient, without those filled in."""
        return set(self.table.used())


class GradHooks:
    """The hooks of all parameters, which are attached to their AccumulateGrad nodes.

    The constructor attaches them.

    Args:
        params: The parameters.
        pending: Where the hooks record what has arrived.
        as_view: Whether ``.grad`` becomes a view of its bucket.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        pending: PendingGrads,
        *,
        as_view: bool,
    ) -> None:
        self._params = params = tuple(params)
        with torch.enable_grad():
            self.nodes = [get_gradient_edge(param).node for param in params]
        self._handles: list[RemovableHandle] = []
        self._dicts: list[dict[int, Any]] = []  # all Python hooks of each node
        self._hooks: list[GradHook] = []
        self.native_table = pending.native  # None if the hooks are in Python
        if self.native_table is not None:
            self._native_hooks = self.native_table.attach()
            return
        small, large = _small_hook(params, pending), _large_hook(pending)
        self._hooks = [
            large if is_copied_at_once(param, as_view=as_view) else small
            for param in params
        ]
        for i, param in enumerate(params):
            if has_streams(param.device):
                self._hooks[i] = _noting_stream(params, pending, self._hooks[i])
        for i, node in enumerate(self.nodes):
            handle = node.register_hook(MethodType(self._hooks[i], i))
            self._handles.append(handle)
            self._dicts.append(cast("dict[int, Any]", handle.hooks_dict_ref()))

    @property
    def places(self) -> list[tuple[dict[int, Any], int, GradHook]]:
        """Where the Python hooks are; there is none with hooks in C++.

        For each hook it has the dict of all hooks of its node, the hook's key in that,
        and the function, which is not bound to an index.
        """
        keys = [handle.id for handle in self._handles]
        return [*zip(self._dicts, keys, self._hooks, strict=False)]

    def hooked_by_others(self) -> list[int]:
        """Return the indices of parameters whose node has other hooks besides ours.

        Those might change a gradient that is recorded, but not copied yet.
        """
        if self.native_table is not None:
            return list(self._native_hooks.shared())
        if sum(map(len, self._dicts)) == len(self._dicts):  # each node has ours only
            return []
        return [i for i, on_node in enumerate(self._dicts) if len(on_node) > 1]

    def lost(self, among: Iterable[int]) -> list[int]:
        """Return which of these indices have lost their hook with its node.

        To cast or move a parameter gives it a new AccumulateGrad node, silently. Frozen
        parameters are left out.
        """
        needed = [i for i in among if self._params[i].requires_grad]
        with torch.enable_grad():
            now = {i: get_gradient_edge(self._params[i]).node for i in needed}
        return [i for i, node in now.items() if node is not self.nodes[i]]

    def remove(self) -> None:
        """Remove the hooks from all nodes, and free the nodes.

        A second call does nothing.
        """
        if self.native_table is not None:
            self._native_hooks.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._dicts.clear()
        self.nodes.clear()
