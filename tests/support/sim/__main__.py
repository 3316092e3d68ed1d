"""``python -m tests.support.sim PATH`` builds the device into a file."""

import sys
from pathlib import Path

from tests.support.sim.building import compile_to

compile_to(Path(sys.argv[1]))
