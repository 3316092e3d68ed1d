"""Compare facts between ranks: world size, software, settings, GPUs, clocks.

The facts of a rank are a dict, and a `Meeting` gathers those of all ranks. A rank with
another version of minidp may lack some.
"""

from __future__ import annotations

import hashlib
import platform
import random
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidp import accelerator
from minidp._version import __version__
from minidp.doctor.findings import Finding, Found, failed, ok, skipped, warning
from minidp.doctor.words import differing, join, of_ranks

from .variables import judge_equal_variables, relevant

PACKAGE = Path(__file__).parents[2]  # minidp/
Facts = Mapping[str, Any]  # of one rank
# The bounds are coarse, so that all ranks and all runs report the same.
_SKEWS = {0.01: "10 ms", 0.1: "0.1 s", 1.0: "1 s"}


def read_facts(
    env: Mapping[str, str], world_size: int, local_rank: int | None
) -> Facts:
    """Return the facts of this process, for `COMPARED`."""
    index = index_of_gpu(local_rank)
    return {
        "host": socket.gethostname(),
        "world_size": world_size,
        "gpu": "" if index is None else uuid_of(accelerator.device(index)),
        "versions": read_versions(),
        "variables": relevant(env),
    }


def read_versions() -> dict[str, str]:
    """Return the versions of all software on which gradients may depend."""
    digest = hashlib.sha256()  # two checkouts of minidp may have the same version
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "minidp": f"{__version__} (sources {digest.hexdigest()[:8]})",
    }
    return versions | accelerator.versions()


def index_of_gpu(local_rank: int | None) -> int | None:
    """Return the index of this process's GPU, or None if it is not known."""
    count = accelerator.count()
    # A process that sees one GPU has no choice. Otherwise the local rank is its number.
    index = 0 if count == 1 else local_rank
    return index if index is not None and index < count else None


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process of the host.

    Where the module of its type tells none, it is the name of the device.
    """
    try:
        properties = accelerator.module(device.type).get_device_properties(device)
        return str(properties.uuid)
    except (AttributeError, RuntimeError):
        return str(device)


def judge_ranks(facts: Collection[Facts], rank: int, claims: int) -> Iterator[Finding]:
    """Judge which ranks came, from the facts of those that did.

    Args:
        facts: The facts of each of these ranks.
        rank: This rank.
        claims: How many processes say that they are this rank.
    """
    sizes = {each["world_size"] for each in facts}
    hosts = {each["host"] for each in facts}
    found = f"{len(facts)} of {max(sizes)} came, on {len(hosts)} host(s)"
    if len(sizes) > 1:
        found = f"WORLD_SIZE is {join(sorted(sizes))} on different ranks"
        yield failed(found, "start all ranks with the same WORLD_SIZE")
    elif len(facts) < max(sizes):
        yield warning(found, "find out why the others did not; what follows lacks them")
    else:
        yield ok(found)
    if claims > 1:
        found = f"{claims} processes say that they are rank {rank}"
        yield failed(found, "give every process a RANK of its own")


def judge_versions(of_rank: Mapping[int, Facts]) -> list[Finding]:
    """Judge whether all ranks run the same software.

    Another version of numpy, or another patch of Python, is only warned of.
    """
    remedy = "install the same everywhere: one image, or one lock file"
    findings = []
    versions = {rank: facts.get("versions", {}) for rank, facts in of_rank.items()}
    for name in sorted(differing(versions.values())):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, each in versions.items():
            ranks_of[each.get(name, "missing")].append(rank)
        places = (f"{v} on {of_ranks(r)}" for v, r in ranks_of.items())
        found = f"{name} {', '.join(places)}"
        releases = {version.rpartition(".")[0] for version in ranks_of}
        if name == "numpy" or (name == "python" and len(releases) == 1):
            found += ": gradients do not depend on it, but random and pickled data may"
            findings.append(warning(found, remedy))
        else:
            findings.append(failed(found, remedy))
    same = (f"{name} {v}" for name, v in next(iter(versions.values())).items())
    return findings or [ok(join(same) or "no rank said any")]


def judge_owners(of_rank: Mapping[int, Facts]) -> Finding:
    """Judge whether each rank has a GPU of its own."""
    ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, facts in of_rank.items():
        ranks_of[facts["host"], facts.get("gpu", "")].append(rank)
    owners = {key: ranks for key, ranks in ranks_of.items() if key[1]}
    if not owners:
        return skipped("no rank sees a GPU")
    shared = [of_ranks(ranks) for ranks in owners.values() if len(ranks) > 1]
    if shared:
        remedy = (
            "call torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK'])) "
            "before all else"
        )
        return failed(f"{join(shared)} use the same GPU", remedy)
    lacking = [rank for rank, facts in of_rank.items() if not facts.get("gpu")]
    if lacking:
        found = f"no GPU on {of_ranks(lacking)}, whereas the others have one"
        return failed(found, "start one process for each GPU")
    return ok("every process has its own")


def judge_clocks(offsets: Sequence[float]) -> Finding:
    """Warn if clocks are far apart, from the seconds that each is ahead of rank 0's."""
    skew = max(offsets) - min(offsets)
    bound = next((text for limit, text in _SKEWS.items() if skew <= limit), "")
    if bound:
        return ok(f"within {bound}")
    rank = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    remedy = "logs of ranks cannot be compared: switch on NTP (chrony) on all hosts"
    return warning(f"rank {rank} is {offsets[rank]:+.1f} s off rank 0", remedy)


def digest_of_states() -> dict[str, str]:
    """Return digests of the states of all random generators, by library."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": np.random.get_state(),
    }
    states |= accelerator.random_states()
    return {name: digest_of(state) for name, state in states.items()}


def digest_of(value: Any) -> str:
    """Return a short digest of the ``repr`` of a value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def judge_streams(of_rank: Mapping[int, Facts]) -> Finding:
    """Warn if a random state is equal on all ranks, and something draws from it.

    That may be dropout, or a transform of a dataset.
    """
    first, *others = [facts["streams"] for facts in of_rank.values()]
    if not others:
        return ok("one rank: nothing to compare")
    names = (n for n in sorted(first) if all(s.get(n) == first[n] for s in others))
    same = ", ".join(names)
    if not same:
        return ok("each rank draws numbers of its own")
    who = next(filter(None, (facts["draws"] for facts in of_rank.values())), "")
    if not who:
        return ok(f"equal on all ranks ({same}); nothing seen uses it")
    remedy = (
        "call torch.manual_seed(seed + rank) after the model is made, and seed random "
        "and numpy in the same way"
    )
    return warning(f"{who}, and all ranks draw the same numbers ({same})", remedy)


COMPARED: Mapping[str, Callable[[Mapping[int, Facts]], Found]] = {
    "versions": judge_versions,
    "same variables": judge_equal_variables,
    "one GPU each": judge_owners,
}
