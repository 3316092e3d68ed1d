"""What ranks exchange through the store, and how they describe where they are."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from minidp.hang.rank_status import Alarm, Channel, RankStatus, connect, is_closed


@pytest.fixture
def channels():
    store = dist.HashStore()
    return [Channel(store, rank, 3, has_met=True) for rank in range(3)]


def send(channel, *alarms, started=None):
    channel.outgoing += [Alarm(channel.rank, *alarm) for alarm in alarms]
    channel.send(None if started is None else RankStatus(0, "in a backward", started))


def alarms_on(channel):
    channel.read_alarms()
    return {other: alarm.why for other, alarm in channel.alarms.items()}


def test_an_alarm_does_not_hold_when_the_rank_has_continued(channels):
    send(channels[1], (4, "an error that was caught"))
    assert alarms_on(channels[0]) == {1: "an error that was caught"}
    send(channels[1], started=5)
    assert alarms_on(channels[0]) == {}
    send(channels[1], (5, "the end"))
    assert alarms_on(channels[0]) == {1: "the end"}


class Failing:
    """A store that fails in one call of ``set``, after which it works again."""

    def __init__(self, store):
        self._store, self.fails = store, True

    def __getattr__(self, name):
        return getattr(self._store, name)

    def set(self, *args):
        if self.fails:
            raise RuntimeError("Broken pipe")
        self._store.set(*args)


def test_an_alarm_that_could_not_be_sent_hides_no_other(channels):
    """Neither its own rank's, once the store answers again, nor those of others."""
    broken = channels[1]._store = Failing(channels[1]._store)
    with pytest.raises(RuntimeError, match="Broken pipe"):
        send(channels[1], (4, "first"))
    send(channels[2], (3, "of another"))
    assert alarms_on(channels[0]) == {2: "of another"}
    broken.fails = False
    send(channels[1])
    assert channels[1].outgoing == []
    assert alarms_on(channels[0]) == {1: "first", 2: "of another"}


class Interleaved:
    """A store that calls a function before one of its calls."""

    def __init__(self, store, at, function):
        self._store, self._left, self._function = store, at, function

    def __getattr__(self, name):
        if self._left == 0:
            self._function()
        self._left -= 1
        return getattr(self._store, name)


@pytest.mark.parametrize("of_sender", range(4))
def test_who_waits_no_longer_is_known_to_have_given_up(channels, of_sender):
    """Whenever it says so: else a report would take it for a rank that is missing."""
    for of_reader in range(12):
        store = dist.HashStore()
        reader, sender = (Channel(store, r, 2, has_met=True) for r in range(2))
        waits = RankStatus(0, "in a backward", 4, "waiting")
        sender.send(waits)
        sender.outgoing.append(Alarm(1, 4, "boo"))

        def read(reader=reader):
            reader.read_news(statuses=True, alarms=True)

        def send(sender=sender):
            sender.send(RankStatus(0, "after a failure", 4))

        # The one happens in the middle of the other.
        if of_sender:
            sender._store = Interleaved(store, of_sender - 1, read)
            send()
        else:
            reader._store = Interleaved(store, of_reader, send)
            read()
        assert reader.statuses[1] == waits or reader.alarms.keys() == {1}


def test_a_connection_is_closed_when_the_host_of_the_store_ends():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    store = dist.PrefixStore("a", dist.PrefixStore("b", client))
    channel = Channel(store, 0, 2, has_met=True)
    channel.send(None)
    del server
    channel._connection.settimeout(10)  # until the system has closed it
    with pytest.raises(RuntimeError, match="closed") as caught:
        channel.send(None)
    channel.lose(caught.value)
    assert "that hosted it (rank 0, or torchrun's agent)" in channel.problem


def test_a_host_that_does_not_listen_is_not_gone(monkeypatch):
    """The store itself has to find out."""

    def refuse(*_):
        raise ConnectionRefusedError

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not is_closed(connect(server))
    assert not is_closed(connect(dist.HashStore()))


def test_frames_of_a_thread_that_runs_are_looked_at_safely():
    """On Python 3.11 a collection in between could end the process."""
    command = [sys.executable, "-m", "tests.hang.frames_under_pressure", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
