"""Make the replicas start equal, and check that they stay equal.

Read the files in this order. `parameters` finds the parameters of a module that take
part. `verify` checks that all ranks wrap the same module, and copies rank 0's values to
all. `drift` compares the replicas every so many steps. `standing`, `optimizers`,
`schedulers` and `scalers` compare them, and copy what is not equal, on the ways back to
training after an error; `objects` finds what belongs to an optimizer. `digest` has the
checksums, `rounding` the differences that are only rounding, `lasting` those that stay.
"""

from . import optimizers, parameters, scalers, standing, verify
from .digest import SMALL_BYTES, as_plain, digest_of, sum_of_bits
from .drift import Doubts, ReplicaCheck
from .objects import Survey
from .parameters import DETOUR, ManagedParameters, check_data, check_writable, examine
from .rounding import are_close_on_all_ranks
from .schedulers import find_schedulers

__all__ = ["DETOUR", "SMALL_BYTES", "Doubts", "ManagedParameters"]
__all__ += ["ReplicaCheck", "Survey"]
__all__ += [
    "are_close_on_all_ranks",
    "as_plain",
    "check_data",
    "check_writable",
    "digest_of",
    "examine",
    "find_schedulers",
    "optimizers",
]
__all__ += ["parameters", "scalers", "standing", "sum_of_bits", "verify"]
