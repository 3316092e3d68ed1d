"""Train with the same bits on any number of ranks, by logical ranks.

Read `tree` (in which order gradients are added up), `partial_sums` (what a rank adds up
by itself), `averaging` and `sparse_sums` (how the rest travels), `start` (from what
each logical rank begins), `loop` (their turns, and mistakes in them), `options`.
"""

from .loop import LogicalRanks
from .options import LogicalOptions, conditions, read

__all__ = ["LogicalOptions", "LogicalRanks", "conditions", "read"]
