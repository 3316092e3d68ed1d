"""``python -m tests.support.sim`` builds the device, or says why it cannot be built.

With a path, it compiles into that file: what a build does in a process of its own.
"""

import sys
from pathlib import Path

from tests.support.sim.building import NotBuilt, build, compile_to

if len(sys.argv) > 1:
    compile_to(Path(sys.argv[1]))
else:
    try:
        build()
    except NotBuilt as error:
        print(f"tests/accelerator will be skipped: {error}")
