"""Leave a mark in the package: ``MINIDP_NATIVE=build pip install .``.

The first process that needs the extension then builds it (`state`). Not pip: it builds
packages in an environment of its own, without torch, and installs the torch to compile
for only later. Only setuptools imports this file, by way of ``pyproject.toml``, without
the rest of minidp.
"""

import os
from pathlib import Path

from setuptools.command.build_py import build_py  # type: ignore[import-untyped]


class BuildPackage(build_py):  # type: ignore[misc]
    """Setuptools' command that copies the package; marks it to build on first use.

    The mark is only for MINIDP_NATIVE=build; see `run`.
    """

    def run(self) -> None:
        """Copy the package; add the mark if MINIDP_NATIVE=build, else remove it.

        In an editable install leave the mark as it is.
        """
        super().run()
        if self.editable_mode:
            return
        mark = Path(self.build_lib, "minidp", "native", "build_on_first_use")
        if os.environ.get("MINIDP_NATIVE") == "build":
            mark.touch()
        else:
            mark.unlink(missing_ok=True)
