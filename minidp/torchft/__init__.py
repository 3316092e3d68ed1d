"""Go on when a replica dies: ``DataParallel(manager, module)`` on torchft's manager.

Needs the extra ``minidp[torchft]``. Read `wrapper` (what a user sees), `quorum` (the
one file that knows torchft: who takes part, one backward, a repeated one), `agreement`
(the bucket layout follows the committed steps).
"""

from .wrapper import DataParallel

__all__ = ["DataParallel"]
