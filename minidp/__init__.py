"""minidp: data-parallel gradient synchronisation on top of torch.distributed.

Read it top to bottom of a backward's life, from the face to the wire::

    L4  _compat         what third parties look for in torch's DDP
        _compiling      torch.compile: its graphs end where our buckets do
        data_parallel   the nn.Module face: forward, no_sync, reset, wiring
    L3  _arguments      the constructor's arguments, checked in torch's order
        _replicas       replicas start and stay equal: verify, broadcast
        _guard          no optimizer applies gradients that differ between ranks
        _recovery       reset(): ranks agree on what survived a failure
        _on_demand      sync_gradients(): average what .grad holds now
        _reducer        "gradient i is ready" -> launched buckets -> finished backward
        _pipeline       the buckets, launched and awaited in index order
        _expectation    which gradients a backward must bring: one class per mode
    L2  _dense_bucket   a flat buffer: copy in, copy out, gradients as views
        _sparse_bucket  a COO gradient that travels as it is
        _bucket         what they share: lifecycle, launch, wait
        _autograd       grad hooks, final callback, graph walk
        _compiled_backward  what compiled autograd cannot, and says
        _countdown      one backward: opened, counted down, paused, closed
        _arrivals       what has arrived: all that grad hooks touch
        _watch          a failed collective gets rank, place and remedy
        _used_map       which parameters were used on any rank
        _collectives    the only caller of torch.distributed
    L1  _layout         parameters -> buckets -> slots, as integers
        _ops            flatten and unflatten: the arithmetic
        _streams        CUDA streams that wrote a bucket's gradients
        _untraced       what dynamo must run as it is
        _ledger         what was announced, reduced, or only added locally
        _phase          lifecycle of a reducer: enum and transition table
        trace           events of a backward
        native/         find, build and load the optional extension in csrc/
    L0  config          options, validated and frozen
        errors          every exception

Imports only point down (``tests/unit/test_architecture.py`` holds the table).
"""

from ._compat import DataParallel
from .errors import (
    CollectiveError,
    GradientError,
    GraphChangedError,
    MarkedTwiceError,
    MiniDPError,
    NativeError,
    ReducerFailedError,
    ReplicaMismatchError,
    UnfinishedReductionError,
    UnsyncedGradientsError,
)
from .trace import Event, Moment, Recorder

__all__ = [
    "CollectiveError",
    "DataParallel",
    "Event",
    "GradientError",
    "GraphChangedError",
    "MarkedTwiceError",
    "MiniDPError",
    "Moment",
    "NativeError",
    "Recorder",
    "ReducerFailedError",
    "ReplicaMismatchError",
    "UnfinishedReductionError",
    "UnsyncedGradientsError",
]
