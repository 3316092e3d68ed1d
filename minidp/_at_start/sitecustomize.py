"""Python imports this at its start in every process that ``minidp run`` reaches.

PYTHONPATH leads here (`_children`). It waits until torch is imported, if ever, and then
lets minidp in. Any Python may run this, of any version, environment and purpose: only
the standard library, quick, and never an error.
"""

import importlib
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)
RUN = "MINIDP_RUN"


class Finder:
    """Hears when torch and minidp have been imported; finds our minidp, no other."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """What the other finders find, with an ear to it."""
        if name == "minidp":
            found = PathFinder.find_spec(name, [os.path.dirname(PACKAGE)], target)
        elif name == "torch":
            found = self._found_by_others(name, path, target)
        else:
            return None
        if found is not None and hasattr(found.loader, "exec_module"):
            _call_after(found.loader, name, self._imported)
        return found

    def _found_by_others(self, *what: Any) -> Any:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                found = finder.find_spec(*what)
                if found is not None:
                    return found
        return None

    def _imported(self, name: str) -> None:
        """Both are there in the end: minidp imports torch."""
        try:
            if name == "minidp":
                importlib.import_module("minidp._children").join()
            elif "minidp" not in sys.modules:  # else it is importing torch just now
                importlib.import_module("minidp")
        except Exception as error:
            sys.stderr.write(
                f"minidp run: process {os.getpid()} ({' '.join(sys.argv)}) stays on "
                "torch's DistributedDataParallel, because minidp cannot be imported "
                f"there: {type(error).__name__}: {error}\n"
            )


def _call_after(loader: Any, name: str, then: Any) -> None:
    """Call ``then(name)`` once the loader has run that module."""
    plain = loader.exec_module

    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        plain(module)
        if module.__name__ == name:
            then(name)

    loader.exec_module = exec_module


def run_hidden() -> None:
    """Python takes the first file of this name: run the next one, too."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if this is not None:
            sys.modules.setdefault("sitecustomize", this)


if __name__ == "sitecustomize":
    if os.environ.get(RUN):
        sys.meta_path.insert(0, Finder())
    run_hidden()
