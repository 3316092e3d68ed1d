"""Serve the `Heartbeat` of every replica, in one daemon thread per process.

Also ends the process when a collective hangs on an accelerator: no thread could raise.
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
EXIT_SECONDS = 1.0  # to wait at exit for the final heartbeat


class Watchdog:
    """Serve all heartbeats in one thread; end the process if CUDA's collectives hang.

    There is one, `the_watchdog`. The first heartbeat starts the thread, which ends when
    no replica is left.
    """

    def __init__(self) -> None:
        self._heartbeats: list[Heartbeat] = []
        self._leaving: list[Heartbeat] = []  # of deleted replicas
        self._lock = threading.Lock()
        self._bell = world.event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._farewell = ""  # why the process ends
        self._is_mute = False  # the process ends now
        self._judged: list[Heartbeat] = []  # whose collectives may hang on a device

    def start_heartbeat(self, reducer: Reducer, key: str) -> None:
        """Publish a replica's status from now on; let its errors name missing ranks.

        Sets the communicator's ``peers``; starts the thread if none runs. Does nothing
        for one rank or without time limit; without a store only warns.
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
            if self._pid != os.getpid():  # the first one, or the child of a fork
                self._pid = os.getpid()
                self._heartbeats, self._leaving, self._thread = [], [], None
                atexit.register(self._leave_with_the_process)
                # A child of multiprocessing ends without atexit, mostly.
                Finalize(None, self._leave_with_the_process, exitpriority=0)
            self._heartbeats.append(heartbeat)
            if self._thread is None:
                self._thread = world.thread(
                    target=self._run, name="minidp watchdog", daemon=True
                )
                self._thread.start()

    def _dismiss(self, heartbeat: Heartbeat) -> None:
        """Finalizer of a reducer: let the thread tell other ranks that it is gone.

        No-op in a forked child.
        """
        if heartbeat.pid == os.getpid():  # else a child has inherited the object
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
        """Remove deleted replicas' heartbeats; return those that remain.

        Sends the others an alarm for each, unless torch.distributed was destroyed or
        the process ends. If none remain, forgets the thread, which ends then.
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
            if is_initialized() and not self._is_mute:  # else a store may be gone
                heartbeat.tick()
                self._end_what_hangs(heartbeat)
        except Exception:  # the others are served, too, and this one the next time
            logger.exception("The watchdog failed; hang reports may be incomplete.")

    def _leave_with_the_process(self) -> None:
        """At exit let the thread tell other ranks, and which error ended the process.

        Then it stops. Waits up to 2 s; no-op without a thread or in a forked child.
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
        """If a collective is late on an accelerator, start a thread to `_judge` it.

        Not while one judges this heartbeat. Collectives that the host waits for (gloo)
        are not concerned.
        """
        communicator = heartbeat.communicator
        late = None if communicator is None else communicator.find_late_on_device()
        if communicator and late and heartbeat not in self._judged:
            self._judged.append(heartbeat)
            # This thread finds out who is missing: another one has to wait for that.
            args = (heartbeat, communicator, late)
            world.thread(target=self._judge, args=args).start()

    def _judge(
        self, heartbeat: Heartbeat, communicator: Communicator, late: InFlight
    ) -> None:
        """End the process, unless the limit of ``late`` is extended; wait some seconds.

        Logs a report first, and aborts the group; exits with 1, without any cleanup.
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
