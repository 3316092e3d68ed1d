"""Put races and hangs of minidp's history back, and see that they are found.

    python -m tests.simulation.mutants              all: a survivor makes the status 1
    python -m tests.simulation.mutants "stale alarms"   only this one

Each mutant replaces one text in a copy of `minidp/`, and lets simulated ranks look for
it, for 60 seconds at most.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 60


@dataclass(frozen=True)
class Mutant:
    """A way to wait for ever, to be silent, or to blame the wrong rank."""

    name: str
    file: str  # in minidp/
    old: str
    new: str
    scenario: str = "faults"


# Not found yet, because no scenario needs what they break: an answer in the place of
# the post of a rank that has asked itself; a question in a backward without an end;
# steps that are published late; alarms that stay valid; a gap in their numbers; groups
# of forwards that outlive a reset; numbers of backwards that no reset agrees on; a
# meeting that looks at posts before it looks at who has gone.
MUTANTS = [
    Mutant(
        "the group of forwards is connected without a limit",
        "comm/work.py",
        "    if seconds is None and current_deadline.waiter is None:",
        "    if True:",
    ),
    Mutant(
        "the end of join() has no limit",
        "data_parallel/join.py",
        '        with ddp._reducer.communicator.blocking("ending join()"):',
        "        if True:",
        "join",
    ),
    Mutant(
        "waits have no limit",
        "comm/communicator.py",
        "if not lost and late.waited > late.allowed and not self.extend(late):",
        "if False:",
    ),
    Mutant(
        "a rank that has ended counts as missing in what it has started",
        "hang/heartbeat.py",
        "is_lost = any(alarm.started < started for alarm in alarms)",
        "is_lost = any(alarm.started <= started for alarm in alarms)",
    ),
    Mutant(
        "silent ranks are not missing",
        "hang/report.py",
        "        if rank in self._silent:\n            return True\n",
        "",
    ),
    Mutant(
        "a rank that waits for another one is missing, too",
        "hang/report.py",
        "return status.started < started and not status.wait_description",
        "return status.started <= started",
    ),
    Mutant(
        "reset() keeps a group in which a collective has failed",
        "data_parallel/agree_on_group.py",
        "        if _is_unusable(reports):",
        "        if False:",
        "reset",
    ),
    Mutant(
        "reset() goes on in the old place of the store",
        "data_parallel/agree_on_group.py",
        "        communicator.peers.move_to(group, key)",
        "        pass",
        "reset",
    ),
    Mutant(
        "buckets are launched as they fill, in any order",
        "core/bucket_queue.py",
        "                if bucket.state is not BucketState.FULL:\n"
        "                    break",
        "                if bucket.state is not BucketState.FULL:\n"
        "                    continue",
        "train",
    ),
    Mutant(
        "an exchange is not waited for before the next one",
        "core/exchange.py",
        "                self._communicator.wait(self._work)\n",
        "                pass\n",
        "train",
    ),
    Mutant(
        "each rank decides for itself who has come to a meeting",
        "guard/comparison.py",
        "        posts = self._agree_who_came(topic, posts)\n",
        "",
        "mistake",
    ),
    Mutant(
        "a rank that waits does not answer questions",
        "comm/communicator.py",
        "        each.answer()",
        "        pass",
        "mistake",
    ),
    Mutant(
        "nothing is asked again that a late rank has left open",
        "guard/comparison.py",
        "            awaited = absent - passed.ahead\n",
        "            awaited = nobody\n",
        "mistake",
    ),
    Mutant(
        "a rank that ended after its part is missing",
        "hang/report.py",
        "if alarm.why in _GONE and rank not in self._gone",
        "if False",
    ),
]


def main(arguments: Sequence[str]) -> int:
    """Look for all mutants, or for those that are named."""
    chosen = [m for m in MUTANTS if not arguments or m.name in arguments]
    survivors = []
    for mutant in chosen:
        began = time.monotonic()
        found = is_found(mutant)
        took = time.monotonic() - began
        word = "found" if found else "SURVIVES"
        print(f"{word:9} {took:5.1f} s  {mutant.name}  {found:.150}", flush=True)
        if not found:
            survivors.append(mutant.name)
    return int(bool(survivors))


def is_found(mutant: Mutant) -> str:
    """Return what simulated ranks say of a copy with the mutant, or ""."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / "minidp", folder / "minidp", ignore=ignored)
        (folder / "tests").symlink_to(ROOT / "tests")
        path = folder / "minidp" / mutant.file
        path.write_text(changed(mutant))
        command = [sys.executable, "-m", "tests.simulation", mutant.scenario]
        command += ["--runs", "1000000", "--seconds", str(SECONDS)]
        env = {**os.environ, "PYTHONPATH": name, "MINIDP_NATIVE": "0"}
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
    if done.returncode == 0:
        return ""
    return done.stdout.replace("\n", " ") or done.stderr[-300:]


def changed(mutant: Mutant) -> str:
    """Return the file with the mutant.

    Raises:
        ValueError: Its text is not found exactly once, so that it is out of date.
    """
    whole = (ROOT / "minidp" / mutant.file).read_text()
    if whole.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: found {whole.count(mutant.old)} times")
    return whole.replace(mutant.old, mutant.new)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
