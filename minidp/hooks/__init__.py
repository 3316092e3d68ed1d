"""One comm hook of a user: what it sees of a bucket, how it is called and checked.

Read `grad_bucket`, then `comm_hook`. Ready-made hooks are in `minidp.comm_hooks`.
"""

from .comm_hook import CommHook, Hook, HookInFlight, name_of
from .grad_bucket import BucketInfo, GradBucket

__all__ = ["BucketInfo", "CommHook", "GradBucket", "Hook", "HookInFlight", "name_of"]
