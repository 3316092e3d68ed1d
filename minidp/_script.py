"""Run somebody's script in this process, as ``python script`` would."""

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _console


@dataclass(frozen=True)
class Script:
    """What stands on the command line behind ``python``."""

    target: str  # a file (or folder, or zip with __main__.py), or a module's name
    arguments: Sequence[str] = ()
    is_module: bool = False  # ``python -m target``

    @property
    def words(self) -> list[str]:
        """The same for a command line."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def problem(self) -> str:
        """Why there is nothing to run; empty if there is."""
        if not self.is_module:
            found = Path(self.target).exists()
            return "" if found else f"there is no script {self.target}"
        with _as_started(self):
            try:
                spec = importlib.util.find_spec(self.target)
                if spec is not None and spec.submodule_search_locations is not None:
                    spec = importlib.util.find_spec(f"{self.target}.__main__")
            except ModuleNotFoundError as error:
                if not f"{self.target}.".startswith(f"{error.name}."):
                    raise  # a package around it imports what is not installed
                spec = None
        return "" if spec else f"there is no module {self.target} to run"

    def run(self) -> int:
        """Run it to its end; the exit status that Python would have.

        Raises:
            BaseException: whatever it raises, but SystemExit.
        """
        with _as_started(self):
            try:
                if self.is_module:
                    runpy.run_module(self.target, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(self.target, run_name="__main__")
            except SystemExit as end:
                return _status(end.code)
        return 0


@contextmanager
def _as_started(script: Script) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as the script expects them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script.target, *script.arguments]
    if not getattr(sys.flags, "safe_path", False):
        file = Path(script.target)
        folder = os.getcwd() if script.is_module else str(file.resolve().parent)
        sys.path[:1] = [folder]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _status(code: object) -> int:
    """What Python makes of the argument of ``sys.exit``."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    say(str(code))
    return 1


@contextmanager
def after_wrapping(kind: type, told: Callable[[Any], None]) -> Iterator[None]:
    """Inside, ``told`` hears of every object of a class once it is made.

    Args:
        kind: has an ``__init__`` of its own.
        told: gets the object; of a class derived from it, before that one's own part.
    """
    plain: Any = kind.__dict__["__init__"]

    @functools.wraps(plain)
    def init(self: Any, *given: Any, **options: Any) -> None:
        plain(self, *given, **options)
        told(self)

    kind.__init__ = init  # type: ignore[misc]
    try:
        yield
    finally:
        kind.__init__ = plain  # type: ignore[misc]


def from_environment(name: str, default: int) -> int:
    """A number that a launcher has left there."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def say_once(text: str) -> None:
    """Say something on rank 0, as far as the launcher tells."""
    if not from_environment("RANK", 0):
        say(text)


def say(text: str) -> None:
    """For a person, who may pipe what the script prints."""
    _console.say_on_stderr(text)
