"""Private names of torch's DDP that third parties use; skip this room at first.

Read `names` (the class that is `minidp.DataParallel`), `reducer` (``ddp.reducer``),
`logging_data` (``_get_ddp_logging_data()``), `dynamo_split` (torch.compile),
`manual_finalization` (torch 2.15's ``finalize_backward()``), `fixed` (attributes that
change nothing after construction), `versions` (of torch that are tested).
"""

from .names import DataParallel

__all__ = ["DataParallel"]
