"""Predict how long communication takes, for the auto search and the forecasts.

Read `network` (latency and bandwidth, fitted to measured collectives), then `schedule`
(when the buckets of a layout are reduced, and the layout that is reduced first).
"""

from .network import Network, fit_network, messages_of
from .schedule import (
    Backward,
    best_groups,
    capped_groups,
    in_ready_order,
    lower_bound,
    play,
)

__all__ = ["Backward", "Network", "best_groups", "capped_groups", "fit_network"]
__all__ += ["in_ready_order", "lower_bound", "messages_of", "play"]
