"""Make replicas start equal, and check that they stay equal.

Read `parameters` (those of a module that take part), `verify` (the same tensors on all
ranks, then rank 0's values), `drift` (compare every so many steps), `digest`
(checksums).
"""

from . import parameters, verify
from .digest import sum_of_bits
from .drift import ReplicaCheck
from .parameters import DETOUR, Replica, check_data, check_writable, examine

__all__ = ["DETOUR", "Replica", "ReplicaCheck", "check_data", "check_writable"]
__all__ += ["examine", "parameters", "sum_of_bits", "verify"]
