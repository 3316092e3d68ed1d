"""Serve the `Heartbeat` of every replica, in one daemon thread per process.

The training thread may be stuck in a collective, in a checkpoint or in the user's own
code. So a thread of its own publishes where this rank is, and reads where the others
are. It also tells the other ranks when a replica is deleted or the process ends.

Where a collective hangs on an accelerator, this thread ends the process: the host does
not wait for such a collective, so there is no thread in which an error could be raised.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from multiprocessing.util import Finalize

from minidp import world
from minidp.comm import (
    Communicator,
    InFlight,
    has_store,
    is_initialized,
    warn_without_store,
)
from minidp.core import Reducer

from .heartbeat import Heartbeat
from .rank_status import ENDED

logger = logging.getLogger("minidp")
EXIT_SECONDS = 1.0  # how long the exit of the process waits for the final heartbeat


class Watchdog:
    """Serve all heartbeats of this process in one thread.

    There is one object, `the_watchdog`. The first heartbeat starts its thread, which
    ends when no replica is left.
    """

    def __init__(self) -> None:
        self._heartbeats: list[Heartbeat] = []
        self._leaving: list[Heartbeat] = []  # of deleted replicas
        self._lock = threading.Lock()
        self._bell = world.event()  # wakes the thread
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._farewell = ""  # why the process ends; "" while it goes on
        self._is_mute = (
            False  # whether the process ends now, so that stores may be gone
        )
        self._judged: list[Heartbeat] = []  # those that a thread of `_judge` looks at

    def start_heartbeat(self, reducer: Reducer, key: str) -> None:
        """Publish a replica's status, and let its errors name missing ranks.

        For this the communicator of the reducer gets the heartbeat as its ``peers``,
        and the thread is started if none runs. Nothing happens for one rank alone, or
        if hang reports are off. Without a store there is a warning, and no reports.
        """
        communicator = reducer.communicator
        if communicator.limit is None or communicator.group.size() == 1:
            return
        if not has_store(communicator.group):
            warn_without_store(communicator.group)
            return
        communicator.peers = heartbeat = Heartbeat(reducer, key, self._bell.set)
        weakref.finalize(reducer, self._dismiss, heartbeat).atexit = False
        with self._lock:
            # In the child of a fork this object is a copy, and its thread does not run.
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._heartbeats, self._leaving, self._thread = [], [], None
                atexit.register(self._leave_with_the_process)
                # Most children of multiprocessing end without running atexit.
                Finalize(None, self._leave_with_the_process, exitpriority=0)
            self._heartbeats.append(heartbeat)
            if self._thread is None:
                self._thread = world.thread(
                    target=self._run, name="minidp watchdog", daemon=True
                )
                self._thread.start()

    def _dismiss(self, heartbeat: Heartbeat) -> None:
        """Let the thread tell the other ranks that a replica is gone."""
        if heartbeat.pid == os.getpid():  # else a forked child has inherited the object
            self._leaving.append(heartbeat)
            self._bell.set()

    def _run(self) -> None:
        while heartbeats := self._drop_deleted():
            farewell = self._farewell
            for heartbeat in heartbeats:
                self._serve(heartbeat)
                if farewell and not self._is_mute:
                    heartbeat.say_goodbye(farewell)
            if farewell:
                return
            self._bell.wait(min(heartbeat.interval for heartbeat in heartbeats))
            self._bell.clear()

    def _drop_deleted(self) -> list[Heartbeat]:
        """Remove the heartbeats of deleted replicas, and return those that remain.

        The other ranks are told of each one that is removed. If none remains, the
        thread is forgotten, because it ends then.
        """
        while self._leaving:
            heartbeat = self._leaving.pop()
            if is_initialized() and not self._is_mute:
                heartbeat.say_goodbye("its DataParallel object is gone")
            with self._lock:
                self._heartbeats.remove(heartbeat)
        with self._lock:
            if not self._heartbeats:
                self._thread = None
            return list(self._heartbeats)

    def _serve(self, heartbeat: Heartbeat) -> None:
        try:
            # Otherwise the store may be gone already.
            if is_initialized() and not self._is_mute:
                heartbeat.tick()
                self._end_what_hangs(heartbeat)
        except Exception:  # go on with the other heartbeats, and with this one later
            logger.exception(
                "The watchdog failed once, for the reason below. Training goes on; a "
                "hang report may miss what it would have read now."
            )

    def _leave_with_the_process(self) -> None:
        """Let the thread tell the other ranks, at exit, why this process ends.

        They are told the error that ended it, if there is one. This waits up to 2 s for
        the thread to end.
        """
        thread = self._thread
        if thread is None or self._pid != os.getpid() or self._is_mute:
            return
        error = getattr(sys, "last_value", None)
        cause = "" if error is None else f": {type(error).__name__}: {error}"
        self._farewell = f"{ENDED}{cause}"
        self._bell.set()
        thread.join(EXIT_SECONDS)
        self._is_mute = True
        thread.join(EXIT_SECONDS)

    def _end_what_hangs(self, heartbeat: Heartbeat) -> None:
        """Start a thread to `_judge` a collective that is late on an accelerator.

        The collectives that the host waits for, as on Gloo, raise where they are waited
        for. They do not come here.
        """
        communicator = heartbeat.communicator
        late = None if communicator is None else communicator.find_late_on_device()
        if communicator and late and heartbeat not in self._judged:
            self._judged.append(heartbeat)
            # This thread is the one that finds out who is missing. So it cannot wait
            # for the answer itself.
            args = (heartbeat, communicator, late)
            world.thread(target=self._judge, args=args).start()

    def _judge(
        self, heartbeat: Heartbeat, communicator: Communicator, late: InFlight
    ) -> None:
        """End the process, unless the missing ranks may still come.

        The report is logged first. The process ends without any cleanup, with exit
        status 1. Asking the other ranks takes some seconds.
        """
        if communicator.extend(late):
            self._judged.remove(heartbeat)
            return
        logger.critical(
            "[rank %d] A collective did not finish within its limit: %s. %s This "
            "process ends: a device cannot give up a collective.",
            heartbeat.rank,
            late.doing,
            heartbeat.report(late.started).text,
        )
        with contextlib.suppress(Exception):
            heartbeat.group.abort()
        os._exit(1)


the_watchdog = Watchdog()
