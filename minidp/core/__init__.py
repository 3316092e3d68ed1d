"""Follow one gradient from its autograd hook through an all-reduce to ``.grad``.

Each file imports only from files above it in this list, so that nothing in it is new.
Those of the path are marked by a star, and the last one is the plot: who is in a hurry
reads `reducer` first, and the others from the end. Before them come the forward in
`minidp.data_parallel`, which arms the reducer, and `minidp.layout`, which assigns
parameters to buckets::

    autograd         questions to the engine; keep our code out of compiled graphs
    ledger           count forwards, backwards and steps
    incomplete       that a step has applied what an aborted all-reduce had left
    observer         what features see of a reduction; most live in other rooms
    exchange         a small sum over the ranks, beside those of the buckets
    item_numbers     numbers of items, as users give them
    item_mistakes    which of them give no mean, and what to do
    item_counts      averages over items, not over ranks: an observer that lives here
    grad_store       gradients that a backward keeps elsewhere than in ``.grad``
    entries        * what is recorded of each gradient
    kernels        * the arithmetic of copies; which memory is the bucket's
    averaging      * by what to divide; the comm hook; item counts; shared memory
    bucket         * the steps of a bucket: flatten, launch, wait, copy out
    dense_bucket   * copy gradients into one flat buffer and back; gradients as views
    sparse_bucket    a bucket of one sparse gradient
    used_map         which parameters some rank used (find_unused_parameters)
    nonfinite        NaN and infinity in a bucket (check_finite_grads)
    bucket_queue   * launch full buckets in index order, finish them
    grad_hooks     * receive each gradient from autograd; which ones have arrived
    phase          * phases of a reducer
    local_backwards  when a backward that reduces nothing begins and ends
    modes          * which gradients a backward must bring: one class per mode
    rebuild          the layout that follows rank 0's ready order
    reducer        * arm, open, launch full buckets, finish

From there the collectives are in `minidp.comm`. When the averages are in ``.grad``,
`minidp.guard` checks each optimizer step.
"""

from .autograd import (
    NO_TASK,
    any_reached,
    copied_outputs,
    current_task,
    find_tensors,
    is_exporting,
    is_rpc_up,
    probe_outputs,
    reachable_nodes,
    returned_to_caller,
    untraced,
    untraced_itself,
    without_user_modes,
    zeros_for,
)
from .averaging import Averaging
from .bucket import Bucket, BucketState, Slots, traced
from .bucket_queue import BucketQueue
from .dense_bucket import DenseBucket
from .exchange import Exchange
from .grad_hooks import GradHook, GradHooks
from .grad_store import GradStore
from .item_counts import ItemCounts, ItemTotals
from .item_numbers import is_known, weighted
from .kernels import add_natively, copy_each
from .ledger import Ledger
from .modes import EveryParameter, mode_for
from .observer import Observer, Observers, RecorderObserver
from .phase import Phase, PhaseMachine
from .rebuild import RebuildPolicy, decode_layout, encode_layout, layout_after
from .reducer import Reducer
from .sparse_bucket import empty_sparse

__all__ = [
    "Averaging",
    "Bucket",
    "BucketQueue",
    "BucketState",
    "EveryParameter",
    "Exchange",
    "GradHook",
]
__all__ += [
    "NO_TASK",
    "DenseBucket",
    "GradHooks",
    "GradStore",
    "ItemCounts",
    "ItemTotals",
    "Ledger",
    "Observer",
    "Observers",
    "Phase",
    "PhaseMachine",
    "RebuildPolicy",
    "RecorderObserver",
    "Reducer",
    "Slots",
]
__all__ += [
    "add_natively",
    "any_reached",
    "copied_outputs",
    "copy_each",
    "current_task",
    "decode_layout",
    "empty_sparse",
    "encode_layout",
    "find_tensors",
    "is_exporting",
    "is_known",
    "is_rpc_up",
    "layout_after",
    "mode_for",
    "probe_outputs",
    "returned_to_caller",
]
__all__ += [
    "reachable_nodes",
    "traced",
    "untraced",
    "untraced_itself",
    "weighted",
    "without_user_modes",
]
__all__ += ["zeros_for"]
