"""Stop optimizer steps that would make replicas differ.

Read `optimizer_guard` (called around every optimizer step and before every forward),
`local_acts` (what this rank has done by itself since the last averages), `mistakes`
(what is looked for, and the messages; parameters that joined the module after
wrapping), `local_updates` (by hand, or inside no_sync()), `comparison` (a suspicion
becomes an error only if the ranks differ), `dropped` (training goes on, but the wrapper
is gone).
"""

from .mistakes import refuse_forward
from .optimizer_guard import Guard, is_averaged

__all__ = ["Guard", "is_averaged", "refuse_forward"]
