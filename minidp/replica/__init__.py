"""Make replicas start equal, and check that they stay equal.

Read `parameters` (those of a module that take part), `verify` (the same tensors on all
ranks, then rank 0's values), `drift` (compare every so many steps), `standing` and
`optimizers` (compare once, and copy, on ways back to training), `digest` (checksums).
"""

from . import optimizers, parameters, standing, verify
from .digest import sum_of_bits
from .drift import ReplicaCheck
from .parameters import DETOUR, Replica, check_data, examine

__all__ = ["DETOUR", "Replica", "ReplicaCheck", "check_data", "examine", "parameters"]
__all__ += ["optimizers", "standing", "sum_of_bits", "verify"]
