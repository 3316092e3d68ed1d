"""Train with the same bits on any number of ranks, by logical ranks.

Read `tree` (in which order gradients are added up), `arrived` (which of them a logical
rank has brought), `partial_sums` (what a rank adds up by itself), `averaging` and
`sparse_sums` (how the rest travels), `start` (from what each logical rank begins),
`loop` (their turns, and mistakes in them), `options`. Then, for the option
``audit_every``: `audit` (what ranks compute again), `digests`, `verdicts`, `inquiry`.
Much of what is exported is for `minidp.torchft` alone, where ranks may die in a step.
"""

from .audit import Audit
from .averaging import Slices, TreeAveraging
from .loop import LogicalRanks, Round
from .options import AuditOptions, LogicalOptions, conditions, read
from .partial_sums import PartialSums
from .start import Start
from .tree import Node, block, cover

__all__ = [
    "Audit",
    "AuditOptions",
    "LogicalOptions",
    "LogicalRanks",
    "Node",
    "PartialSums",
    "Round",
    "Slices",
    "Start",
    "TreeAveraging",
    "block",
    "conditions",
    "cover",
    "read",
]
