"""What ``minidp run`` (or ``tune``) hands on to processes that a script starts.

Launchers start the other ranks as ``python train.py`` (Lightning, ``accelerate
launch``). Such a process inherits two environment variables: PYTHONPATH leads to a
``sitecustomize`` of ours (`_at_start`), and `RUN` says what to do once torch is there.
Not reached: ``python -I``, ``-E`` and ``-S``, and processes whose environment is made
anew. The constructor tells when it meets such a rank (`_replicas`).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ._compare import never_take_down, seed
from ._groups import die_with_parent
from ._overrides import RUN, setting
from ._script import after_wrapping
from .data_parallel import DataParallel
from .swapping import TORCHS, swap_here

START = Path(__file__).with_name("_at_start")


@dataclass(frozen=True)
class Orders:
    """What a process does that a script has started."""

    command: str  # of ours, under which the script runs
    swaps: bool  # else it is the run on torch of a comparison
    is_compared: bool = False  # it draws the same numbers each time
    wrapped: str = ""  # the file to note in that a model was wrapped


class Children:
    """What is known of the processes that were started."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note_wrapped(self) -> None:
        """A model was wrapped, in a fork of this process."""
        _note(self._path)

    @property
    def have_wrapped(self) -> bool:
        """Whether one of them has wrapped a model in our class."""
        return self._path.stat().st_size > 0


def _note(path: Path) -> None:
    with suppress(OSError), path.open("a") as file:  # who asked may be gone
        file.write(".")


@contextmanager
def reached_children(
    command: str = "run", *, swaps: bool, is_compared: bool = False
) -> Iterator[Children]:
    """Processes that are started inside do as this one does."""
    with tempfile.TemporaryDirectory(prefix="minidp-run-") as folder:
        path = Path(folder, "wrapped")
        path.touch()
        orders = Orders(command, swaps, is_compared, str(path))
        others = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([str(START), *([others] if others else [])])
        variables = {"PYTHONPATH": paths, RUN: json.dumps(asdict(orders))}
        with setting(variables):
            yield Children(path)


def plain_environment() -> dict[str, str]:
    """The environment without what `reached_children` has added, here or further up."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = os.pathsep.join(path for path in paths if path != str(START))
    plain = {name: os.environ[name] for name in os.environ if name != RUN}
    return plain | ({"PYTHONPATH": rest} if "PYTHONPATH" in plain else {})


_joined = ExitStack()  # never closed: it is for good


def join() -> None:
    """Do what the process that started this one was told to (`sitecustomize`)."""
    orders = Orders(**json.loads(os.environ[RUN]))
    if orders.swaps:
        swap_here()
        path = Path(orders.wrapped)
        _joined.enter_context(after_wrapping(DataParallel, lambda _: _note(path)))
    else:
        die_with_parent()
        _joined.enter_context(after_wrapping(TORCHS, never_take_down))
    if orders.is_compared:
        seed(int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))
