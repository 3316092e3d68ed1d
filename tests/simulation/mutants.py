"""Put races and hangs of minidp's history back, and see that they are found.

    python -m tests.simulation.mutants              all: a survivor makes the status 1
    python -m tests.simulation.mutants "stale alarms"   only this one

Each mutant replaces one text in a copy of `minidp/`, and lets simulated ranks look for
it, for 60 seconds at most. Those of `torchft` need the extra of this name.

Races and hangs that the git history has mended, and that no mutant here stands for,
because simulation cannot reach them or nothing depends on them any more:

* Devices and streams (the watchdog, aborts, marks of memory), shared memory, C++ hooks,
  forks, frames that are read during a garbage collection, the end of an interpreter,
  launchers: none of it is simulated. `tests/accelerator`, the sanitizers and
  `tests/shared_memory` have them.
* Two threads of one rank between seams (the registry of guards, a late thread of a
  hook): a simulated thread goes on until its next seam.
* Alarms of a rank that has gone on: each `reset()` moves to another place of the store,
  where old alarms do not count. A rank that fails tells it, and so does the `reset()`
  that follows, and so does the wait that failed: each of them alone is enough.
* A rank that waits and does not say so: the block around a wait says it, and so does
  the wait.
* Groups of forwards that outlive a reset: a collective that has failed there makes
  `reset()` leave the default group as well.
* Numbers of backwards on which no reset agrees: nothing in these scenarios, which copy
  a rank or repeat a step, was seen to depend on them.
* Replicas of torchft that get the state of one that loses a comparison of histories, or
  no state in a step with module buffers: too much has to happen for a minute's search.
  `tests/torchft` has them.
* Questions of the guard (an answer in the place of a post, a question without an end,
  steps that are published late, a meeting that looks at posts first): heartbeats decide
  these a second time, and then nothing is proved, which is right, too.
  `tests/guard/test_comparison.py` has them.
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
from importlib.util import find_spec
from pathlib import Path

from tests.simulation.scenarios import OF_TORCHFT

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
        "a rank that only runs slower is blamed for a mistake in a comm hook",
        "comm/communicator.py",
        "            if report.is_anyone_gone:",
        "            if absent:",
        "hook",
    ),
    Mutant(
        "a rank that is gone is blamed for a mistake in a comm hook",
        "comm/backends.py",
        "    if not isinstance(error, OF_COLLECTIVES) or not in_callbacks:",
        "    if True:",
        "hook",
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
        "a wait of less than a millisecond has no limit",
        "comm/work.py",
        "seconds=max(seconds, _SHORTEST_SECONDS)",
        "seconds=seconds",
        "logical",
    ),
    Mutant(
        "an interrupt leaves a sum half done",
        "logical/averaging.py",
        '            self._error = RuntimeError(f"{type(error).__name__} in a sum over '
        'ranks")\n',
        "",
        "logical",
    ),
    Mutant(
        "the second messages of sums go in any order",
        "logical/averaging.py",
        "if not self._before._has_second():",
        "if False:",
        "logical",
    ),
    Mutant(
        "the second messages of sums go in the group of the first ones",
        "logical/averaging.py",
        "gathers = _group_of_gathers(self._slices.group)",
        "gathers = self._slices.group",
        "logical",
    ),
    Mutant(
        "a divided step asks nobody",
        "sharded/step.py",
        "        self.agree(Intent(Act.STEP, number, problems), held)\n",
        "",
        "sharded_reset",
    ),
    Mutant(
        "a backward does not wait for values that are on their way",
        "sharded/step.py",
        "        self.bring_rest()\n        self._begin_backward()",
        "        self._begin_backward()",
        "sharded",
    ),
    Mutant(
        "parameters do not wait for their values",
        "sharded/returns.py",
        "        for each in self._open:\n            each.let_wait(self._finish)\n",
        "        return\n",
        "sharded",
    ),
    Mutant(
        "reset() leaves the shares as they are",
        "data_parallel/sharded_step.py",
        "        sharded.bring_all()\n",
        "",
        "sharded_reset",
    ),
    Mutant(
        "values that are on their way outlive a reset",
        "sharded/step.py",
        "        self.returns.drop()\n",
        "",
        "sharded_reset",
    ),
    Mutant(
        "a loop over logical ranks tells nobody that no step has come",
        "data_parallel/sharded_step.py",
        "        ddp._sharded.before_forward(waits=True)\n",
        "        ddp._sharded.before_forward(waits=False)\n",
        "logical_sharded_reset",
    ),
    Mutant(
        "a busy rank is given up like one that is gone",
        "comm/communicator.py",
        "        if not absent.may_still_come:\n            return False\n",
        "        return False\n",
        "hangs",
    ),
    Mutant(
        "a rank that is gone is waited for like a busy one",
        "comm/communicator.py",
        "        if not absent.may_still_come:\n            return False\n",
        "",
        "hangs",
    ),
    Mutant(
        "ranks are blamed that wait for the one that gave up",
        "hang/report.py",
        "        self.absent = self._gone or [\n"
        "            r for r in self._others if self._is_late(r, started)\n"
        "        ]",
        "        self.absent = [\n"
        "            r for r in self._others if self._is_late(r, started)\n"
        "        ] or self._gone",
    ),
    Mutant(
        "reset() tells nobody of itself",
        "data_parallel/agree_on_group.py",
        '        each.peers.give_up(f"it called reset(){cause}")',
        "        pass",
        "reset",
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
        "self._done = sorted((left | moved) - {*self._gone})",
        "self._done = sorted(moved - {*self._gone})",
    ),
    Mutant(
        "a rank that is through its constructor is taken for dead by the others",
        "data_parallel/replication.py",
        "(group, self._key, leaves_word=True)",
        "(group, self._key)",
        "hangs",
    ),
    Mutant(
        "replicas that went on without each other do not compare their histories",
        "torchft/quorum.py",
        "        if now == self._compared:\n            self._history",
        "        if True:\n            self._history",
        "torchft",
    ),
    Mutant(
        "a state that came is forgotten if the step ends without a vote",
        "torchft/quorum.py",
        "        if not self._is_late:\n            return\n",
        "        return\n",
        "torchft",
    ),
    Mutant(
        "a layout is used although its step was not committed",
        "torchft/agreement.py",
        "        if self._agreed is not None and step > self._agreed[0]:\n"
        "            self.adopt",
        "        if self._agreed is not None:\n            self.adopt",
        "torchft",
    ),
    Mutant(
        "step 0 is divided by the replicas that are there, of which one contributes",
        "torchft/quorum.py",
        "        if step and not is_due:\n",
        "        if not is_due:\n",
        "torchft",
    ),
    Mutant(
        "survivors do not do what the dead have left of a step",
        "torchft/logical.py",
        "    missing = sorted({*range(leaves)} - covered)\n",
        "    missing = [] if covered else [*range(leaves)]\n",
        "torchft_logical",
    ),
    Mutant(
        "a replica that joins believes its own buffers",
        "torchft/logical.py",
        "before = _fitting(quorum.received.get(BUFFERS), start.first_buffers)\n",
        "before = _copies(start.first_buffers)\n",
        "torchft_logical",
    ),
    Mutant(
        "a step that was not committed begins with the buffers that it has left",
        "torchft/logical.py",
        "step == last.step:  # it was not committed\n",
        "False:\n",
        "torchft_logical",
    ),
    Mutant(
        "a replica that nobody brings up to date does its last step again",
        "torchft/quorum.py",
        "            has_returned = self._return_to_own_step()\n",
        "            pass\n",
        "torchft_turns",
    ),
    Mutant(
        "a replica that returns to its own step averages a batch of the one before",
        "torchft/quorum.py",
        "        if has_returned:\n",
        "        if False:\n",
        "torchft_turns",
    ),
    Mutant(
        "a state that was not taken over is sent on",
        "torchft/quorum.py",
        "        if self._is_late:\n            what =",
        "        if False:\n            what =",
        "torchft_turns",
    ),
    Mutant(
        "a replica that must catch up goes back to the buffers of the step before",
        "torchft/logical.py",
        "self._buffers_at(self._quorum.own_step)",
        "self._buffers_at(self._quorum.step_now)",
        "torchft_turns",
    ),
    Mutant(
        "a reset goes on with the trial of a layout that this rank was in",
        "autotune/tuner.py",
        "        self._trial = -1  # the number",
        '        self._trial = getattr(self, "_trial", -1)  # the number',
        "auto_reset",
    ),
]


def main(arguments: Sequence[str]) -> int:
    """Look for all mutants, or for those that are named."""
    if unknown := {*arguments} - {m.name for m in MUTANTS}:
        print(f"there is no mutant {', '.join(sorted(unknown))}")
        return 2
    chosen = [m for m in MUTANTS if not arguments or m.name in arguments]
    survivors = []
    for mutant in chosen:
        if mutant.scenario in OF_TORCHFT and find_spec("torchft") is None:
            print(f"skipped without the extra minidp[torchft]  {mutant.name}")
            continue
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
