"""minidp: data-parallel gradient synchronisation on top of torch.distributed.

Public names; ``help(minidp.DataParallel)`` and so on say more::

    DataParallel    wrap a module: drop-in for torch's DistributedDataParallel
    attach          synchronise a module without a wrapper; gives an Attachment
    swap, swapped   torch's class becomes ours, for good or inside a block
    SyncBatchNorm   batch norm over all ranks, on CPU too
    comm_hooks      ready-made comm hooks; what a hook gets is a GradBucket
    record          a Recording of steps: is communication hidden behind the backward?
    Recorder        gets each Event of a backward, at which Moment it was
    doctor          what is wrong with this machine, job, model, loader, script?
    MiniDPError     what every error here is; in alphabetical order:
                    CollectiveError, CommHookError, DoubleStepError, GradientError,
                    GraphChangedError, MarkedTwiceError, NativeError,
                    NonFiniteGradientError, ReducerFailedError, ReplicaMismatchError,
                    UnfinishedReductionError, UnsyncedGradientsError

The modules: read them top to bottom of a backward's life, from the face to the wire::

    L5  __main__        the command ``minidp``
        tune            minidp tune: a file with the best layout
        run             minidp run: an unmodified script, on minidp
        _ranks          start the ranks of a script, as torchrun does
        _phases         the same script on torch, then on minidp
        _compare        ... their weights and speed side by side
        _folder         ... and a copy of the working directory for the first
        _children       processes that a script starts are swapped as well
        _at_start/      ... by a sitecustomize that they find
        swapping        torch's class becomes ours, under all its names, for a while
        _script         run a script as python would
        recording       minidp.record(model): what a user starts and reads
        report          recorded steps in words: is communication hidden, if not, why
        _advice         one sentence: what to change, and what it gains
        _forecast       what another layout would have made of recorded steps
        _picture        recorded steps as a PNG
        _chrome_trace   recorded steps for Perfetto
        doctor/         minidp doctor: what is wrong with this machine, job, script?
    L4  data_parallel   the nn.Module face: forward, no_sync, reset, wiring
        attachment      minidp.attach(model): without a wrapper
        _compat         torch's private names, for third parties; skip it
        _compat_reducer  the same, of ``ddp.reducer``
        _compiling      torch.compile: its graphs end where our buckets do
        _logging_data   the facts behind ``_get_ddp_logging_data()``
    L3  _arguments      the constructor's arguments, checked in torch's order
        _managed        which tensors of a module take part
        _replicas       replicas start and stay equal: verify, broadcast
        _other_class    ... and ranks whose wrapper is torch's
        _shared_state   when parameters and module buffers follow one rank
        _copies         pickle, deepcopy, what checkpoints keep of buckets
        _join           uneven inputs: ranks that ran out keep the others company
        _guard          no optimizer applies gradients that differ between ranks
        _guard_words    what it says: which mistake it was
        _newcomers      parameters that joined the module after wrapping
        _by_hand        updates that no optimizer made
        _watchdog       the thread behind every post
        _post           ranks tell each other where they are
        _local_steps    steps inside no_sync(): local SGD, or a mistake?
        _skip           a backward that all ranks leave out, or this one alone?
        _recovery       reset(): ranks agree on what survived a failure
        _on_demand      reductions without a backward: sync_gradients(), shadows
        _autotune       bucket_cap_mb="auto": layouts are tried out
        _stopwatch      writes down the steps of a reducer
        _local_backwards  backwards that average nothing, for a recording
        _reducer        "gradient i is ready" -> launched buckets -> finished backward
        _pipeline       the buckets, launched and awaited in index order
        _expectation    which gradients a backward must bring: one class per mode
        _mixed_precision  compute in one dtype, reduce in another
        _desync         have the replicas drifted apart?
        _desync_words   what it says then
        _overlap        optimizer steps inside the backward
        sync_batchnorm  batch norm over all ranks, also on CPU
    L2  _averaging      how buckets are averaged: who divides, what travels how
        _dense_bucket   a flat buffer: copy in, copy out, gradients as views
        _fit            whether gradients fit their slots
        _sparse_bucket  a COO gradient that travels as it is
        _bucket         what they share: lifecycle, launch, wait
        comm_hooks      ready-made comm hooks, to be used or copied out
        _finite         NaN and infinity are named before they travel
        _comm_hook      a registered comm hook: checked, run, its mistakes named
        _grad_bucket    what a comm hook may see of a bucket
        _timing         when each grad hook was called
        _autograd       grad hooks, final callback, graph walk
        _dist_autograd  gradients that live in a context of RPC, not in ``.grad``
        _compiled_backward  what compiled autograd cannot, and says
        _countdown      one backward: opened, counted down, paused, closed
        _arrivals       what has arrived: all that grad hooks touch
        _rebuild        the layout that follows rank 0's ready order
        _used_map       which parameters were used on any rank
        _watch          collectives end in time; failures get rank and remedy
        _hang_report    who is missing, in words
        _collectives    the package's own collectives
        _line           is the host of a store still there?
        _waiting        waits that can be given up
        _groups         process groups and their stores
    L1  _layout         parameters -> buckets -> slots, as integers
        _ops            flatten and unflatten: the arithmetic
        _saved_layout   a layout as plain data, for checkpoints
        _schedule       when a layout's communication would end; the best layout
        _kinds          the same where parameters share no bucket with some others
        _tuning         which layouts to try, and which one stays
        _network        how long a collective takes, fitted to measurements
        _inputs         tensors inside a forward's inputs
        _generic        DataParallel[Net], for type checkers
        _streams        CUDA streams that wrote a bucket's gradients
        _untraced       what dynamo must run as it is
        _clock          the host's clock, or a CUDA device's
        _timeline       recorded steps, as data
        _analysis       what they say of overlap, and to the model
        _typical        which step stands for all of them
        _skew           which rank comes late; clocks of hosts
        _terminal       long lines, folded at the terminal's width
        _labels         names for the traces of torch.profiler
        _cursor         where a rank is, as data
        _ledger         what was announced, reduced, or only added locally
        _registry       objects that several threads look through
        _phase          lifecycle of a reducer: enum and transition table
        trace           events of a backward
        _console        print for a person who may stop reading
        native/         find, build and load the optional extension in csrc/
    L0  config          options, validated and frozen
        _overrides      options from outside the script, and remedies that say how
        errors          every exception
        _version        which minidp this is
        _warn           warnings point at the user's line

Imports only point down (``tests/unit/test_architecture.py`` holds the table).
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import comm_hooks
from ._compat import DataParallel
from ._grad_bucket import GradBucket
from ._version import __version__
from .attachment import Attachment, attach
from .errors import (
    CollectiveError,
    CommHookError,
    DoubleStepError,
    GradientError,
    GraphChangedError,
    MarkedTwiceError,
    MiniDPError,
    NativeError,
    NonFiniteGradientError,
    ReducerFailedError,
    ReplicaMismatchError,
    UnfinishedReductionError,
    UnsyncedGradientsError,
)
from .recording import Recording, record
from .swapping import swap, swapped
from .sync_batchnorm import SyncBatchNorm
from .trace import Event, Moment, Recorder

__all__ = [
    "Attachment",
    "CollectiveError",
    "CommHookError",
    "DataParallel",
    "DoubleStepError",
    "Event",
    "GradBucket",
    "GradientError",
    "GraphChangedError",
    "MarkedTwiceError",
    "MiniDPError",
    "Moment",
    "NativeError",
    "NonFiniteGradientError",
    "Recorder",
    "Recording",
    "ReducerFailedError",
    "ReplicaMismatchError",
    "SyncBatchNorm",
    "UnfinishedReductionError",
    "UnsyncedGradientsError",
    "__version__",
    "attach",
    "comm_hooks",
    "record",
    "swap",
    "swapped",
]

# Modules that are imported when somebody asks for them: training needs none of them.
_LAZY = ("doctor", "report")

if TYPE_CHECKING:  # a checker that saw __getattr__ would believe in any name
    from . import doctor as doctor
    from . import report as report
else:

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
