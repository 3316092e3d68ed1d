"""A copy of a folder: nothing that is written there reaches the original."""

from __future__ import annotations

import os
import socket

import pytest

from minidp.run import copies
from minidp.run.copies import copy, too_large


@pytest.fixture
def folder(tmp_path):
    """With all that may lie in the folder of a project."""
    here = tmp_path / "project"
    (tmp_path / "data").mkdir()
    (here / "empty").mkdir(parents=True)
    for name in ("train.py", "src/deep/net.py", ".git/HEAD", "env/pyvenv.cfg"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    (here / "data").symlink_to(tmp_path / "data")
    (here / "sibling").symlink_to("../data")
    (here / "latest").symlink_to("src/deep")
    (here / "newest").symlink_to(here / "src" / "deep")
    (here / "broken").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as listens:
        listens.bind(os.path.relpath(here / "socket"))
    return here


def test_a_copy(folder, tmp_path):
    to = tmp_path / "made" / "copy"
    copy(folder, to)
    assert (to / "train.py").read_text() == "train.py"
    assert (to / "latest" / "net.py").read_text() == "src/deep/net.py"
    assert (to / "newest").resolve() == to / "src" / "deep"
    for link in ("data", "sibling"):
        assert (to / link).resolve() == tmp_path / "data"
    for link in (".git", "env"):
        assert (to / link).resolve() == folder / link
    assert os.readlink(to / "broken") == str(to / "nowhere")
    names = {path.name for path in folder.iterdir()} - {"socket"}
    assert names == {path.name for path in to.iterdir()}
    for path in ("train.py", "src/deep/net.py", "latest/net.py", "empty/out.pt"):
        (to / path).write_text("changed")
    assert (folder / "train.py").read_text() == "train.py"
    assert (folder / "src" / "deep" / "net.py").read_text() == "src/deep/net.py"
    assert not any((folder / "empty").iterdir())


def test_a_copy_into_the_folder_itself(folder):
    copy(folder, folder / "tmp" / "copy")
    assert (folder / "tmp" / "copy" / "train.py").exists()
    assert not (folder / "tmp" / "copy" / "tmp").exists()


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [
        ("MAX_FILES", 9, "it holds more than 9 files"),
        ("MAX_BYTES", 2 * 2**20, "it holds more than 2 MiB"),
    ],
)
def test_what_is_too_large(folder, tmp_path, monkeypatch, limit, value, why):
    for number in range(3):
        (folder / f"{number}.pt").write_bytes(bytes(2**20))
    for path in (tmp_path / "data", folder / "env", folder / ".git"):  # are linked
        (path / "large").write_bytes(bytes(2**22))
    monkeypatch.setattr(copies, limit, 4 * value)
    assert too_large(folder) == ""
    monkeypatch.setattr(copies, limit, value)
    assert too_large(folder) == why
