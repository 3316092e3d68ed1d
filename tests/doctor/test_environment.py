"""Faults planted in facts of a machine and a job: each is found, a sound one not."""

from __future__ import annotations

import os
import socket
import threading
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import minidp
from minidp import accelerator
from minidp.doctor.checks import ranks
from minidp.doctor.checks.collectives import (
    judge_all_reduce,
    judge_backends,
    needed_backend,
)
from minidp.doctor.checks.environment import (
    judge_gpus,
    judge_launch,
    judge_shared_memory,
    judge_threads,
    read_launch,
)
from minidp.doctor.checks.network import (
    check_lighthouse,
    check_port,
    judge_interfaces,
    nccl_interfaces,
    read_interfaces,
)
from minidp.doctor.checks.variables import (
    KNOWN,
    judge_equal_variables,
    judge_variables,
    relevant,
)
from minidp.doctor.findings import named
from minidp.doctor.timebox import Runner
from tests.support.judged import FAILED, OK, SKIPPED, WARNING, judged, says
from tests.support.ports import free_port

SOUND = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
NODE_1 = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}


def launched(**changes):
    """A sound environment with changes; None takes a variable away."""
    env = {**SOUND, **changes}
    return {name: value for name, value in env.items() if value is not None}


def only(found):
    (finding,) = named("check", found)
    return finding


@judged(
    ({}, OK, "localhost:29500"),
    ({"MASTER_PORT": None}, FAILED, "MASTER_PORT not set"),
    ({"MASTER_ADDR": ""}, FAILED, "MASTER_ADDR not set"),
    ({"RANK": None, "WORLD_SIZE": None}, FAILED, "RANK and WORLD_SIZE not set"),
    ({"LOCAL_RANK": None}, WARNING, "which GPU"),
    ({"RANK": "one"}, FAILED, "RANK='one' is not a whole number"),
    ({"RANK": "-1"}, FAILED, "RANK='-1'"),
    ({"RANK": "4"}, FAILED, "RANK=4, but WORLD_SIZE=4"),
    ({"LOCAL_RANK": "2"}, FAILED, "LOCAL_RANK=2 is more than RANK=1"),
    ({"RANK": "3", "LOCAL_RANK": "2", **NODE_1}, FAILED, "2, but LOCAL_WORLD_SIZE=2"),
    ({"MASTER_PORT": "70000"}, FAILED, "no port"),
    ({"LOCAL_WORLD_SIZE": "2"}, FAILED, "MASTER_ADDR=localhost is this host"),
    (NODE_1, OK, "node1:29500"),
    (dict.fromkeys(SOUND), SKIPPED, "alone"),
)
def test_launch(changes):
    return judge_launch(launched(**changes))


RANK_0 = {"RANK": "0", "LOCAL_RANK": "0"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", **RANK_0}
OTHER_HOST = {"MASTER_ADDR": "192.0.2.1", **RANK_0}  # of the range for documentation


@judged(
    ({}, FAILED, "connection refused"),
    ({"MASTER_ADDR": "no such host"}, FAILED, "cannot be looked up"),
    (OTHER_HOST, WARNING, "no address of this host"),
    (RANK_0, OK, "is free for rank 0"),
    ({**RANK_0, "MASTER_ADDR": "127.9.9.9"}, OK, "is free for rank 0"),
)
def test_a_master_port_that_is_free(changes):
    return check_port(read_launch(launched(MASTER_PORT=str(free_port()), **changes)), 0)


@judged((RANK_0, FAILED, "is in use"), ({}, OK, "answers"), (AGENT, OK, "answers"))
def test_a_master_port_that_is_taken(changes):
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        return check_port(read_launch(launched(MASTER_PORT=port, **changes)), 20)


def test_a_host_that_does_not_answer(monkeypatch):
    def wait(*_):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", wait)
    finding = check_port(read_launch(SOUND), 2)
    says(finding, FAILED, "no answer within 2 s -> is the address that of rank 0?")


def test_a_lighthouse_of_torchft_that_does_not_answer_fails():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        says(check_lighthouse(url, 20), OK, f"{url} answers")
    for wrong in ("localhost", "localhost:29510", "http://"):
        says(check_lighthouse(wrong, 2), FAILED, f"{wrong} is no address")
    for wrong in (url, "http://localhost", "http://localhost:port"):
        finding = check_lighthouse(wrong, 2)
        says(finding, FAILED, f"TORCHFT_LIGHTHOUSE={wrong}: ")
        says(finding, FAILED, "-> start one with torchft_lighthouse")


LAN = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": ""}


@judged(
    ("", "10.0.0.5", True, OK, "Gloo uses eth0 (10.0.0.5)"),
    ("", "127.0.1.1", False, OK, "Gloo uses lo"),
    ("", "127.0.1.1", True, FAILED, "leads to no interface"),
    ("eth9", "10.0.0.5", False, FAILED, "no interface eth9"),
    ("lo", "10.0.0.5", True, FAILED, "Gloo uses lo"),
    ("lo", "10.0.0.5", False, OK, "from GLOO_SOCKET_IFNAME"),
    ("ib0", "10.0.0.5", True, OK, "Gloo uses ib0, from"),
)
def test_interface_of_gloo(wanted, host_address, several_hosts):
    env = {"GLOO_SOCKET_IFNAME": wanted}
    options = {"several_hosts": several_hosts, "uses_nccl": False}
    return judge_interfaces(env, LAN, host_address, **options)


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("", ["eth0", "ib0"]),
        ("eth", ["eth0"]),
        ("=eth", []),
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^lo,docker", ["eth0", "ib0"]),
        ("^=eth0", ["lo", "docker0", "ib0"]),
        ("wlan", []),
    ],
)
def test_interfaces_of_nccl(pattern, chosen):
    assert nccl_interfaces(pattern, ["lo", "docker0", "eth0", "ib0"]) == chosen
    env, options = {"NCCL_SOCKET_IFNAME": pattern}, {"several_hosts": False}
    _, nccl = judge_interfaces(env, LAN, "", uses_nccl=True, **options)
    assert (nccl.status is FAILED) is not bool(chosen)


def test_this_machine_has_interfaces():
    addresses, _ = read_interfaces()
    assert "127.0.0.1" in addresses.values()


@judged(
    ("NCCL_DEBUG", "INFO", OK, ""),
    ("NCCL_SOMETHING_NEW", "1", OK, "does not know"),
    ("GLOO_SOCKET_IFNAM", "eth0", WARNING, "did you mean GLOO_SOCKET_IFNAME?"),
    ("NCCL_SOKET_IFNAME", "eth0", WARNING, "did you mean NCCL_SOCKET_IFNAME?"),
    ("MINIDP_UNSYNCD", "warn", WARNING, "did you mean MINIDP_UNSYNCED?"),
    ("MINIDP_UNSYNCED", "warn", OK, ""),
    ("NCCL_BLOCKING_WAIT", "1", WARNING, "TORCH_NCCL_BLOCKING_WAIT"),
    ("CUDA_LAUNCH_BLOCKING", "1", WARNING, "no longer overlap"),
    ("CUDA_LAUNCH_BLOCKING", "0", OK, ""),
    ("TORCH_DISTRIBUTED_DEBUG", "detail", WARNING, "every collective is checked"),
    ("NCCL_P2P_DISABLE", "1", WARNING, "host's memory"),
    ("TORCHFT_TIMEOUT_SEC", "60", OK, ""),
    ("TORCHFT_TIMEOUT_SEC", "abc", FAILED, "write it like TORCHFT_TIMEOUT_SEC=60"),
    ("TORCHFT_QUORUM_RETRIES", "1.5", FAILED, "no whole number"),
)
def test_a_variable_that_is_set(name, value):
    found = judge_variables({name: value, "HOME": "/root"})
    assert only(found).found.startswith(f"{name}={value}")
    return found


def test_variables():
    says(judge_variables({"HOME": "/root"}), OK, "no NCCL_*")
    assert relevant({"HOME": "/root", "NCCL_X": "1"}) == {"NCCL_X": "1"}
    for name in KNOWN:  # none is a typo of another one
        assert "unknown" not in only(judge_variables({name: "2"})).found


@judged(
    ({"NCCL_ALGO": "Ring"}, {}, WARNING, "NCCL_ALGO is Ring on rank 0 and (not set)"),
    ({"NCCL_SOCKET_IFNAME": "a"}, {"NCCL_SOCKET_IFNAME": "b"}, OK, "equal"),
)
def test_variables_that_differ_between_ranks(first, second):
    return judge_equal_variables({0: {"variables": first}, 1: {"variables": second}})


@judged(
    ({}, 0, 2, SKIPPED, "no GPU"),
    ({}, 4, 4, OK, "4 GPUs for 4"),
    ({}, 2, 4, FAILED, "--nproc-per-node"),
    ({}, 8, 4, WARNING, "idle"),
    ({"CUDA_VISIBLE_DEVICES": "3"}, 1, 4, WARNING, "cuda:0"),
)
def test_gpus_against_processes(env, gpus, processes):
    found = {"count": lambda: gpus, "kind": lambda: "cuda"}
    with mock.patch.multiple(accelerator, **found):
        return judge_gpus(env, processes)


@pytest.mark.parametrize(
    ("free", "status"), [(2**33, OK), (64 * 2**20, WARNING), (2**20, FAILED)]
)
def test_shared_memory(free, status, monkeypatch):
    says(judge_shared_memory(), OK, "/dev/shm: ")
    usage = namedtuple("usage", "total used free")(2**33, 0, free)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    says(judge_shared_memory(), status, "of 8 GiB")


@judged(
    (8, 1, OK, ""),
    (2, 4, OK, ""),
    (1, 8, OK, ""),
    (8, 4, WARNING, "set OMP_NUM_THREADS=2"),
    (2, 16, WARNING, "set OMP_NUM_THREADS=1"),
    # It is 1: to set that would change nothing.
    (1, 16, WARNING, "start at most 8 on this host"),
)
def test_threads(threads, processes):
    with (
        mock.patch.object(torch, "get_num_threads", return_value=threads),
        mock.patch.object(os, "cpu_count", return_value=8),
    ):
        return judge_threads(processes)


@judged(
    ("gloo", True, OK, "gloo would be used"),
    ("nccl", True, OK, "nccl would be used"),
    ("xccl", True, OK, "xccl would be used"),
    ("nccl", False, FAILED, "built with nccl"),
    ("gloo", False, FAILED, "built with gloo"),
)
def test_backends(needed, is_there):
    with mock.patch.object(dist, f"is_{needed}_available", return_value=is_there):
        return judge_backends(needed)


def test_a_device_without_a_backend(monkeypatch):
    monkeypatch.setattr(accelerator, "kind", lambda: "meta")
    assert needed_backend() == ""
    says(judge_backends(""), FAILED, "none for meta")


@judged(
    ("torch", "2.13.0", "2.13.0", OK, "torch 2.13.0"),
    ("torch", "2.13.0", "2.12.0", FAILED, "2.13.0 on rank 0, 2.12.0 on rank 1"),
    ("numpy", "2.4.6", "1.26.4", WARNING, "gradients do not depend on it"),
    ("numpy", "2.4.6", None, WARNING, "gradients do not depend on it"),
    ("python", "3.11.7", "3.11.9", WARNING, "gradients do not depend on it"),
    ("python", "3.11.7", "3.12.0", FAILED, "3.11.7 on rank 0, 3.12.0 on rank 1"),
    ("minidp", "0.1.0 (sources a)", "0.1.0 (sources b)", FAILED, "sources b"),
    ("nccl", "2.27", "2.28", FAILED, "nccl"),
)
def test_versions(name, *versions):
    plain = [{} if version is None else {name: version} for version in versions]
    return ranks.judge_versions({r: {"versions": v} for r, v in enumerate(plain)})


@judged(
    (("a", ""), ("a", ""), SKIPPED, "no rank"),
    (("a", "g0"), ("a", "g1"), ("b", "g0"), OK, "its own"),
    (("a", "g0"), ("a", "g0"), FAILED, "ranks 0 and 1 use the same GPU"),
    (("a", "g0"), ("b", ""), FAILED, "no GPU on rank 1"),
)
def test_one_gpu_for_each_process(*owners):
    facts = {rank: {"host": h, "gpu": g} for rank, (h, g) in enumerate(owners)}
    return ranks.judge_owners(facts)


@judged(
    (0.0, 0.004, OK, "10 ms"),
    (0.0, -0.05, OK, "0.1 s"),
    (0.0, 0.3, -120.0, WARNING, "rank 2 is -120.0 s off"),
)
def test_clocks(*offsets):
    return ranks.judge_clocks(offsets)


@judged(
    ((2, 3), "aa", 1, FAILED, "WORLD_SIZE is 2 and 3"),
    ((2, 2), "ab", 1, OK, "2 of 2 came, on 2 host"),
    ((3, 3), "aa", 1, WARNING, "2 of 3 came, on 1 host"),
    ((2, 2), "aa", 2, FAILED, "2 processes say that they are rank 1"),
)
def test_number_of_ranks(sizes, hosts, claims):
    facts = [{"host": h, "world_size": s} for h, s in zip(hosts, sizes, strict=True)]
    return [*ranks.judge_ranks(facts, 1, claims)][claims - 1 :]


def test_facts():
    facts = ranks.read_facts({"NCCL_ALGO": "Ring"}, world_size=2, local_rank=0)
    assert facts["variables"] == {"NCCL_ALGO": "Ring"}
    assert {"python", "torch", "numpy", "minidp"} <= {*facts["versions"]}
    assert Path(minidp.__file__).parent == ranks.PACKAGE  # whose sources are hashed


@judged(
    (4, 0.001, 0, OK, "4 B: right; 1.00 ms"),
    (2**20, 0.002, 0, OK, "1,048,576 B: right; 2.00 ms, 524.3 MB/s"),
    (2**20, 0.2, 0, WARNING, "5.2 MB/s"),
    (2**16, 0.2, 0, OK, "65,536 B"),
    (2**20, 0.001, 7, FAILED, "7 elements"),
)
def test_all_reduce(num_bytes, seconds, wrong):
    return judge_all_reduce(num_bytes, 2, seconds, wrong)


@pytest.mark.parametrize(
    ("check", "load", "firewall", "busy"),
    [
        ("gloo group", 0.0, True, False),
        ("all-reduce, NCCL", 0.0, True, False),
        ("all-reduce, Gloo", 0.0, False, False),  # uses connections that there are
        ("gradients, Gloo", 1e6, False, True),
        ("rendezvous", 1e6, True, True),
    ],
)
def test_a_check_that_did_not_end(check, load, firewall, busy, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    runner, never = Runner(20), threading.Event()
    assert not runner.run(check, never.wait, seconds=0)
    never.set()
    says(runner.findings, FAILED, "did not end within 0 s")
    remedy = only(runner.findings).remedy
    assert ("firewall" in remedy) is firewall
    assert ("busy (load 1000000 on" in remedy) is busy
