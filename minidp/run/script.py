"""Run a user's script in this process, as ``python script`` would.

A script may look at ``sys.argv``, ``sys.path[0]``, ``__file__`` and ``__main__``, and
pickles name ``__main__``. So these have to be what they are without ``minidp run``.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import os
import pkgutil
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, TextIO

from minidp.console import say_on_stderr


@dataclass(frozen=True)
class Script:
    """A script and its arguments, as they follow ``python`` on a command line."""

    target: str  # a file (or folder, or zip with __main__.py), or a module's name
    arguments: Sequence[str] = ()
    is_module: bool = False  # whether it is meant as in ``python -m target``

    @property
    def words(self) -> list[str]:
        """The words that follow ``python`` on a command line."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def seen_from(self, folder: Path) -> Script:
        """Return the script with a path that is relative to ``folder`` if it is in it.

        Otherwise the path is absolute. A module has no path, and stays as it is.
        """
        target = os.path.abspath(self.target)
        if Path(target).is_relative_to(folder):
            target = os.path.relpath(target, folder)
        return self if self.is_module else replace(self, target=target)

    def moved(self, folder: Path, to: Path) -> Script:
        """Return the script as it runs in a copy ``to`` of ``folder``.

        Arguments that name something in the folder by its absolute path name the copy.
        """
        arguments = [moved(word, folder, to) for word in self.arguments]
        return replace(self.seen_from(folder), arguments=arguments)

    def problem(self) -> str:
        """Return why there is no such script, or "" if there is one.

        To find a module, Python imports the packages around it. What they raise passes
        through, also the ModuleNotFoundError of something that they import.
        """
        if not self.is_module:
            found = Path(self.target).exists()
            return "" if found else f"there is no script {self.target}"
        with self._as_started():
            try:
                spec = importlib.util.find_spec(self.target)
                if spec is not None and spec.submodule_search_locations is not None:
                    spec = importlib.util.find_spec(f"{self.target}.__main__")
            except ModuleNotFoundError as error:
                if not f"{self.target}.".startswith(f"{error.name}."):
                    raise  # a package around it imports something that is not installed
                spec = None
        return "" if spec else f"there is no module {self.target} to run"

    def run(self) -> int:
        """Run the script in this process, and return its exit status.

        Its errors pass through, except for a SystemExit. As in Python, the code of that
        becomes the status; a text in the place of the code is printed, and the status
        is 1.
        """
        with self._as_started(), _warnings_at_the_script():
            try:
                self._run_as_main()
            except SystemExit as end:
                if end.code is None or isinstance(end.code, int):
                    return end.code or 0
                say_on_stderr(str(end.code))
                return 1
        return 0

    def _run_as_main(self) -> None:
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        with _main_module(self.target) as (code, names):
            exec(code, names)

    @contextmanager
    def _as_started(self) -> Iterator[None]:
        """Set ``sys.argv`` and ``sys.path[0]`` inside the block as Python would."""
        argv, path = sys.argv, list(sys.path)
        sys.argv = [self.target, *self.arguments]
        if not getattr(sys.flags, "safe_path", False) or self._is_importable():
            sys.path[0] = self._first_on_path()
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path

    def _is_importable(self) -> bool:
        # Python can import from a folder or a zip file.
        return not self.is_module and pkgutil.get_importer(self.target) is not None

    def _first_on_path(self) -> str:
        if self.is_module:
            return os.getcwd()
        if self._is_importable():
            return _absolute(self.target)
        return str(Path(self.target).resolve().parent)


def _absolute(path: str) -> str:
    # This is what Python makes of a script's path: it is absolute, but not normalised.
    return os.getcwd() if path == "." else os.path.join(os.getcwd(), path)


@contextmanager
def _main_module(target: str) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Let ``__main__`` be the script in the block, which gets its code and globals.

    ``runpy.run_path`` is not the same: it makes ``sys.argv[0]`` equal to ``__file__``,
    whereas Python makes only the latter absolute.
    """
    path, name, spec = _absolute(target), "__main__", None
    importer: Any = pkgutil.get_importer(path)  # None for a file of code
    loader: Any
    if importer is not None:
        spec = importer.find_spec(name)
        if spec is None:
            raise ImportError(f"can't find '__main__' module in {target!r}")
        loader = spec.loader
        code = loader.get_code(name)
    elif path.endswith(".pyc"):
        loader = SourcelessFileLoader(name, path)
        code = loader.get_code(name)
    else:
        loader = SourceFileLoader(name, path)
        code = loader.source_to_code(loader.get_data(path), path)
    module = ModuleType(name)
    names = vars(module)
    names.update(__file__=path, __loader__=loader, __cached__=None, __spec__=spec)
    names.update(__builtins__=builtins)
    if spec is not None:
        names.update(__file__=spec.origin, __cached__=spec.cached, __package__="")
    before = sys.modules[name]
    sys.modules[name] = module
    try:
        yield code, names
    finally:
        sys.modules[name] = before


def moved(text: str, folder: Path, to: Path) -> str:
    """Replace the path of the working directory ``folder`` by ``to`` in a text.

    $PWD may hold another name of the same directory, one with links; it is replaced,
    too.
    """
    known = os.environ.get("PWD", "")
    names = {str(folder)}
    if os.path.isabs(known) and os.path.realpath(known) == os.path.realpath(folder):
        names.add(os.path.normpath(known))
    either = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![\w/.-])(?:{either})(?![\w.-])", lambda _: str(to), text)


@contextmanager
def _warnings_at_the_script() -> Iterator[None]:
    """Show warnings that point beyond the script at the line of the script.

    The stack level of a warning may lead above the outermost frame of the script.
    Python itself says "sys:1" then. Here the warning would name files of minidp that
    run the script, of which a user knows nothing.
    """
    plain = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        place = _line_of_the_script(filename) or (filename, lineno)
        plain(message, category, *place, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = plain


def _line_of_the_script(filename: str) -> tuple[str, int] | None:
    """Return the line that the script is at, if the file is not the script's own."""
    frame: FrameType | None = sys._getframe(1)
    outermost = None  # the outermost line of the script
    while frame is not None and frame.f_code is not Script._run_as_main.__code__:
        if frame.f_globals.get("__name__") != "runpy":
            outermost = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    if frame is None:  # another thread
        return None
    beyond = {runpy.__file__, "<frozen runpy>", "sys", "<sys>"}
    while frame is not None:
        beyond.add(frame.f_code.co_filename)
        frame = frame.f_back
    return outermost if filename in beyond else None


# Python leaves out frames of files with such names when it counts the stack level of a
# warning. So torch's warnings name the user's line, and not our function in between.
_UNCOUNTED = "<frozen importlib._bootstrap> of minidp"


@contextmanager
def after_wrapping(kind: type, told: Callable[[Any], None]) -> Iterator[None]:
    """Call ``told(model)`` for each model of class ``kind`` that the block makes.

    ``kind.__init__`` is replaced, so that subclasses count, too.
    """
    plain: Any = kind.__dict__["__init__"]

    @functools.wraps(plain)
    def init(self: Any, *given: Any, **options: Any) -> None:
        plain(self, *given, **options)
        told(self)

    function: Any = init
    function.__code__ = function.__code__.replace(co_filename=_UNCOUNTED)
    kind.__init__ = init  # type: ignore[misc]
    try:
        yield
    finally:
        kind.__init__ = plain  # type: ignore[misc]
