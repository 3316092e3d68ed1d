"""Process groups, and collectives with a time limit.

Each file imports only from files above it in this list::

    work            waits for a collective in flight; marks a thread that waits
    groups          which group, and who is in it
    backends        what carries its messages
    stores          values that ranks exchange through torch's key-value store
    endings         leave a group whose collectives still run; end the process
    side_groups     more groups over the same ranks, for one purpose each
    collectives     c10d's collectives, as we call them
    replacements    a group in place of one that failed
    communicator    a group, its time limit, errors that name missing ranks
"""

from .backends import (
    backend_name,
    exchange_device,
    group_timeout,
    is_builtin,
    is_plain_gloo,
    streams_wait,
)
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
    start_exchange,
    start_gathering,
    start_scatter,
    start_sharing,
    start_spreading,
    wait_for_message,
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
from .endings import abort, keep_for_good
from .groups import (
    ProcessGroup,
    default_first_bucket_bytes,
    default_group,
    group_name,
    group_ranks,
    is_initialized,
    joined_group,
    lifetime_of_default_group,
)
from .replacements import free_replaced, fresh_group, note_replaced
from .side_groups import (
    connect_both_ways,
    group_of_agreements,
    group_of_forwards,
    renew_side_groups,
    side_group,
    way_of_hosts,
)
from .stores import (
    address_of,
    gather_json,
    group_store,
    has_store,
    launcher_store,
    mark_group,
    own_store,
    post_json,
    read_json,
    warn_without_store,
)
from .work import (
    FutureWork,
    HostWork,
    NoWork,
    Work,
    is_done_within,
    is_python_group,
    is_waiting,
    then,
    wait_for,
    waiting,
)

__all__ = [
    "MESSAGE_BYTES",
    "STORE_SECONDS",
    "Communicator",
    "FutureWork",
    "HostWork",
    "InFlight",
    "NoWork",
    "PeerMonitor",
    "PeerReport",
    "ProcessGroup",
    "Question",
    "Work",
    "abort",
    "address_of",
    "all_reduce",
    "answerers",
    "backend_name",
    "barrier",
    "broadcast_coalesced",
    "broadcast_integers",
    "connect_both_ways",
    "default_first_bucket_bytes",
    "default_group",
    "exchange_device",
    "free_replaced",
    "fresh_group",
    "gather_bytes",
    "gather_integers",
    "gather_json",
    "gather_rows",
    "group_name",
    "group_of_agreements",
    "group_of_forwards",
    "group_ranks",
    "group_store",
    "group_timeout",
    "has_store",
    "is_builtin",
    "is_done_within",
    "is_initialized",
    "is_plain_gloo",
    "is_python_group",
    "is_waiting",
    "joined_group",
    "keep_for_good",
    "launcher_store",
    "lifetime_of_default_group",
    "mark_group",
    "note_replaced",
    "own_store",
    "post_json",
    "read_json",
    "renew_side_groups",
    "side_group",
    "start_broadcast",
    "start_exchange",
    "start_gathering",
    "start_scatter",
    "start_sharing",
    "start_spreading",
    "streams_wait",
    "then",
    "wait_for",
    "wait_for_message",
    "waiting",
    "warn_without_store",
    "way_of_hosts",
]
