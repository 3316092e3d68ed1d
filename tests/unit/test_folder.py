"""A copy of a folder: nothing that is written there reaches the original."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from minidp import _folder
from minidp._folder import copy, too_large


@pytest.fixture
def folder(tmp_path):
    """With all that may lie in the folder of a project."""
    here = tmp_path / "project"
    (here / "src" / "deep").mkdir(parents=True)
    (here / "empty").mkdir()
    (here / "train.py").write_text("train")
    (here / "src" / "deep" / "net.py").write_text("net")
    (here / ".git").mkdir()
    (here / ".git" / "HEAD").write_text("ref")
    (here / "env").mkdir()
    (here / "env" / "pyvenv.cfg").write_text("home")
    outside = tmp_path / "data"
    outside.mkdir()
    (here / "data").symlink_to(outside)
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
    assert (to / "train.py").read_text() == "train"
    assert (to / "latest" / "net.py").read_text() == "net"
    assert (to / "newest").resolve() == to / "src" / "deep"
    for link in ("data", "sibling"):
        assert (to / link).resolve() == tmp_path / "data"
    assert (to / ".git").resolve() == folder / ".git"
    assert (to / "env").resolve() == folder / "env"
    assert os.readlink(to / "broken") == str(to / "nowhere")
    assert {path.name for path in folder.iterdir()} - {"socket"} == {
        path.name for path in to.iterdir()
    }
    for path in ("train.py", "src/deep/net.py", "latest/net.py"):
        (to / path).write_text("changed")
    (to / "empty" / "out.pt").write_text("new")
    assert (folder / "train.py").read_text() == "train"
    assert (folder / "src" / "deep" / "net.py").read_text() == "net"
    assert not any((folder / "empty").iterdir())


def test_a_copy_into_the_folder_itself(folder):
    copy(folder, folder / "tmp" / "copy")
    assert (folder / "tmp" / "copy" / "train.py").exists()
    assert not (folder / "tmp" / "copy" / "tmp").exists()


def test_a_file_that_cannot_be_read_is_linked(folder, tmp_path, monkeypatch):
    def fails(source, _):
        raise PermissionError(source)

    monkeypatch.setattr(_folder.shutil, "copy2", fails)
    copy(folder, tmp_path / "copy")
    assert (tmp_path / "copy" / "train.py").resolve() == folder / "train.py"


def test_a_file_that_is_gone_meanwhile_is_left_out(folder, tmp_path, monkeypatch):
    def fails(source, _):
        raise FileNotFoundError(source)

    monkeypatch.setattr(_folder.shutil, "copy2", fails)
    copy(folder, tmp_path / "copy")
    assert not (tmp_path / "copy" / "train.py").exists()


def test_nothing_is_linked_because_the_disk_is_full(folder, tmp_path, monkeypatch):
    """The run on torch would write through the links, into the user's files."""

    def fails(source, _):
        raise OSError(errno.ENOSPC, "No space left on device", source)

    monkeypatch.setattr(_folder.shutil, "copy2", fails)
    with pytest.raises(OSError, match="No space left"):
        copy(folder, tmp_path / "copy")


@pytest.mark.parametrize(
    ("limit", "value", "why"),
    [
        ("MAX_FILES", 9, "it holds more than 9 files"),
        ("MAX_BYTES", 2 * 2**20, "it holds more than 2 MiB"),
    ],
)
def test_what_is_too_large(folder, monkeypatch, limit, value, why):
    for number in range(3):
        (folder / f"{number}.pt").write_bytes(bytes(2**20))
    assert too_large(folder) == ""
    monkeypatch.setattr(_folder, limit, value)
    assert too_large(folder) == why


def test_linked_data_and_environments_do_not_count(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "MAX_BYTES", 1000)
    (tmp_path / "data" / "images").write_bytes(bytes(2000))
    (folder / "env" / "libtorch").write_bytes(bytes(2000))
    (folder / ".git" / "pack").write_bytes(bytes(2000))
    assert too_large(folder) == ""
