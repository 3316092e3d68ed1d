"""The public nn.Module: builds the parts of the other rooms, and calls them.

Read `wrapper` (the constructor, forward, no_sync), `arguments` (checked in torch's
order), `parts` (what a wrapper is made of, also a copy), `replication` (broadcasts and
comparisons of parameters and module buffers), `join` (uneven inputs), `sync_gradients`,
`step_in_backward`, `sharded_step` (each rank steps its share), `items` (averages over
what ranks count), `logical_ranks` (the same bits on any number of ranks), `inputs`
(moved to the device), `agree_on_group` (the first half of ``reset()``: can the ranks
keep their process group?), `copy_state` (the second half: compare the replicas, or copy
one rank's state), `dist_autograd` (gradients over RPC).
"""

from . import arguments
from .wrapper import DataParallel

__all__ = ["DataParallel", "arguments"]
