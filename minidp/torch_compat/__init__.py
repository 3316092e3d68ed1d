"""Private names of torch's DDP that third parties use; skip this room at first.

Read `names` (`with_torchs_names` puts them on `minidp.DataParallel`), `reducer`
(``ddp.reducer``), `logging_data` (``_get_ddp_logging_data()``), `dynamo_split`
(torch.compile). Nothing here imports the wrapper, because the wrapper imports this.
"""

from .dynamo_split import run_splitting
from .logging_data import LoggingData, LogsUnused, logs_unused
from .names import adopt_planted_optimizers, with_torchs_names
from .reducer import ReducerNames

__all__ = ["LoggingData", "LogsUnused", "ReducerNames", "adopt_planted_optimizers"]
__all__ += ["logs_unused", "run_splitting", "with_torchs_names"]
