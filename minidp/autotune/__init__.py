"""Search the fastest bucket layout in the first steps (``bucket_cap_mb="auto"``).

Read `trials` first, which is what layouts to try, and which one stays. Then read
`tuner`, which measures the steps of a reducer and changes its layout.
"""

from .trials import NUM_TRIALS, Choice
from .tuner import STEPS, AutotunePolicy

__all__ = ["NUM_TRIALS", "STEPS", "AutotunePolicy", "Choice"]
