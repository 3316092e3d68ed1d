"""minidp: data-parallel gradient synchronisation on top of torch.distributed.

Read it top to bottom of a backward's life, from the face to the wire::

    L4  data_parallel   the nn.Module face: forward, no_sync, reset, wiring
    L3  _arguments      the constructor's arguments, checked in torch's order
        _replicas       replicas start and stay equal: verify, broadcast
        _guard          no optimizer applies gradients that differ between ranks
        _recovery       reset(): ranks agree on what survived a failure
        _reducer        "gradient i is ready" -> launched buckets -> finished backward
    L2  _bucket         one bucket: memory, copy in, launch, wait, copy out
        _autograd       grad hooks, final callback, graph walk
        _countdown      what has arrived: the state that grad hooks touch
        _expectation    which gradients a backward must bring: one class per mode
        _used_map       which parameters were used on any rank
        _collectives    the only caller of torch.distributed
    L1  _layout         parameters -> buckets -> slots, as integers
        _ops            flatten and unflatten: the arithmetic
        _streams        CUDA streams that wrote a bucket's gradients
        _phase          lifecycle of a reducer: enum and transition table
        trace           events of a backward
    L0  config          options, validated and frozen
        errors          every exception

Imports only point down (``tests/unit/test_architecture.py`` holds the table).
"""

from .data_parallel import DataParallel
from .errors import (
    CollectiveError,
    GradientError,
    GraphChangedError,
    MarkedTwiceError,
    MiniDPError,
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
    "Recorder",
    "ReducerFailedError",
    "ReplicaMismatchError",
    "UnfinishedReductionError",
    "UnsyncedGradientsError",
]
