"""Facts that ranks compare with each other: who they are, what they run, what they own.

Facts are plain data, gathered by a `Meeting`; every ``judge_*`` is pure.
"""

from __future__ import annotations

import hashlib
import platform
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidp._version import __version__

from ._findings import Finding, failed, join, of_ranks, ok, skipped, warning
from ._variables import judge_equal_variables, relevant

WORST_SKEW_SECONDS = 1.0


@dataclass(frozen=True)
class Facts:
    """What one process tells the others.

    Args:
        host: its name.
        world_size: what it takes for the number of processes.
        gpu: identity of the GPU of its local rank; empty: none.
        versions: package -> version.
        variables: settings that change how ranks communicate.
    """

    host: str
    world_size: int = 0
    gpu: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data; `of_json` is its inverse."""
        return asdict(self)

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> Facts:
        """From what a rank said, perhaps one with another version of this class."""
        return cls(**{f.name: plain[f.name] for f in fields(cls) if f.name in plain})


def read_facts(
    env: Mapping[str, str], *, world_size: int, local_rank: int | None
) -> Facts:
    """Those of this process."""
    return Facts(
        host=socket.gethostname(),
        world_size=world_size,
        gpu=gpu_identity(local_rank),
        versions=read_versions(),
        variables=relevant(env),
    )


def read_versions() -> dict[str, str]:
    """Of Python and of the packages whose differences break a job."""
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "minidp": f"{__version__} (sources {_digest_of_sources()})",
    }
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        nccl: Any = torch.cuda.nccl
        versions["nccl"] = ".".join(map(str, nccl.version()))
    return versions


def _digest_of_sources() -> str:
    """Of all of minidp: two checkouts of one version may differ, this tells."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def gpu_identity(local_rank: int | None) -> str:
    """The same for two processes exactly if they would use the same GPU."""
    count = torch.cuda.device_count()
    if not count:
        return ""
    # A process that sees one GPU has no choice; else the local rank is its number.
    index = 0 if count == 1 else local_rank
    if index is None or index >= count:
        return ""
    return uuid_of(torch.device("cuda", index))


def uuid_of(device: torch.device) -> str:
    """The same for two processes exactly if they mean the same GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


def judge_facts(of_rank: Mapping[int, Facts]) -> list[Finding]:
    """Everything that ranks can compare before they communicate."""
    return [
        _judge_ranks(of_rank),
        *judge_versions({r: facts.versions for r, facts in of_rank.items()}),
        *judge_equal_variables({r: facts.variables for r, facts in of_rank.items()}),
        judge_owners({r: (facts.host, facts.gpu) for r, facts in of_rank.items()}),
    ]


def _judge_ranks(of_rank: Mapping[int, Facts]) -> Finding:
    check = "ranks"
    sizes = {facts.world_size for facts in of_rank.values()}
    if len(sizes) > 1:
        found = f"WORLD_SIZE is {join(sorted(sizes))} on different ranks"
        return failed(check, found, "start all ranks with the same WORLD_SIZE")
    hosts = {facts.host for facts in of_rank.values()}
    noun = "host" if len(hosts) == 1 else "hosts"
    came, all_ranks = len(of_rank), max(sizes)
    if came < all_ranks:
        found = f"{came} of {all_ranks} came, on {len(hosts)} {noun}"
        return warning(check, found, "what follows is of these only")
    return ok(check, f"{came} came, on {len(hosts)} {noun}")


def judge_claims(rank: int, claims: int) -> list[Finding]:
    """Whether ``claims`` processes say that they are ``rank``."""
    if claims <= 1:
        return []
    found = f"{claims} processes say that they are rank {rank}"
    return [failed("ranks", found, "give every process a RANK of its own")]


def judge_versions(of_rank: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """Whether all ranks run the same software."""
    check = "versions"
    findings = []
    for name in sorted({name for versions in of_rank.values() for name in versions}):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, versions in of_rank.items():
            ranks_of[versions.get(name, "missing")].append(rank)
        if len(ranks_of) > 1:
            places = (f"{v} on {of_ranks(ranks)}" for v, ranks in ranks_of.items())
            found = f"{name} {', '.join(places)}"
            remedy = "install the same everywhere: one image, or one lock file"
            harm = _harm_of(name, ranks_of)
            findings.append(
                warning(check, f"{found}: {harm}", remedy)
                if harm
                else failed(check, found, remedy)
            )
    if findings:
        return findings
    same = next(iter(of_rank.values()))
    said = join(f"{name} {version}" for name, version in same.items())
    return [ok(check, said or "no rank said any")]


def _harm_of(name: str, versions: Collection[str]) -> str:
    """What may differ, if that is not what ranks send each other; empty: that does."""
    releases = {version.rpartition(".")[0] for version in versions}
    if name == "numpy":
        return (
            "gradients do not depend on it, but the numbers that loaders draw, and "
            "pickled arrays, may"
        )
    if name == "python" and len(releases) == 1:
        return "only the last number differs, and gradients do not depend on it"
    return ""


def judge_owners(of_rank: Mapping[int, tuple[str, str]]) -> Finding:
    """Whether every process has a GPU of its own; rank -> (host, GPU)."""
    check = "one GPU each"
    ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, (host, gpu) in of_rank.items():
        if gpu:
            ranks_of[host, gpu].append(rank)
    if not ranks_of:
        return skipped(check, "no rank sees a GPU")
    shared = [ranks for ranks in ranks_of.values() if len(ranks) > 1]
    if shared:
        found = "; ".join(f"{of_ranks(ranks)} use the same GPU" for ranks in shared)
        remedy = (
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything "
            "else; NCCL does not run with two ranks on one GPU"
        )
        return failed(check, found, remedy)
    lacking = [rank for rank, (_, gpu) in of_rank.items() if not gpu]
    if lacking:
        found = f"no GPU on {of_ranks(lacking)}, but on the others"
        return failed(check, found, "start one process for each GPU")
    return ok(check, "every process has its own")


def judge_clocks(offsets: Sequence[float]) -> Finding:
    """Whether the hosts agree on the time.

    Args:
        offsets: seconds that each rank's clock is ahead of rank 0's.
    """
    check = "clocks"
    skew = max(offsets) - min(offsets)
    if skew > WORST_SKEW_SECONDS:
        latest = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
        found = f"rank {latest} is {offsets[latest]:+.1f} s off rank 0"
        remedy = "logs of ranks cannot be compared: switch on NTP (chrony) on all hosts"
        return warning(check, found, remedy)
    bound = next(text for limit, text in _SKEWS if skew <= limit)
    return ok(check, f"within {bound}")


# Coarse, so that all ranks and all runs say the same.
_SKEWS = ((0.01, "10 ms"), (0.1, "0.1 s"), (WORST_SKEW_SECONDS, "1 s"))
