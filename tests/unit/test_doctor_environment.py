"""Faults planted in a machine's and a job's facts: each is found, a sound one is not.

Pure: environment, interfaces, versions and measurements are given as data.
"""

from __future__ import annotations

import errno
import os
import socket
import threading

import pytest

from minidp.doctor import _checks_network
from minidp.doctor._checks_collectives import (
    judge_all_reduce,
    judge_backends,
    judge_gradients,
)
from minidp.doctor._checks_environment import (
    judge_gpus,
    judge_launch,
    judge_shared_memory,
    judge_threads,
    read_launch,
    read_shared_memory,
)
from minidp.doctor._checks_network import (
    Network,
    check_port,
    is_of_this_host,
    judge_interfaces,
    nccl_interfaces,
    read_network,
)
from minidp.doctor._checks_ranks import (
    Facts,
    judge_claims,
    judge_clocks,
    judge_facts,
    judge_owners,
    judge_versions,
    read_facts,
)
from minidp.doctor._findings import Status
from minidp.doctor._timebox import Limits, Runner
from minidp.doctor._variables import (
    MEANINGS,
    judge_equal_variables,
    judge_variables,
    relevant,
)

OK, WARNING, FAILED, SKIPPED = Status
SOUND = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def launched(**changes):
    """A sound environment with changes; None takes a variable away."""
    env = {**SOUND, **changes}
    return {name: value for name, value in env.items() if value is not None}


def only(findings):
    (finding,) = findings if isinstance(findings, list) else [findings]
    return finding


# ----------------------------------------------------------------- how it was started


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, OK, "localhost:29500"),
        ({"MASTER_PORT": None}, FAILED, "MASTER_PORT not set"),
        ({"MASTER_ADDR": ""}, FAILED, "MASTER_ADDR not set"),
        ({"RANK": None, "WORLD_SIZE": None}, FAILED, "RANK and WORLD_SIZE not set"),
        ({"LOCAL_RANK": None}, WARNING, "which GPU"),
        ({"RANK": "one"}, FAILED, "RANK='one' is not a whole number"),
        ({"RANK": "-1"}, FAILED, "RANK='-1'"),
        ({"RANK": "4"}, FAILED, "RANK=4, but WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2"}, FAILED, "LOCAL_RANK=2 is more than RANK=1"),
        (
            {
                "RANK": "3",
                "LOCAL_RANK": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "node1",
            },
            FAILED,
            "LOCAL_RANK=2, but LOCAL_WORLD_SIZE=2",
        ),
        ({"MASTER_PORT": "70000"}, FAILED, "no port"),
        ({"LOCAL_WORLD_SIZE": "2"}, FAILED, "MASTER_ADDR=localhost is this host"),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, OK, "node1:29500"),
        (dict.fromkeys(SOUND), SKIPPED, "alone"),
    ],
)
def test_launch(changes, status, words):
    finding = only(judge_launch(launched(**changes)))
    assert finding.status is status
    assert words in finding.found


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture
def listener():
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def port_check(seconds=0.05, **changes):
    return check_port(read_launch(launched(**changes)), seconds)


def test_port_that_nobody_listens_on():
    finding = port_check(MASTER_PORT=str(free_port()))
    assert finding.status is FAILED
    assert "connection refused" in finding.found


def rank_0s_check(port, **changes):
    return port_check(2.0, RANK="0", LOCAL_RANK="0", MASTER_PORT=str(port), **changes)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "0.0.0.0", "127.9.9.9"])
def test_an_address_of_this_host(address):
    assert is_of_this_host(address)
    finding = rank_0s_check(free_port(), MASTER_ADDR=address)
    assert finding.status is OK
    assert finding.found.endswith("is free for rank 0")


def test_addresses_of_other_hosts():
    # Of the range for documentation; nothing is sent to it.
    assert not is_of_this_host("192.0.2.1")


@pytest.fixture
def elsewhere(monkeypatch):
    """The store's address is not one of this host's: a connection has to tell."""
    monkeypatch.setattr(_checks_network, "is_of_this_host", lambda _: False)


def test_an_address_that_is_translated_to_this_hosts(elsewhere):
    finding = rank_0s_check(free_port())
    assert finding.status is OK
    assert finding.found.endswith("and the address leads here")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), "connection refused"),
        (OSError(errno.EHOSTUNREACH, ""), "no route to host"),
        (TimeoutError(), "no answer within 2 s"),
    ],
)
def test_an_address_that_does_not_lead_to_rank_0(error, why, elsewhere, monkeypatch):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(socket, "create_connection", refuse)
    finding = rank_0s_check(free_port())
    assert finding.status is FAILED
    assert finding.found.endswith(f"does not lead to this host: {why}")
    assert "this host has " in finding.remedy
    assert "127.0.0.1" in finding.remedy


def test_an_address_at_which_another_host_answers(elsewhere, monkeypatch, listener):
    plain = socket.create_connection

    def connect_to_another(_, timeout):
        return plain(("localhost", listener), timeout)

    monkeypatch.setattr(socket, "create_connection", connect_to_another)
    monkeypatch.setattr(_checks_network, "_OWN_SECONDS", 0.1)
    finding = rank_0s_check(free_port())
    assert finding.status is FAILED
    assert finding.found.endswith("another host answers there")


def test_an_early_rank_is_not_taken_for_rank_0_itself(elsewhere, monkeypatch):
    port, plain = free_port(), socket.create_connection

    def connect_after_another(place, timeout):
        plain(place, timeout).close()
        return plain(place, timeout)

    monkeypatch.setattr(socket, "create_connection", connect_after_another)
    assert rank_0s_check(port).status is OK


def test_port_in_use_by_another(listener):
    finding = port_check(RANK="0", LOCAL_RANK="0", MASTER_PORT=str(listener))
    assert finding.status is FAILED
    assert finding.found == f"port {listener} is in use"


def test_address_that_cannot_be_looked_up():
    finding = port_check(MASTER_ADDR="no such host")
    assert finding.status is FAILED
    assert "MASTER_ADDR=no such host cannot be looked up" in finding.found


def test_ports_that_are_well(listener):
    assert port_check(MASTER_PORT=str(listener), seconds=20).status is OK
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "LOCAL_RANK": "0"}
    assert port_check(MASTER_PORT=str(listener), seconds=20, **agents).status is OK
    free = port_check(RANK="0", LOCAL_RANK="0", MASTER_PORT=str(free_port()))
    assert free.status is OK


# ------------------------------------------------------------------------ the network

LAN = Network({"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": ""}, "10.0.0.5")
LOOPBACK = Network(LAN.addresses, "127.0.1.1")


@pytest.mark.parametrize(
    ("env", "network", "several_hosts", "status", "words"),
    [
        ({}, LAN, True, OK, "Gloo uses eth0 (10.0.0.5)"),
        ({}, LOOPBACK, False, OK, "Gloo uses lo"),
        ({}, LOOPBACK, True, FAILED, "leads to no interface"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, LAN, False, FAILED, "no interface eth9"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, LAN, True, FAILED, "Gloo uses lo"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, LAN, False, OK, "from GLOO_SOCKET_IFNAME"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, LAN, True, OK, "Gloo uses ib0, from"),
    ],
)
def test_interface_of_gloo(env, network, several_hosts, status, words):
    finding = only(
        judge_interfaces(env, network, several_hosts=several_hosts, has_gpus=False)
    )
    assert finding.status is status
    assert words in finding.found


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


def test_nccl_without_an_interface_is_a_failure():
    env = {"NCCL_SOCKET_IFNAME": "wlan"}
    found = judge_interfaces(env, LAN, several_hosts=False, has_gpus=True)
    assert [f.status for f in found] == [OK, FAILED]


def test_this_machine_has_interfaces():
    assert read_network().addresses


# ------------------------------------------------------------------------ variables


@pytest.mark.parametrize(
    ("name", "value", "status", "words"),
    [
        ("NCCL_DEBUG", "INFO", OK, "what NCCL logs"),
        ("NCCL_SOMETHING_NEW", "1", OK, "not known"),
        ("GLOO_SOCKET_IFNAM", "eth0", WARNING, "did you mean GLOO_SOCKET_IFNAME?"),
        ("NCCL_SOKET_IFNAME", "eth0", WARNING, "did you mean NCCL_SOCKET_IFNAME?"),
        ("MINIDP_UNSYNCD", "warn", WARNING, "did you mean MINIDP_UNSYNCED?"),
        ("MINIDP_UNSYNCED", "warn", OK, "unsynced of every DataParallel"),
        ("NCCL_BLOCKING_WAIT", "1", WARNING, "TORCH_NCCL_BLOCKING_WAIT"),
        ("CUDA_LAUNCH_BLOCKING", "1", WARNING, "no longer overlap"),
        ("CUDA_LAUNCH_BLOCKING", "0", OK, "waits for every kernel"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", WARNING, "every collective is checked"),
        ("NCCL_P2P_DISABLE", "1", WARNING, "host's memory"),
    ],
)
def test_a_variable_that_is_set(name, value, status, words):
    finding = only(judge_variables({name: value, "HOME": "/root"}))
    assert finding.status is status
    assert finding.found.startswith(f"{name}={value}: ")
    assert words in f"{finding.found} {finding.remedy}"


def test_no_variable_is_set():
    assert only(judge_variables({"HOME": "/root"})).status is OK
    assert relevant({"HOME": "/root", "NCCL_X": "1"}) == {"NCCL_X": "1"}


def test_meanings_are_no_typos_of_each_other():
    for name in MEANINGS:
        assert "nobody reads" not in only(judge_variables({name: "2"})).found


def test_variables_that_differ_between_ranks():
    found = judge_equal_variables({0: {"NCCL_ALGO": "Ring"}, 1: {}})
    assert only(found).status is WARNING
    assert only(found).found == "NCCL_ALGO is Ring on rank 0, (not set) on rank 1"
    interfaces = {0: {"NCCL_SOCKET_IFNAME": "eth0"}, 1: {"NCCL_SOCKET_IFNAME": "eth1"}}
    assert only(judge_equal_variables(interfaces)).status is OK


# ---------------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("env", "gpus", "processes", "status", "words"),
    [
        ({}, 0, 2, SKIPPED, "no GPU"),
        ({}, 4, 4, OK, "4 GPUs for 4"),
        ({}, 2, 4, FAILED, "--nproc-per-node"),
        ({}, 8, 4, WARNING, "idle"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1, 4, WARNING, "cuda:0"),
    ],
)
def test_gpus_against_processes(env, gpus, processes, status, words):
    finding = judge_gpus(env, gpus, processes)
    assert finding.status is status
    assert words in f"{finding.found} {finding.remedy}"


@pytest.mark.parametrize(
    ("free", "status"), [(2**33, OK), (64 * 2**20, WARNING), (2**20, FAILED)]
)
def test_shared_memory(free, status):
    finding = judge_shared_memory(2**33, free)
    assert finding.status is status
    assert "8 GiB" in finding.found


def test_shared_memory_of_this_machine(tmp_path):
    total, free = read_shared_memory(str(tmp_path))
    assert total >= free > 0


@pytest.mark.parametrize(
    ("threads", "processes", "status", "remedy"),
    [
        (8, 1, OK, ""),
        (2, 4, OK, ""),
        (1, 8, OK, ""),
        (8, 4, WARNING, "set OMP_NUM_THREADS=2"),
        (2, 16, WARNING, "set OMP_NUM_THREADS=1"),
        # It is 1: to set that would change nothing.
        (1, 16, WARNING, "start at most 8 on this host"),
    ],
)
def test_threads(threads, processes, status, remedy):
    finding = judge_threads(threads, processes, cores=8)
    assert finding.status is status
    assert remedy in finding.remedy
    assert ("OMP_NUM_THREADS" in finding.remedy) == ("OMP_NUM_THREADS" in remedy)


@pytest.mark.parametrize(
    ("backends", "has_gpus", "status"),
    [
        (["gloo"], False, OK),
        (["gloo", "nccl"], True, OK),
        (["gloo"], True, FAILED),
        ([], False, FAILED),
    ],
)
def test_backends(backends, has_gpus, status):
    assert judge_backends(backends, has_gpus=has_gpus).status is status


# -------------------------------------------------------------------- several ranks


def test_versions_that_differ():
    same = {"torch": "2.13.0", "python": "3.11.7"}
    assert only(judge_versions({0: same, 1: same})).status is OK
    finding = only(judge_versions({0: same, 1: {**same, "torch": "2.12.0"}}))
    assert finding.status is FAILED
    assert finding.found == "torch 2.13.0 on rank 0, 2.12.0 on rank 1"


@pytest.mark.parametrize(
    ("name", "versions", "status", "words"),
    [
        ("numpy", ("2.4.6", "1.26.4"), WARNING, "gradients do not depend on it"),
        ("numpy", ("2.4.6", None), WARNING, "gradients do not depend on it"),
        ("python", ("3.11.7", "3.11.9"), WARNING, "gradients do not depend on it"),
        ("python", ("3.11.7", "3.12.0"), FAILED, "3.11.7 on rank 0, 3.12.0 on rank 1"),
        ("minidp", ("0.1.0 (sources a)", "0.1.0 (sources b)"), FAILED, "sources b"),
        ("nccl", ("2.27", "2.28"), FAILED, "nccl"),
    ],
)
def test_versions_matter_as_far_as_gradients_depend_on_them(
    name, versions, status, words
):
    plain = [{} if version is None else {name: version} for version in versions]
    finding = only(judge_versions(dict(enumerate(plain))))
    assert finding.status is status
    assert words in finding.found


@pytest.mark.parametrize(
    ("owners", "status", "words"),
    [
        ({0: ("a", ""), 1: ("a", "")}, SKIPPED, "no rank"),
        ({0: ("a", "g0"), 1: ("a", "g1"), 2: ("b", "g0")}, OK, "its own"),
        ({0: ("a", "g0"), 1: ("a", "g0")}, FAILED, "ranks 0 and 1 use the same GPU"),
        ({0: ("a", "g0"), 1: ("b", "")}, FAILED, "no GPU on rank 1"),
    ],
)
def test_one_gpu_for_each_process(owners, status, words):
    finding = judge_owners(owners)
    assert finding.status is status
    assert words in finding.found


@pytest.mark.parametrize(
    ("offsets", "status", "words"),
    [
        ([0.0, 0.004], OK, "10 ms"),
        ([0.0, -0.05], OK, "0.1 s"),
        ([0.0, 0.3, -120.0], WARNING, "rank 2 is -120.0 s off"),
    ],
)
def test_clocks(offsets, status, words):
    finding = judge_clocks(offsets)
    assert finding.status is status
    assert words in finding.found


def test_ranks_that_do_not_agree_on_their_number():
    facts = {0: Facts("a", 2), 1: Facts("a", 3)}
    finding = judge_facts(facts)[0]
    assert finding.status is FAILED
    assert "WORLD_SIZE is 2 and 3" in finding.found
    assert judge_facts({0: Facts("a", 2), 1: Facts("b", 2)})[0].found == (
        "2 came, on 2 hosts"
    )


def test_two_processes_with_one_rank():
    assert judge_claims(1, 1) == []
    assert only(judge_claims(1, 2)).status is FAILED


def test_facts_travel_as_plain_data():
    facts = read_facts({"NCCL_ALGO": "Ring"}, world_size=2, local_rank=0)
    assert Facts.of_json({**facts.as_json(), "from a newer version": 1}) == facts
    assert facts.variables == {"NCCL_ALGO": "Ring"}
    assert {"python", "torch", "numpy", "minidp"} <= {*facts.versions}


# --------------------------------------------------------------------- measurements


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "wrong", "status", "words"),
    [
        (4, 0.001, 0, OK, "4 B: right; 1 ms"),
        (2**20, 0.002, 0, OK, "1 MiB: right; 2 ms, 0.524 GB/s"),
        (2**20, 0.2, 0, WARNING, "5.24 MB/s"),
        (2**16, 0.2, 0, OK, "64 KiB"),
        (2**20, 0.001, 7, FAILED, "7 elements"),
    ],
)
def test_all_reduce(num_bytes, seconds, wrong, status, words):
    finding = judge_all_reduce("c", num_bytes, 2, seconds=seconds, wrong=wrong)
    assert finding.status is status
    assert words in finding.found


@pytest.mark.parametrize(
    ("wrong", "sums", "same_as_torch", "status", "words"),
    [
        ([], [[1, 2], [1, 2]], True, OK, "with torch's DDP"),
        ([], [[1, 2], [1, 2]], False, WARNING, "other bits"),
        (["w"], [[1, 2], [1, 2]], True, FAILED, "w did not get the mean"),
        ([], [[1, 2], [1, 2], [1, 3]], True, FAILED, "on rank 2 than on rank 0"),
    ],
)
def test_gradients_of_the_probe(wrong, sums, same_as_torch, status, words):
    finding = judge_gradients("c", wrong=wrong, sums=sums, same_as_torch=same_as_torch)
    assert finding.status is status
    assert words in finding.found


# ---------------------------------------------------------------- what did not end


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
def test_a_check_that_did_not_end_names_likely_causes(
    check, load, firewall, busy, monkeypatch
):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    runner, never = Runner(Limits()), threading.Event()
    assert not runner.run(check, never.wait, seconds=0)
    never.set()
    finding = only(runner.findings)
    assert finding.status is FAILED
    assert ("firewall" in finding.remedy) is firewall
    assert ("busy (load 1000000 on" in finding.remedy) is busy
