"""Name the rank that slows the others down, while training goes on.

All ranks end a step at the same time, because gradients are averaged. So the duration
of a step names nobody. Each rank therefore divides its steps into phases::

    rank 0   |data|forward|backward|waiting......|optimizer|
    rank 1   |data|forward|backward..........|w..|optimizer|    slow in its backward

It posts them to the process group's store, from the watchdog's thread, and rank 0
judges.

Read `watch` first, which is what each rank measures and posts, then `judge`, which is
how rank 0 decides who is slow.
"""

from .watch import SpeedWatch, watch_speed

__all__ = ["SpeedWatch", "watch_speed"]
