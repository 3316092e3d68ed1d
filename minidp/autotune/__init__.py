"""Search the fastest bucket layout in the first steps (``bucket_cap_mb="auto"``).

Read `trials` (which layouts to try, and which one stays), then `tuner` (measures a
reducer's steps and changes its layout).
"""

from .trials import NUM_TRIALS, Choice
from .tuner import STEPS, AutotunePolicy

__all__ = ["NUM_TRIALS", "STEPS", "AutotunePolicy", "Choice"]
