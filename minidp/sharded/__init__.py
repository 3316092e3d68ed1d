"""Each rank steps its share of the parameters, and keeps that share of the state.

Read `known` (which optimizers can do that), `owners` (who steps what), `bucket` and
`averaging` (gradients go to their owners), `tree_averaging` (those of logical ranks),
`pieces` (large messages), `agreement` (all ranks step, or none),
`returns` (new values come back to all ranks), `awaited` (perhaps while the next forward
runs already), `shares` (what the script has done to the gradients meanwhile), `norms`
(of all gradients), `overflows` (for a ``GradScaler``), `step` (all of it together),
`early` (steps inside the backward). Then `checkpoint` (the state of an optimizer, saved
and loaded) and `distributed_checkpoint` (the same for
``torch.distributed.checkpoint``). Last `split_bucket` and `parts`: large parameters of
which each rank owns some rows; and `tiles`, so that a step finds them in the cache.
"""

from .checkpoint import check_copy, check_mark, keep_own, whole_state
from .distributed_checkpoint import OptimizerShare
from .early import EarlySteps, steps_in_backward
from .known import check as check_optimizers
from .known import is_elementwise
from .owners import Owners, balanced, rows_to_divide
from .step import ShardedStep, is_divided

__all__ = [
    "EarlySteps",
    "OptimizerShare",
    "Owners",
    "ShardedStep",
    "balanced",
    "check_copy",
    "check_mark",
    "check_optimizers",
    "is_divided",
    "is_elementwise",
    "keep_own",
    "rows_to_divide",
    "steps_in_backward",
    "whole_state",
]
