"""Go on when a replica dies: ``DataParallel(manager, module)`` on torchft's manager.

This needs the extra ``minidp[torchft]``. Read `wrapper` first, which is what a user
sees. `quorum` is the only file that knows torchft: who takes part, and how a backward
is summed over these replicas, a second time if one dies. `agreement` lets the bucket
layout follow the committed steps, `history` notices replicas that went on without each
other, and `logical` lets logical ranks survive replicas.
"""

from .wrapper import DataParallel

__all__ = ["DataParallel"]
