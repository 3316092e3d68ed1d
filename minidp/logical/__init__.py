"""Train with the same bits on any number of ranks, by logical ranks.

Read `tree` (in which order gradients are added up), `partial_sums` (what a rank adds up
by itself), `averaging` (how the rest travels), `start` (from what each logical rank
begins), `loop` (their turns, and mistakes in them), `options`. Then, for the option
``audit_every``: `audit` (what ranks compute again), `digests`, `verdicts`, `inquiry`.
"""

from .audit import Audit
from .loop import LogicalRanks
from .options import AuditOptions, LogicalOptions, conditions, read

__all__ = ["Audit", "AuditOptions", "LogicalOptions", "LogicalRanks"]
__all__ += ["conditions", "read"]
