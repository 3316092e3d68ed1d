"""Name the rank that slows the others down, while training goes on.

Read `watch` (what one rank measures and posts), `judge` (which rank is slow, on rank
0).

All ranks end a step at the same time, because gradients are averaged: the duration of a
step names nobody. So each rank divides its steps into phases::

    rank 0   |data|forward|backward|waiting......|optimizer|
    rank 1   |data|forward|backward..........|w..|optimizer|    slow in its backward

and posts them to the process group's store, from the watchdog's thread.
"""

from .watch import SpeedWatch, watch_speed

__all__ = ["SpeedWatch", "watch_speed"]
