"""Serve the `Heartbeat` of every replica, in one daemon thread per process.

The training thread may be stuck in a collective, in a checkpoint or in the user's own
code. So a thread of its own publishes where this rank is, and reads where the others
are. It also tells the other ranks when a replica is deleted or the process ends.

The host does not wait for a collective on an accelerator, so that no training thread
notices if one hangs. This thread does. It notes who is missing in the communicator,
which raises that in the next call of the training thread, and then aborts the group: a
host that waits for the device comes free. Only if the device does not go on after that,
the process ends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref

from minidp import accelerator, world
from minidp.comm import (
    Communicator,
    InFlight,
    abort,
    has_store,
    is_initialized,
    warn_without_store,
)
from minidp.core import Reducer

from .heartbeat import Heartbeat
from .rank_status import DELETED, ENDED

logger = logging.getLogger("minidp")
# How long the exit of the process waits for the final heartbeat, which a busy host may
# delay; and then for the thread, which may be in the store.
FAREWELL_SECONDS, END_SECONDS = 3.0, 1.0
# How long a device may take to go on after an abort, before the process is ended.
ABORT_SECONDS, POLL_SECONDS = 10.0, 0.01


class Watchdog:
    """Serve all heartbeats of this process in one thread.

    There is one object, `the_watchdog()`. The first heartbeat starts its thread, which
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
        # Whether the process ends now, so that stores may be gone.
        self._is_mute = False
        self._judged: list[Heartbeat] = []  # those that a thread of `_judge` looks at

    def start_heartbeat(
        self, reducer: Reducer, key: str, *, is_alone: bool = False
    ) -> None:
        """Publish a replica's status, and let its errors name missing ranks.

        For this the communicator of the reducer gets the heartbeat as its ``peers``,
        and the thread is started if none runs. Nothing happens for one rank alone, or
        if hang reports are off. Without a store there is a warning, and no reports.

        A replica that ``is_alone`` may have no counterpart on other ranks: with
        ``init_sync=False`` nobody has made sure of it. If it is deleted before it has
        launched any bucket, or if comm hooks have launched all of them, which need not
        communicate, they are not told. They may have given its key to another replica,
        for which they would take the news.
        """
        communicator = reducer.communicator
        if communicator.limit is None or communicator.group.size() == 1:
            return
        if not has_store(communicator.group):
            warn_without_store(communicator.group)
            return
        communicator.peers = heartbeat = Heartbeat(
            reducer, key, self._bell.set, is_alone=is_alone
        )
        weakref.finalize(reducer, self._dismiss, heartbeat).atexit = False
        with self._lock:
            # In the child of a fork this object is a copy, and its thread does not run.
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._heartbeats, self._leaving, self._thread = [], [], None
                world.at_exit(self._leave_with_the_process)
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
            if is_initialized() and not self._is_mute and heartbeat.is_awaited:
                heartbeat.say_goodbye(DELETED)
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
                self._give_up_what_hangs(heartbeat)
        except Exception:  # go on with the other heartbeats, and with this one later
            logger.exception(
                "The watchdog failed once, for the reason below. Training goes on; a "
                "hang report may miss what it would have read now."
            )

    def _leave_with_the_process(self) -> None:
        """Let the thread tell the other ranks, at exit, why this process ends.

        They are told the error that ended it, if there is one. This waits up to 4 s for
        the thread to end.
        """
        thread = self._thread
        if thread is None or self._pid != os.getpid() or self._is_mute:
            return
        error = getattr(sys, "last_value", None)
        cause = "" if error is None else f": {type(error).__name__}: {error}"
        self._farewell = f"{ENDED}{cause}"
        self._bell.set()
        thread.join(FAREWELL_SECONDS)
        self._is_mute = True
        thread.join(END_SECONDS)

    def _give_up_what_hangs(self, heartbeat: Heartbeat) -> None:
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
            world.thread(target=self._judge, args=args, daemon=True).start()

    def _judge(
        self, heartbeat: Heartbeat, communicator: Communicator, late: InFlight
    ) -> None:
        """Give a late collective up, unless the missing ranks may still come.

        To ask the other ranks takes some seconds. If the device does not go on after
        the abort, the process ends without any cleanup, with exit status 1.
        """
        try:
            if communicator.is_hopeless(late) or not communicator.extend(late):
                with accelerator.selected(communicator.device):
                    self._give_up(heartbeat, communicator, late)
        finally:
            self._judged.remove(heartbeat)

    def _give_up(
        self, heartbeat: Heartbeat, communicator: Communicator, late: InFlight
    ) -> None:
        group, why = communicator.group, communicator.explain_late(late)
        late.ask_the_device()
        if not communicator.lose(why, late):
            return  # it has ended meanwhile
        for other in list(self._heartbeats):  # other wrappers on the same group
            neighbour = other.communicator
            if neighbour and neighbour is not communicator and neighbour.group is group:
                neighbour.lose(why)
        logger.error(
            "[rank %d] %s The process group is aborted; the next call of the wrapper "
            "or of the optimizer raises this as a CollectiveError.",
            heartbeat.rank,
            why,
        )
        # It may wait itself.
        world.thread(target=abort, args=(group,), daemon=True).start()
        deadline = world.now() + ABORT_SECONDS
        while not late.is_over():
            if world.now() > deadline:
                logger.critical(
                    "[rank %d] This process ends: its device did not go on when the "
                    "process group was aborted, and would never do so.",
                    heartbeat.rank,
                )
                os._exit(1)
            world.sleep(POLL_SECONDS)


the_watchdog = world.PerProcess(Watchdog)
