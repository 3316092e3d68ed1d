"""Build the API reference: ``python -m tests.support.reference FOLDER``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc

import minidp
from tests.support import links

TEMPLATES = Path(__file__).parents[2] / ".github" / "pdoc"
MODULES = ("minidp", "minidp.doctor", "minidp.report")


def build(folder: Path) -> None:
    """Write one page for each public module."""
    # pdoc takes what a generic class overrides for inherited, the constructor as well.
    del minidp.DataParallel.__orig_bases__  # type: ignore[attr-defined]
    pdoc.render.configure(docformat="google", template_directory=TEMPLATES)
    with warnings.catch_warnings():  # of types that only a type checker sees
        warnings.simplefilter("ignore")
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    sys.exit(links.main(sys.argv[1]))
