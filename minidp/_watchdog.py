"""The watchdog: one daemon thread per process that serves every replica's `Post`.

It also ends the process when a collective hangs on an accelerator: there, no thread of
the training waits that could raise.
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

from ._groups import end_group, has_store, is_initialized, tell_without_store
from ._post import Post
from ._reducer import Reducer
from ._watch import OnDevice

logger = logging.getLogger("minidp")
EXIT_SECONDS = 1.0  # a process that ends waits so long to say so, and for the last word


class Watchdog:
    """The thread; it lives while there are replicas."""

    def __init__(self) -> None:
        self._posts: list[Post] = []
        self._leaving: list[tuple[Post, str]] = []  # with the reason
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._farewell = ""  # why the process ends
        self._is_mute = False  # the process ends now
        self._given_up: list[Post] = []  # of processes that are about to end

    def open_post(self, reducer: Reducer, key: str) -> None:
        """Begin to tell the other ranks about a replica, unless nobody waits."""
        watch = reducer.pipeline.watch
        if watch.limit is None or watch.group.size() == 1:
            return
        if not has_store(watch.group):
            tell_without_store(watch.group)
            return
        watch.lookout = post = Post(reducer, key, self._bell.set)
        why = "its DataParallel object is gone"
        weakref.finalize(reducer, self.dismiss, post, why).atexit = False
        with self._lock:
            if self._pid != os.getpid():  # the first one, or the child of a fork
                self._pid = os.getpid()
                self._posts, self._leaving, self._thread = [], [], None
                atexit.register(self._leave_with_the_process)
                # A child of multiprocessing ends without atexit, mostly.
                Finalize(None, self._leave_with_the_process, exitpriority=0)
            self._posts.append(post)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="minidp watchdog", daemon=True
                )
                self._thread.start()

    def dismiss(self, post: Post, why: str) -> None:
        """A replica is gone."""
        if post.pid != os.getpid():
            return  # we are a child, and have inherited the object
        # No lock: a finalizer may run at any point of this very thread.
        self._leaving.append((post, why))
        self._bell.set()

    def _run(self) -> None:
        while True:
            self._see_off()
            with self._lock:
                if not self._posts:
                    self._thread = None
                    return
                posts = list(self._posts)
            if is_initialized():  # else a store may be gone as well
                for post in posts:
                    self._serve(post)
            if self._farewell:
                for post in posts:
                    self._say_goodbye(post, self._farewell)
                return
            self._bell.wait(min(post.interval for post in posts))
            self._bell.clear()

    def _serve(self, post: Post) -> None:
        if self._is_mute:
            return
        try:
            post.tick()
            self._end_what_hangs(post)
        except Exception:  # the others are served, too, and this one the next time
            logger.exception("The watchdog failed; hang reports may be incomplete.")

    def _say_goodbye(self, post: Post, why: str) -> None:
        if not self._is_mute:
            post.say_goodbye(why)

    def _see_off(self) -> None:
        while self._leaving:
            post, why = self._leaving.pop()
            if is_initialized():
                self._say_goodbye(post, why)
            with self._lock:
                self._posts.remove(post)

    def _leave_with_the_process(self) -> None:
        """At exit: the others need not find out by themselves.

        The thread must not be stopped while it writes. Half a record in a store that is
        a file makes all who read it wait for the other half, for ever.
        """
        thread = self._thread
        if thread is None or self._pid != os.getpid() or self._is_mute:
            return
        error = getattr(sys, "last_value", None)
        cause = "" if error is None else f": {type(error).__name__}: {error}"
        self._farewell = f"its process ended{cause}"
        self._bell.set()
        thread.join(EXIT_SECONDS)
        self._is_mute = True
        thread.join(EXIT_SECONDS)

    def _end_what_hangs(self, post: Post) -> None:
        late = post.find_late_on_device()
        if late is not None and post not in self._given_up:
            self._given_up.append(post)
            threading.Thread(target=self._judge, args=(post, late)).start()

    def _judge(self, post: Post, late: OnDevice) -> None:
        """Not in the watchdog's thread, which finds out who is missing."""
        if post.more_time(late):
            self._given_up.remove(post)
        else:
            _end_process(post, late)


def _end_process(post: Post, late: OnDevice) -> None:
    """Say why, and end."""
    logger.critical(
        "[rank %d] A collective did not finish within its limit: %s. %s This process "
        "ends: nothing can be called back from a device.",
        post.rank,
        late.doing,
        post.report(late.started).text,
    )
    with contextlib.suppress(Exception):
        end_group(post.group)
    os._exit(1)


watchdog = Watchdog()
