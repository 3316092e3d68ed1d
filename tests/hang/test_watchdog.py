"""The watchdog's thread at the end of a process."""

from __future__ import annotations

import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest

from minidp.hang import watchdog
from minidp.hang.watchdog import Watchdog

WRITING_SECONDS = 0.4  # so that the first wait for the thread ends in the middle


class SlowPost:
    """Every word takes a while to write: ``[`` before, ``]`` after."""

    interval = 0.01
    is_awaited = True

    def __init__(self, reducer, key, wake, *, is_alone):
        self.pid, self._path = os.getpid(), key

    def _write(self):
        for text in "[]":
            with open(self._path, "a") as file:
                file.write(text)
            time.sleep(WRITING_SECONDS)

    def tick(self):
        self._write()

    def say_goodbye(self, why):
        self._write()

    communicator = None


def replica():
    class Reducer(SimpleNamespace):
        __hash__ = object.__hash__

    group = SimpleNamespace(size=lambda: 2)
    communicator = SimpleNamespace(limit=1.0, group=group, peers=None)
    return Reducer(communicator=communicator)


def end_early(path, num_replicas, keeps):
    """End while the thread writes: of replicas that are there, or that are gone."""
    watchdog.Heartbeat = SlowPost
    watchdog.is_initialized = lambda: True
    watchdog.has_store = lambda group: True
    dog = Watchdog()
    replicas = [replica() for _ in range(num_replicas)]
    for each in replicas:
        dog.start_heartbeat(each, path)
    if not keeps:
        replicas.clear()
    while not os.path.exists(path):
        time.sleep(0.01)
    if keeps:
        multiprocessing.current_process().kept = replicas


@pytest.mark.parametrize(
    ("start_method", "num_replicas", "keeps"),
    [("fork", 1, True), ("fork", 9, False), ("forkserver", 9, True)],
)
def test_a_process_ends_between_two_words(tmp_path, start_method, num_replicas, keeps):
    path = tmp_path / "words"
    context = multiprocessing.get_context(start_method)
    child = context.Process(target=end_early, args=(str(path), num_replicas, keeps))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    text = path.read_text()
    assert text == "[]" * (len(text) // 2)
    assert 0 < len(text) // 2 < 2 * num_replicas + 2
