"""``minidp doctor`` in real processes: a job that is well, ranks that die or stay.

The limits given here are for processes that stay away for good; nothing is timed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.fresh import run_fresh
from tests.support.ports import free_port
from tests.support.warm import warm_python

pytestmark = [pytest.mark.fault, pytest.mark.fresh]

LIMIT = 280.0  # seconds for any process here; a hang is a failure


def start(code, rank, port, *arguments, python):
    """Run ``code`` and then the doctor, as rank ``rank`` of two, without torchrun."""
    program = f"""
import os, runpy, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # also under `pytest &`
{code}
runpy.run_module("minidp.doctor", run_name="__main__", alter_sys=True)
"""
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return subprocess.Popen(
        [python, "-c", program, "--json", *arguments],
        env=os.environ | {name: str(value) for name, value in job.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def play(*codes, timeout="60", wait="30", meanwhile=None, new_ranks=()):
    """Run two ranks; return the exit status and printed report of each.

    ``meanwhile`` gets the processes as soon as they are started. ``new_ranks`` are new
    interpreters, in which nothing is imported yet.
    """
    port, limits = free_port(), ("--timeout", timeout, "--wait", wait)
    ranks = []
    for rank, code in enumerate(codes):
        is_new = rank in new_ranks or meanwhile  # which may stop them
        python = sys.executable if is_new else warm_python()
        ranks.append(start(code, rank, port, *limits, python=python))
    try:
        if meanwhile:
            meanwhile(ranks)
        outputs = [process.communicate(timeout=LIMIT) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()  # or its pipes would be closed in another test
    reports = [json.loads(out) if out.strip() else None for out, _ in outputs]
    assert all("Traceback" not in err for _, err in outputs), outputs
    return [process.returncode for process in ranks], reports


def found(report, check):
    return [f["found"] for f in report["findings"] if f["check"] == check]


def failures(report):
    return [f["check"] for f in report["findings"] if f["status"] == "failed"]


def at_clocks(deed):
    """Return code that makes a rank do a deed in the check of clocks."""
    return f"""
import minidp.doctor.checks.collectives
def deed(*_, **_options):
    {deed}
minidp.doctor.checks.collectives.check_clocks = deed
"""


def test_a_rank_that_dies_in_a_check():
    dies = "os.kill(os.getpid(), signal.SIGKILL)"
    codes, (report, nothing) = play("", at_clocks(dies), timeout="15")
    assert codes == [1, -9]
    assert nothing is None
    # Whether the backend says it or the limit: what follows is left out.
    assert failures(report)[0] == "clocks"
    assert found(report, "all-reduce, Gloo") == []
    assert found(report, "versions")  # what was found before is in the report


def test_a_rank_that_raises_in_a_check_ends_it_for_all():
    raises = "raise ValueError('of all things')"
    codes, (report, _) = play("", at_clocks(raises), timeout="15")
    assert codes == [1, 0]  # the rank that prints says that something failed
    failed = [f for f in report["findings"] if f["status"] == "failed"]
    said = {tuple(finding["ranks"]): finding["found"] for finding in failed}
    assert said.keys() == {(0,), (1,)}, failed
    assert said[1,] == "ValueError: of all things"
    assert found(report, "all-reduce, Gloo") == []


def test_a_rank_that_stands_still_in_a_check():
    stays = "threading.Event().wait()"
    codes, (report, _) = play("", at_clocks(stays), timeout="5")
    assert codes == [1, 0]
    # Each rank runs into a limit, the backend's or the check's.
    assert {*failures(report)} == {"clocks"}
    assert "the check did not end within 7 s" in found(report, "clocks")


NOTES_IMPORTS = """
import minidp.doctor.checks.collectives
plain = minidp.doctor.checks.collectives.check_gradients
def check_gradients(*given, **options):
    before = set(sys.modules)
    finding = plain(*given, **options)
    new = set(sys.modules) - before
    assert len(new) < 20, (len(new), sorted(new)[:9])
    return finding
minidp.doctor.checks.collectives.check_gradients = check_gradients
"""


def test_ranks_do_not_wait_for_each_others_imports():
    """The first DDP of a process imports some 800 modules: long, on a busy machine."""
    # The other rank comes at once, and has to wait for the imports of torch here.
    codes, (report, _) = play("", NOTES_IMPORTS, new_ranks=[1], wait="200")
    assert failures(report) == []
    assert codes == [0, 0]
    assert found(report, "gradients, Gloo")


def send(processes, *signals):
    for number in signals:
        for process in processes:
            process.send_signal(number)


def test_ctrl_c_prints_what_was_found_until_then(tmp_path):
    """Also when torchrun passes it on: twice is once.

    The ranks stand still (SIGSTOP) while both are sent SIGINT: whichever comes first
    after that tells the other that it has left, and the other must know by itself.
    """
    here = [str(tmp_path / f"rank {rank}") for rank in range(2)]
    waits = [f"open({path!r}, 'w').close(); threading.Event().wait()" for path in here]

    def interrupt(ranks):
        end = time.monotonic() + LIMIT
        while not all(map(os.path.exists, here)) and time.monotonic() < end:
            time.sleep(0.01)
        send(ranks, signal.SIGSTOP, signal.SIGINT, signal.SIGCONT)
        # The kernel may give a stopped process's signal to a thread that does not wake
        # the main one, and merges a second signal with one that nobody has got yet.
        time.sleep(0.2)
        send(ranks, signal.SIGINT)

    codes, (report, nothing) = play(*map(at_clocks, waits), meanwhile=interrupt)
    assert codes == [130, 130]
    assert nothing is None
    assert found(report, "interrupted") == [
        "Ctrl-C during: clocks; what comes after is left out"
    ]
    assert found(report, "versions")
    assert found(report, "gloo group")
    assert failures(report) == []


def test_without_rank_0_each_rank_speaks_for_itself():
    codes, (_, report) = play("sys.exit(0)", "", wait="1")
    assert codes == [0, 1]
    assert failures(report) == ["master port"]
    assert report["title"] == "minidp doctor: rank 1"


def torchrun(*words):
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": os.devnull}
    command = "-m torch.distributed.run --standalone --nproc-per-node 2"
    return subprocess.run(
        [warm_python(), *command.split(), *words, "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


FAILS = """
import os, sys, time
import minidp.doctor.command as command
if os.environ["RANK"] == "1":
    def judge(*_):
        raise ValueError("of all things")
    command.environment.judge_threads = judge
else:
    plain = command.print_report
    def print_late(*given, **options):
        time.sleep(3)  # torchrun would have ended this rank by now
        plain(*given, **options)
    command.print_report = print_late
import pytest

from minidp.__main__ import main
sys.exit(main(["doctor", "--json"]))
"""


def test_torchrun_does_not_end_the_rank_that_reports(tmp_path):
    path = tmp_path / "doctor.py"
    path.write_text(FAILS)
    done = torchrun(str(path))
    assert done.returncode == 1
    assert failures(json.loads(done.stdout)) == ["threads"]


def test_under_torchrun():
    done = torchrun("-m", "minidp.doctor")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["world_size"] == 2
    assert failures(report) == []
    assert len(found(report, "all-reduce, Gloo")) == 4
    assert "with torch's DDP" in found(report, "gradients, Gloo")[0]


def test_a_rank_that_does_not_call_it_is_named():
    named, nothing = run_fresh(calls_on_one_rank, 2)
    assert named == ["did not take part: rank 1 said nothing within 0.1 s"]
    assert nothing is None


def calls_on_one_rank(ctx):
    from torch import nn

    from minidp import doctor

    if ctx.rank == 1:
        return None
    report = doctor.check_model(nn.Linear(2, 1), seconds=0.1, quiet=True)
    return [f.found for f in report if f.check == "other ranks"]
