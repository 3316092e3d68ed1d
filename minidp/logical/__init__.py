"""Train with the same bits on any number of ranks, by logical ranks.

Read `tree` (in which order gradients are added up), `partial_sums` (what a rank adds up
by itself), `averaging` (how the rest travels), `loop` (each logical rank begins from
the same state), `options`.
"""

from .loop import LogicalRanks
from .options import LogicalOptions, conditions, read

__all__ = ["LogicalOptions", "LogicalRanks", "conditions", "read"]
