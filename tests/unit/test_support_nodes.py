"""The two hosts that are none: names, addresses, and that nothing stays behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.nodes import run_on_nodes, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"two nodes: {why_not()}")
WHO_AM_I = """
import os, socket
print(socket.gethostname(), *map(socket.gethostbyname, ("node0", "node1")), os.getpid())
"""


def run(
    tmp_path: Path, *commands: list[str], timeout: float = 60
) -> list[tuple[int, str]]:
    nodes = run_on_nodes(commands, tmp_path, os.environ, cwd=tmp_path, timeout=timeout)
    return [(node.returncode, node.output) for node in nodes]


def test_a_node_has_a_name_and_knows_the_other(tmp_path: Path) -> None:
    name_of_host = os.uname().nodename
    who_am_i = [sys.executable, "-c", WHO_AM_I]
    first, second = run(tmp_path, who_am_i, who_am_i)
    # Process number 1: with it, the kernel ends all that it has started.
    assert first == (0, "node0 10.77.0.1 10.77.0.2 1\n")
    assert second == (0, "node1 10.77.0.1 10.77.0.2 1\n")
    assert os.uname().nodename == name_of_host


def test_the_exit_status_of_each_node_comes_back(tmp_path: Path) -> None:
    assert run(tmp_path, ["sh", "-c", "echo no >&2; exit 3"], ["true"]) == [
        (3, "no\n"),
        (0, ""),
    ]


def test_a_node_may_be_done_before_the_other_begins(tmp_path: Path) -> None:
    for _ in range(10):  # who is first is chance, and must not matter
        assert run(tmp_path, ["true"], ["true"]) == [(0, ""), (0, "")]


def test_a_node_that_is_not_done_in_time_is_killed_with_all_it_started(
    tmp_path: Path,
) -> None:
    # It returns when nobody is left that could write to the node's stdout.
    wait_for_ever = ["sh", "-c", "setsid sleep infinity & echo started; wait"]
    with pytest.raises(TimeoutError, match=r"after 5 s\.\nnode0:\nstarted\n"):
        run(tmp_path, wait_for_ever, ["true"], timeout=5)
