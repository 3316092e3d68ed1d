"""An interpreter that has imported torch already, for tests that start many.

A new interpreter needs two to four seconds of CPU time for torch, and ``minidp run
--compare -n 2`` starts seven. `Warm.python` is a program to call in Python's place:
``[-u] -m MODULE``, ``[-u] -c CODE`` or ``[-u] SCRIPT``, and arguments. It asks a server
that has torch for a fork that has its arguments, environment, working directory and
files; it passes signals on, and ends with the fork's exit status. ``sys.executable`` is
this program in the fork, so that what the fork starts is warm, too.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
# The program: quick to start, so without `site`.
CLIENT = """\
#!{python} -IS
import os, signal, socket, struct, sys
passed_on = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until the fork's pid is known
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
words = b"\\0".join(os.fsencode(word) for word in sys.argv)
env = b"\\0".join(k + b"=" + v for k, v in os.environb.items())
data = b"\\1".join([os.fsencode(os.getcwd()), words, env])
socket.send_fds(server, [struct.pack("q", len(data))], [0, 1, 2])
server.sendall(data)
pid = struct.unpack("q", server.recv(8))[0]
def pass_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended, and its status is on the way
for number in passed_on:
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
status = struct.unpack("q", server.recv(8, socket.MSG_WAITALL))[0]
if status < 0:
    if -status != signal.SIGKILL:  # which has no handler
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class Warm:
    """The server, and the path of the program. Call `close` in the end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        address = str(Path(self._folder.name, "socket"))
        self.python = str(Path(self._folder.name, "python"))
        text = CLIENT.format(python=sys.executable, address=address)
        Path(self.python).write_text(text)
        Path(self.python).chmod(0o755)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", address, self.python],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the server. Forks that still run go on."""
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()


def serve(address: str, python: str) -> None:
    """Import what takes long; then fork for each connection, for ever."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [path for path in sys.path[1:] if path not in inherited]

    # Besides minidp: what the first DDP of a process imports, and what launches ranks.
    import torch._dynamo
    import torch.distributed.run  # noqa: F401

    import minidp.__main__
    import minidp.run.command  # noqa: F401
    from minidp.run.children import die_with_parent

    die_with_parent()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    gc.freeze()  # else each fork copies what its collector looks at
    print("ready", flush=True)  # noqa: T201
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guards
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            order = receive(connection)
            pid = os.fork()
            if pid == 0:
                connection.close()
                leave(run(*order, python, base))
            guard(connection, pid)
        connection.close()


def receive(connection: socket.socket) -> tuple[list[int], list[bytes]]:
    """Return three files, and: working directory, words, environment."""
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    (size,) = array.array("q", head)
    data = connection.recv(size, socket.MSG_WAITALL)
    return files, data.split(b"\1")


def guard(connection: socket.socket, pid: int) -> NoReturn:
    """Tell the program how its fork ended; kill the fork if the program is killed."""
    fork = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # the program may have been killed by now
        connection.sendall(array.array("q", [pid]).tobytes())
    ready, _, _ = select.select([fork, connection.fileno()], [], [])
    if fork not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
        connection.sendall(array.array("q", [code]).tobytes())
    os._exit(0)


def run(files: list[int], order: list[bytes], python: str, base: list[str]) -> int:
    """Run a module or a script as a new interpreter would; return the exit status."""
    become(files, order, python)
    kind = sys.argv.pop(0) if sys.argv[0] in ("-m", "-c") else ""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    first = os.getcwd() if kind else os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.path[:] = [first, *paths, *base]
    try:
        if kind == "-m":
            sys.modules.pop(sys.argv[0], None)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            code, sys.argv[0] = sys.argv[0], "-c"
            exec(code, {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            sys.stderr.write(f"{leaving.code}\n")
        return leaving.code if isinstance(leaving.code, int) else bool(leaving.code)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(status: int) -> NoReturn:
    """End as an interpreter does, without two seconds of taking torch apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def become(files: list[int], order: list[bytes], python: str) -> None:
    """Take over files, working directory, environment and words of the program."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = open(number, "w", closefd=False, buffering=1)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    folder, words, env = order
    os.chdir(folder)
    os.environb.clear()
    for each in env.split(b"\0"):
        name_of, _, value = each.partition(b"=")
        os.environb[name_of] = value
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    multiprocessing.set_executable(sys.executable)  # `spawn` hands files over
    sys.executable = python
    sys.argv = [
        word for word in map(os.fsdecode, words.split(b"\0")[1:]) if word != "-u"
    ]


@functools.cache
def warm_python() -> str:
    """Return a path to call in place of ``sys.executable``, as long as this process."""
    warm = Warm()
    atexit.register(warm.close)
    return warm.python


if __name__ == "__main__":
    if sys.argv[1] == "run":  # where another server is out of reach
        sys.exit(subprocess.call([warm_python(), *sys.argv[2:]]))
    serve(*sys.argv[1:])
