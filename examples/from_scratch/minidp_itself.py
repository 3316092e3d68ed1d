"""After the last stage: the same training, comparison and recording with minidp.

    python examples/from_scratch/minidp_itself.py

The README says which file of minidp does what the stages do.
"""

from typing import Any

import minidp
from common import run


def record(model: minidp.DataParallel, _optimizer: object) -> Any:
    """Let minidp record: its all-reduces do not pass through `dist.all_reduce`."""
    return minidp.record(model)


if __name__ == "__main__":
    run(minidp.DataParallel, recorder=record)
