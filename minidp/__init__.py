"""minidp: data-parallel gradient synchronisation on top of torch.distributed.

These are the public names. ``help(minidp.DataParallel)`` says more about one of them:

    DataParallel    wrap a module: drop-in for torch's DistributedDataParallel
    attach          synchronise a module without a wrapper; gives an Attachment
    swap, swapped   torch's class becomes ours, for good or inside a block
    SyncBatchNorm   batch norm over all ranks, on CPU too
    comm_hooks      ready-made comm hooks; what a hook gets is a GradBucket
    record          a Recording of steps: is communication hidden behind the backward?
    watch_speed     name the rank that slows the others down, while training goes on
    Recorder        gets each Event of a backward, at which Moment it was
    doctor          what is wrong with this machine, job, model, loader, script?
    MiniDPError     what every error here is; in alphabetical order:
                    CollectiveError, CommHookError, DoubleStepError, GradientError,
                    GraphChangedError, ItemCountError, LogicalRankError,
                    MarkedTwiceError, NativeError, NonFiniteGradientError,
                    ReducerFailedError, ReplicaMismatchError, ShardedStepError,
                    UnavailableError, UnfinishedReductionError,
                    UnsyncedGradientsError

These are its parts, from what a user starts down to what everybody stands on. The
``__init__.py`` of a folder says what it is for and in which order to read it:

    tune            minidp tune: a file with the best bucket layout
    run/            minidp run: an unmodified script, on minidp
    doctor/         minidp doctor: what is wrong with this machine, job, model, script?
    swapping        minidp.swap(): torch's class becomes ours, under all its names
    speed/          minidp.watch_speed(model): the slow rank by name
    recording       minidp.record(model): record steps of training
    report          minidp report: recorded steps in words
    attachment      minidp.attach(model): without a wrapper
    torchft/        replicas die and come back: on torchft's manager (an extra)
    data_parallel/  the nn.Module: forward, no_sync, join, reset; wires what is below
    torch_compat/   torch's private names, for third parties
    autotune/       bucket_cap_mb="auto": layouts are tried out
    overlap/        recorded steps: what is hidden behind the backward, and what is not
    sharded/        each rank steps its share of the parameters
    guard/          no optimizer applies gradients that differ between ranks
    hang/           which rank is missing, and where it was last seen
    logical/        the same bits on any number of ranks, by logical ranks
    replica/        replicas start equal and stay equal
    sync_batchnorm  batch norm over all ranks, on CPU too
    core/           one gradient: hook -> bucket -> all-reduce -> .grad     READ THIS
    comm_hooks      ready-made comm hooks
    shared_memory   buckets that all ranks of one host map: no message travels
    hooks/          one comm hook of a user: what it sees, how it is called and checked
    comm/           process groups, and collectives that end in time
    costmodel       how long communication takes
    layout/         parameters -> buckets -> slots, as integers
    native/         find, build and load the optional extension in csrc/
    config/         options: validated, frozen, and from outside the script
    randomness      keep and seed every random generator
    accelerator     streams, events and names of devices other than the CPU
    console         what a person sees: print, fold lines, warn
    trace           events of a backward
    world           the clock and the threads of all that waits for other ranks
    errors          every exception

Imports only point down this list (``tests/repository/test_architecture.py``).
``minidp/README.md`` draws the house and follows one gradient through it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import comm_hooks
from ._version import __version__
from .attachment import Attachment, attach
from .data_parallel import DataParallel
from .errors import (
    CollectiveError,
    CommHookError,
    DoubleStepError,
    GradientError,
    GraphChangedError,
    ItemCountError,
    LogicalRankError,
    MarkedTwiceError,
    MiniDPError,
    NativeError,
    NonFiniteGradientError,
    ReducerFailedError,
    ReplicaMismatchError,
    ShardedStepError,
    UnavailableError,
    UnfinishedReductionError,
    UnsyncedGradientsError,
)
from .hooks import GradBucket
from .randomness import seeded
from .recording import Recording, record
from .speed import watch_speed
from .swapping import swap, swapped
from .sync_batchnorm import SyncBatchNorm
from .trace import Event, Moment, Recorder

# In the order of the API reference.
__all__ = [  # noqa: RUF022
    "DataParallel",
    "attach",
    "swap",
    "swapped",
    "SyncBatchNorm",
    "record",
    "watch_speed",
    "seeded",
    "comm_hooks",
    "Attachment",
    "GradBucket",
    "Recording",
    "Recorder",
    "Event",
    "Moment",
    "MiniDPError",
    "CollectiveError",
    "CommHookError",
    "DoubleStepError",
    "GradientError",
    "GraphChangedError",
    "ItemCountError",
    "LogicalRankError",
    "MarkedTwiceError",
    "NativeError",
    "NonFiniteGradientError",
    "ReducerFailedError",
    "ReplicaMismatchError",
    "ShardedStepError",
    "UnavailableError",
    "UnfinishedReductionError",
    "UnsyncedGradientsError",
    "__version__",
]

# Modules that are imported when somebody asks for them: training needs none of them.
_LAZY = ("doctor", "report")

if TYPE_CHECKING:  # a checker that saw __getattr__ would believe in any name
    from . import doctor as doctor
    from . import report as report
else:

    def __getattr__(name: str) -> Any:
        # Not in dir(), because without its extra torchft raises an ImportError.
        if name in (*_LAZY, "torchft"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
