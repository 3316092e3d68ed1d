"""Process groups, and collectives with a time limit.

Read `groups` (process groups; values that ranks exchange through a key-value store),
`work` (waits with a limit), `collectives` (c10d's, as we call them), `communicator` (a
group, its time limit, errors that name missing ranks), `grad_bucket` and `hook` (comm
hooks), `shared_memory` (no messages).
"""

from .collectives import (
    MESSAGE_BYTES,
    all_reduce,
    barrier,
    broadcast_coalesced,
    broadcast_integers,
    gather_bytes,
    gather_integers,
    gather_rows,
    start_broadcast,
    start_gathering,
)
from .communicator import (
    STORE_SECONDS,
    Communicator,
    InFlight,
    PeerMonitor,
    PeerReport,
    Question,
    answerers,
)
from .grad_bucket import GradBucket, Turn
from .groups import (
    ProcessGroup,
    address_of,
    backend_name,
    default_first_bucket_bytes,
    default_group,
    die_with_parent,
    exchange_device,
    free_replaced,
    fresh_group,
    gather_json,
    group_name,
    group_of_forwards,
    group_ranks,
    group_store,
    has_store,
    is_builtin,
    is_group,
    is_initialized,
    joined_group,
    keep_for_good,
    launcher_store,
    lifetime_of_default_group,
    mark_group,
    note_replaced,
    own_store,
    post_json,
    read_json,
    renew_side_groups,
    side_group,
    warn_without_store,
)
from .hook import CommHook, Hook, name_of
from .shared_memory import SharedBuffer, SmallMessage, share, sharing_mode
from .work import FutureWork, Work, is_waiting, then, wait_for, waiting

__all__ = ["CommHook", "GradBucket", "Hook", "Turn", "name_of", "wait_for"]
__all__ += ["STORE_SECONDS", "Communicator", "FutureWork", "InFlight"]
__all__ += ["PeerMonitor", "PeerReport", "SharedBuffer", "Work", "then"]
__all__ += ["all_reduce", "barrier", "broadcast_coalesced", "broadcast_integers"]
__all__ += ["gather_bytes", "gather_integers", "gather_json", "gather_rows", "share"]
__all__ += ["SmallMessage", "is_waiting", "waiting"]
__all__ += ["backend_name", "default_first_bucket_bytes", "default_group", "group_name"]
__all__ += ["is_builtin", "is_group", "is_initialized", "sharing_mode"]
__all__ += ["exchange_device", "fresh_group", "group_of_forwards", "joined_group"]
__all__ += ["die_with_parent", "keep_for_good", "renew_side_groups", "side_group"]
__all__ += ["address_of", "group_store", "has_store", "launcher_store", "mark_group"]
__all__ += ["free_replaced", "note_replaced"]
__all__ += ["own_store", "post_json", "read_json", "start_broadcast"]
__all__ += ["Question", "answerers"]
__all__ += ["MESSAGE_BYTES", "ProcessGroup", "start_gathering"]
__all__ += ["group_ranks", "lifetime_of_default_group", "warn_without_store"]
