"""``minidp doctor`` in this process, which also plays torchrun and the other ranks."""

from __future__ import annotations

import argparse
import json
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from minidp import doctor
from minidp.doctor.command import Examination
from minidp.doctor.findings import Finding, Status
from minidp.doctor.meeting import Meeting


class Job:
    """A job of two ranks; this test keeps the store, and is rank 1."""

    def __init__(self):
        self.store = dist.TCPStore(
            "localhost",
            0,
            is_master=True,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
        room = dist.PrefixStore("minidp/doctor//0", self.store)
        self.rank_1 = Meeting(room, 1, 2, 60)

    def environment(self, **changes):
        return {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
            **changes,
        }


@pytest.fixture
def job():
    return Job()


def examine(env, wait=60):
    examination = Examination(env, 60, wait)
    report = examination.run()
    assert report is not None
    return report, examination


def statuses(report):
    return {finding.check: finding.status for finding in report}


def finding_of(report, check, status=Status.FAILED):
    (finding,) = [f for f in report if f.check == check and f.status is status]
    return finding


def test_interrupted_alone():
    examination = Examination({}, 60, 60)
    report = examination.interrupt()
    assert "Ctrl-C during" in finding_of(report, "interrupted", Status.SKIPPED).found
    assert examination.runner.is_stuck
    examination.end(is_printed=True)  # nobody to tell


def test_a_world_of_one(job):
    env = job.environment(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    report, _ = examine(env)
    assert report.exit_code == 0
    assert statuses(report)["ranks"] is Status.OK
    assert "one rank" in finding_of(report, "communication", Status.SKIPPED).found


def test_a_rank_that_does_not_come_is_named(job):
    report, _ = examine(job.environment(), wait=0.05)
    assert report.exit_code == 1
    assert "rank 1 said nothing" in finding_of(report, "rendezvous").found
    assert finding_of(report, "communication", Status.SKIPPED)


def test_the_first_rank_that_came_speaks_for_all(job):
    report, _ = examine(job.environment(RANK="1", LOCAL_RANK="1"), wait=0.05)
    assert "rank 0 said nothing" in finding_of(report, "rendezvous").found


def test_two_processes_with_one_rank(job):
    Meeting(job.rank_1._store, 0, 2, 1).claim()
    job.rank_1.post("facts", {"host": socket.gethostname(), "world_size": 2})
    job.rank_1.post("findings", [])
    report, _ = examine(job.environment())
    assert "2 processes say that they are rank 0" in finding_of(report, "ranks").found
    assert finding_of(report, "communication", Status.SKIPPED)


def test_another_rank_that_leaves(job):
    versions = {"torch": "0.0.1"}
    facts = {"host": "h", "world_size": 2, "versions": versions}
    finding = Finding("GPUs", Status.FAILED, "none", "buy some")
    job.rank_1.post("facts", facts)
    job.rank_1.leave("left: its check 'gloo group' failed")
    job.rank_1.post("findings", [finding.as_json()])
    report, examination = examine(job.environment())
    assert any("0.0.1 on rank 1" in f.found for f in report if f.check == "versions")
    assert finding_of(report, "GPUs").ranks == (1,)
    found = finding_of(report, "gloo group").found
    assert found == "rank 1 left: its check 'gloo group' failed"
    assert "clocks" not in statuses(report)
    assert examination.runner.is_stuck
    assert not dist.is_initialized()


def options(*words):
    parser = argparse.ArgumentParser(prog="minidp doctor")
    doctor.add_arguments(parser)
    return parser.parse_args(words)


def test_json_of_the_command(monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
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
