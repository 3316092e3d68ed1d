"""Stop optimizer steps that would make replicas differ.

Read `step_hooks` (called around every optimizer step), `optimizer_guard` (which they
call, and every forward), `local_acts` (what this rank has done by itself since the last
averages), `mistakes` (what is looked for, and the messages; parameters that joined the
module after wrapping), `local_updates` (by hand, or inside no_sync()), `comparison` (a
suspicion becomes an error only if the ranks differ), `asking` (in the next backward, if
they have not come before), `trust` (how often they compare), `dropped` (training goes
on, but the wrapper is gone), `partial_steps` (of the parameters of one bucket).
"""

from .mistakes import is_in_step, is_nested, num_running, refuse_forward
from .optimizer_guard import Guard
from .partial_steps import check_partial, step_on
from .step_hooks import is_averaged, needs_closure

__all__ = [
    "Guard",
    "check_partial",
    "is_averaged",
    "is_in_step",
    "is_nested",
    "needs_closure",
    "num_running",
    "refuse_forward",
    "step_on",
]
