"""Examples as their docstrings say to start them: on two nodes, and by mp.spawn.

`tests/run.sh examples` starts all of them on one node.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nodes import run_on_nodes, why_not
from tests.support.warm import warm_python

pytestmark = pytest.mark.fresh

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ON_TWO_NODES = pytest.mark.skipif(bool(why_not()), reason=f"two nodes: {why_not()}")
SLURM = {
    "SLURM_JOB_ID": "4217",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_GPUS_ON_NODE": "1",
    "PYTHON": sys.executable,
}


def environment() -> dict[str, str]:
    """Ours, without a launcher's variables; Gloo is to find its interface by itself."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return kept | {"PYTHONPATH": str(ROOT)}


def documented_command() -> list[str]:
    """The command for two nodes in torchrun_ddp.py's docstring, for HEAD = node0."""
    text = (EXAMPLES / "torchrun_ddp.py").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ +python (.*--nnodes 2 .*)$", text, flags=re.MULTILINE)
    return [sys.executable, *shlex.split(line.replace("HEAD", "node0"))]


def slurms_command(directory: Path, *arguments: str) -> list[str]:
    """What two_nodes.sbatch lets srun start on every node."""
    fakes = {
        "scontrol": '[ "$*" = "show hostnames node[0-1]" ] && echo "node0\nnode1"',
        "srun": 'printf "%s\\n" "$@"',
    }
    for name, script in fakes.items():
        fake = directory / name
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
    path = f"{directory}:{os.environ['PATH']}"
    batch = ["bash", str(EXAMPLES / "two_nodes.sbatch"), *arguments]
    env = environment() | SLURM | {"PATH": path}
    done = subprocess.run(batch, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@ON_TWO_NODES
@pytest.mark.parametrize(
    "how", [pytest.param("by hand", marks=pytest.mark.nightly), "slurm"]
)
def test_one_script_trains_on_two_nodes(how: str, tmp_path: Path) -> None:
    if how == "slurm":
        command, per_node = slurms_command(tmp_path), 1
    else:
        command, per_node = documented_command(), 2
    warm = [sys.executable, "-m", "tests.support.warm", "run", *command[1:], "--smoke"]
    nodes = run_on_nodes([warm] * 2, tmp_path, environment(), cwd=ROOT)
    assert [node.returncode for node in nodes] == [0, 0], nodes
    head, other = (node.output for node in nodes)
    said = head if "ranks:" in head else other  # rank 0 may be on either
    assert f"ranks: {2 * per_node}, nodes: 2" in said
    assert "equal weights on all ranks: yes" in said
    for rank in range(2 * per_node):
        assert re.search(rf"^rank {rank} on node[01], ", said, flags=re.MULTILINE), said


def test_slurms_command_takes_another_script_and_its_arguments(tmp_path: Path) -> None:
    command = slurms_command(tmp_path, "examples/gpt.py", "--steps", "5 000")
    assert command == [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-id", "4217", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "node0:24217"),
        *("examples/gpt.py", "--steps", "5 000"),
    ]


def test_getting_started_spawns_its_processes() -> None:
    done = subprocess.run(
        [warm_python(), EXAMPLES / "getting_started.py", "--smoke"],
        env=environment() | {"GLOO_SOCKET_IFNAME": os.environ["GLOO_SOCKET_IFNAME"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    demos = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert demos == ["basic", "before saving", "after loading", "model parallel"]
    assert done.stdout.count("equal on 2 ranks") == len(demos)


def test_without_a_launcher_an_example_says_how_to_start_it() -> None:
    script = EXAMPLES / "torchrun_ddp.py"
    done = subprocess.run(
        [warm_python(), script],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Started without a launcher.\n")
    assert "--standalone --nproc-per-node 2" in done.stderr
    assert "Traceback" not in done.stderr
