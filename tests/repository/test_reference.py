"""The API reference: `bash tests/run.sh api` builds it, and looks for broken links."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import minidp
from tests.support.links import broken_links

ROOT = Path(minidp.__file__).parents[1]
# What the reference of DataParallel begins with.
FIRST = [
    "__init__",
    "forward",
    "no_sync",
    "register_comm_hook",
    "count_items",
    "weigh_loss",
]
TORCHS = ["scatter", "gather", "to_kwargs", "reducer", "will_sync_module_buffers"]


def test_help_begins_with_what_one_calls():
    """`help` sorts methods by name, so the docstring tells which matter."""
    text = pydoc.plain(pydoc.render_doc(minidp.DataParallel))
    first = text.partition("Args:")[0]
    names = ["no_sync", "join", "reset", "weigh_loss", "count_items", "sync_gradients"]
    names += ["step_in_backward", "register_comm_hook", "minidp.record"]
    assert [name for name in names if f"`{name}`" not in first] == []


def test_the_package_begins_with_what_one_starts_with():
    assert minidp.__all__[:4] == ["DataParallel", "attach", "swap", "swapped"]
    assert len(set(minidp.__all__)) == len(minidp.__all__)


@pytest.mark.slow
def test_the_reference_of_the_class(tmp_path):
    pytest.importorskip("pdoc")
    command = [sys.executable, "-m", "tests.support.reference", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    text = (tmp_path / "minidp.html").read_text()
    places = [text.find(f'<div id="DataParallel.{name}"') for name in FIRST]
    assert -1 not in places
    assert places == sorted(places)
    assert [n for n in TORCHS if f'<div id="DataParallel.{n}"' in text] == []
    assert text.index('<section id="DataParallel"') < text.index('<section id="record"')
    assert broken_links(tmp_path) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.html").write_text(
        "<p id=here><a href='#here'></a><a href='../b.html#there'></a>"
        "<a href='https://example.org/x'></a><a href='../b.html'></a>"
    )
    (tmp_path / "b.html").write_text(
        "<p id=there><a href='in/a.html#here'></a><a href='#gone'></a>"
        "<a href='in/c.html'></a><a href='in/a.html#gone'></a>"
    )
    broken = ["b.html: #gone", "b.html: in/c.html", "b.html: in/a.html#gone"]
    assert broken_links(tmp_path) == broken
