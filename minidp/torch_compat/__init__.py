"""Private names of torch's DDP that third parties use; skip this room at first.

Read `names` (`with_torchs_names` puts them on `minidp.DataParallel`), `reducer`
(``ddp.reducer``), `logging_data` (``_get_ddp_logging_data()``), `dynamo_split`
(torch.compile), `manual_finalization` (torch 2.15's ``finalize_backward()``), `fixed`
(attributes that change nothing after construction), `versions` (of torch that are
tested). Nothing here imports the wrapper, because the wrapper imports this.
"""

from .dynamo_split import refuse_python_reducer, run_splitting
from .logging_data import LoggingData, LogsUnused, logs_unused
from .names import adopt_planted_optimizers, with_torchs_names
from .reducer import ReducerNames
from .versions import note_version

__all__ = ["LoggingData", "LogsUnused", "ReducerNames", "adopt_planted_optimizers"]
__all__ += ["logs_unused", "note_version", "refuse_python_reducer", "run_splitting"]
__all__ += ["with_torchs_names"]
