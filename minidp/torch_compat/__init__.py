"""Private names of torch's DDP that third parties use; skip this room at first.

Read `names` (the class that is `minidp.DataParallel`), `reducer` (``ddp.reducer``),
`logging_data` (``_get_ddp_logging_data()``), `dynamo_split` (torch.compile).
"""

from .names import DataParallel

__all__ = ["DataParallel"]
