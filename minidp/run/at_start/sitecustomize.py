"""Swap torch's class in processes that a script under ``minidp run`` starts.

Python imports this file at its start, because PYTHONPATH names its folder
(`run/children`). Once torch is imported, if ever, `Finder` imports minidp and calls
`run.children.join`. Any Python program that the script starts runs this file, so it
must be quick, use only the standard library, and never raise.
"""

import importlib
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
PARENT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))  # of this minidp


class Finder:
    """An import hook that imports this minidp once torch is imported, and joins it."""

    def find_spec(self, name: str, *more: Any) -> Any:
        """Return a spec for torch and minidp whose loader calls `_imported` at its end.

        All other modules are left to the other finders.
        """
        found = None
        if name == "minidp":
            found = PathFinder.find_spec(name, [PARENT])
        elif name == "torch":
            others = (finder for finder in list(sys.meta_path) if finder is not self)
            specs = (finder.find_spec(name, *more) for finder in others)
            found = next(filter(None, specs), None)
        if found is not None and hasattr(found.loader, "exec_module"):
            _call_after(found.loader, name)
        return found


def _call_after(loader: Any, name: str) -> None:
    """Make a loader call `_imported` once, when it has executed the module ``name``."""
    plain = loader.exec_module

    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        plain(module)
        if module.__name__ == name:
            _imported(name)

    loader.exec_module = exec_module


def _imported(name: str) -> None:
    """Import minidp if torch was imported, or join the run if minidp was.

    Errors are printed, because this must not disturb the program that imports them.
    """
    try:
        if name == "minidp":
            importlib.import_module("minidp.run.children").join()
        elif "minidp" not in sys.modules:  # otherwise minidp is what imports torch
            importlib.import_module("minidp")
    except Exception as error:
        sys.stderr.write(
            f"minidp run: process {os.getpid()} ({' '.join(sys.argv)}) stays on "
            "torch's DistributedDataParallel, because minidp cannot be imported "
            f"there: {type(error).__name__}: {error}\n"
        )


def run_hidden() -> None:
    """Import the user's own ``sitecustomize``, if there is one, which this file hides.

    What the user's file raises passes through.
    """
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


if __name__ == "sitecustomize":
    if os.environ.get("MINIDP_RUN"):
        sys.meta_path.insert(0, Finder())
    run_hidden()
