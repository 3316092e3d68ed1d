"""Make replicas start equal, and check that they stay equal.

Read `parameters` (those of a module that take part), `verify` (the same tensors on all
ranks, then rank 0's values), `drift` (compare every so many steps), `standing` and
`optimizers` (compare once, and copy, on ways back to training), `digest` (checksums),
`rounding` (differences that are none).
"""

from . import optimizers, parameters, standing, verify
from .digest import digest_of, sum_of_bits
from .drift import ReplicaCheck
from .parameters import DETOUR, Replica, check_data, examine
from .rounding import are_close_on_all_ranks

__all__ = ["DETOUR", "Replica", "ReplicaCheck", "check_data", "examine", "parameters"]
__all__ += ["are_close_on_all_ranks", "digest_of", "optimizers", "standing"]
__all__ += ["sum_of_bits", "verify"]
