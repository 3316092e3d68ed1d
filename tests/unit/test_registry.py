"""A weak set for several threads."""

from __future__ import annotations

import gc
import threading

from minidp._registry import Registry


class Thing:
    pass


def test_it_keeps_nothing_alive():
    registry, kept = Registry(), Thing()
    registry.add(kept)
    registry.add(Thing())
    gc.collect()
    assert list(registry) == [kept]


def test_what_was_dropped_leaves_nothing_behind():
    registry = Registry()
    for _ in range(100):
        registry.add(Thing())
    gc.collect()
    registry.add(kept := Thing())
    assert list(registry) == [kept]
    assert len(registry._known) == 1


def test_discarded_items_are_gone():
    registry, thing = Registry(), Thing()
    registry.add(thing)
    registry.discard(thing)
    registry.discard(thing)
    assert not list(registry)


def test_items_may_come_and_go_meanwhile():
    """In a WeakSet each of these changes ends an iteration with a RuntimeError."""
    registry = Registry()
    things = [Thing() for _ in range(3)]
    for thing in things:
        registry.add(thing)
    seen = []
    for thing in registry:
        seen.append(thing)
        registry.add(Thing())
        registry.discard(things[-1])
    assert seen == things


def test_threads_come_and_go_while_others_look():
    registry, errors, end = Registry(), [], threading.Event()

    def look():
        try:
            while not end.is_set():
                list(registry)
        except RuntimeError as error:
            errors.append(error)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    mine = []
    for number in range(3000):
        mine.append(Thing())
        registry.add(mine[-1])
        if number % 3:
            mine.pop(0)
    end.set()
    for watcher in watchers:
        watcher.join()
    assert not errors
    assert {*registry} == {*mine}
