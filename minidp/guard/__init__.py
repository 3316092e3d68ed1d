"""Stop optimizer steps that would make replicas differ.

Read `optimizer_guard` (called before every optimizer step and every forward),
`mistakes` (an ordered list of checks, each with its message; parameters that joined the
module after wrapping), `local_updates` (by hand, or inside no_sync()),
`dropped` (training goes on, but the wrapper is gone).
"""

from .mistakes import refuse_forward
from .optimizer_guard import Guard, is_averaged

__all__ = ["Guard", "is_averaged", "refuse_forward"]
