"""``minidp doctor`` in this process, which also plays torchrun and the other ranks."""

from __future__ import annotations

import argparse
import json
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from minidp import doctor
from minidp.doctor.checks.environment import LAUNCH
from minidp.doctor.command import Examination
from minidp.doctor.findings import Finding
from minidp.doctor.meeting import Meeting
from tests.support.judged import FAILED, OK, SKIPPED

RANK_0 = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GLOO_SOCKET_IFNAME": "lo",
}
RANK_1 = {"RANK": "1", "LOCAL_RANK": "1"}


@pytest.fixture
def store(monkeypatch):
    """The store of a job of two ranks; the environment is that of rank 0."""
    options = {"timeout": timedelta(seconds=60), "wait_for_workers": False}
    made = dist.TCPStore("localhost", 0, is_master=True, **options)
    monkeypatch.setitem(RANK_0, "MASTER_PORT", str(made.port))
    return dist.PrefixStore("minidp/doctor//0", made)


@pytest.fixture
def rank_1(store):
    return Meeting(store, 1, 2, 60)


def examine(env, wait=60, seconds=60):
    examination = Examination(env, seconds, wait)
    report = examination.run()
    assert report is not None
    return report, examination


def statuses(report):
    return {finding.check: finding.status for finding in report}


def finding_of(report, check, status=FAILED):
    (finding,) = [f for f in report if f.check == check and f.status is status]
    return finding


def test_interrupted_alone():
    examination = Examination({}, 60, 60)
    report = examination.interrupt()
    assert "Ctrl-C during" in finding_of(report, "interrupted", SKIPPED).found
    assert examination.runner.is_stuck


def test_a_world_of_one(store):
    report, _ = examine(RANK_0 | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    assert report.exit_code == 0
    assert statuses(report)["ranks"] is OK
    assert "one rank" in finding_of(report, "communication", SKIPPED).found


@pytest.mark.parametrize(("env", "absent"), [(RANK_0, 1), (RANK_0 | RANK_1, 0)])
def test_a_rank_that_does_not_come_is_named_by_the_first_that_came(store, env, absent):
    report, _ = examine(RANK_0 | env, wait=0.05)
    assert report.exit_code == 1
    assert f"rank {absent} said nothing" in finding_of(report, "rendezvous").found
    assert finding_of(report, "communication", SKIPPED)


def test_two_processes_with_one_rank(store, rank_1):
    Meeting(store, 0, 2, 1).claim()
    rank_1.post("facts", {"host": socket.gethostname(), "world_size": 2})
    rank_1.post("findings", [])
    report, _ = examine(RANK_0)
    assert "2 processes say that they are rank 0" in finding_of(report, "ranks").found
    assert finding_of(report, "communication", SKIPPED)


def test_another_rank_that_leaves(rank_1):
    finding = Finding("GPUs", FAILED, "none", "buy some")
    versions = {"torch": "0.0.1"}
    rank_1.post("facts", {"host": "h", "world_size": 2, "versions": versions})
    rank_1.post("findings", [finding.as_json()])
    report, examination = examine(RANK_0, seconds=5)
    assert any("0.0.1 on rank 1" in f.found for f in report if f.check == "versions")
    assert finding_of(report, "GPUs").ranks == (1,)
    assert finding_of(report, "gloo group").ranks == (0,)
    assert "clocks" not in statuses(report)
    assert examination.runner.is_stuck
    assert not dist.is_initialized()


def options(*words):
    parser = argparse.ArgumentParser(prog="minidp doctor")
    doctor.add_arguments(parser)
    return parser.parse_args(words)


def test_json_of_the_command(monkeypatch, capsys):
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    assert doctor.main(options("--json")) == 0
    plain = json.loads(capsys.readouterr().out)
    names = {"counts", "exit_code", "findings", "title", "version", "world_size"}
    assert {*plain} == names
    assert plain["version"] == 1
    assert sum(plain["counts"].values()) == len(plain["findings"])
    for finding in plain["findings"]:
        assert sorted(finding) == ["check", "found", "ranks", "remedy", "status"]
        assert finding["status"] in ("ok", "warning", "failed", "skipped")
    found = {finding["check"]: finding["status"] for finding in plain["findings"]}
    wanted = {"environment": "skipped", "other ranks": "skipped", "gloo": "ok"}
    assert wanted.items() <= found.items()


def test_a_failure_is_exit_status_1(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "")
    assert doctor.main(options()) == 1
    said = capsys.readouterr().out
    assert "failed   environment" in said
    assert "rendezvous" not in said  # what needs the environment is left out


@pytest.mark.parametrize("words", [("--timeout", "0"), ("--wait", "soon")])
def test_wrong_arguments_are_exit_status_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        options(*words)
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err
