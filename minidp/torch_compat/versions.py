"""Say once if this torch is not one of those that minidp is tested with."""

from __future__ import annotations

import logging
import re
from functools import cache

import torch

OLDEST, NEWEST = (2, 12), (2, 15)  # tests/versions.py tests these and all in between

logger = logging.getLogger("minidp")


@cache
def note_version(version: str = torch.__version__) -> None:
    """Log a warning, once per process, if torch is older or newer than tested.

    It is no error, because a new torch rarely breaks what minidp uses.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = tuple(map(int, found.groups())) if found else NEWEST
    if OLDEST <= release <= NEWEST:
        return
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    than = f"older than {oldest}, the oldest"
    if release > NEWEST:
        than = f"newer than {newest}, the newest"
    logger.warning(
        "torch %s is %s version that minidp is tested with. Training goes on, and "
        "should work. To be sure, compare a few steps with torch's DDP: "
        "minidp run -n 2 --compare SCRIPT",
        version,
        than,
    )
