"""Play simulated runs: ``python -m tests.simulation [SCENARIO ...] [--seed N]``.

With a seed one run is played, and its account is shown: who did what, and when. Without
one, runs of consecutive seeds are played until something is found.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback

from .play import Play
from .scenarios import OF_TORCHFT, SCENARIOS, add_torchft, warm_up
from .scheduler import Finding
from .tape import Tape


def main() -> int:
    """Play what the command line says; return 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO")
    parser.add_argument("--seed", type=int, help="play this one, and tell all of it")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--lines", type=int, default=0, help="of each finding's account"
    )
    parser.add_argument("--all", action="store_true", help="go on after a finding")
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    names = given.scenarios or [*SCENARIOS, *OF_TORCHFT]
    of_torchft = [name for name in names if name in OF_TORCHFT]
    if of_torchft and not add_torchft():
        print(f"{', '.join(of_torchft)}: skipped without the extra minidp[torchft]")
        names = [name for name in names if name not in OF_TORCHFT]
    warm_up()
    if given.seed is not None:
        return int(max((_tell(name, given.seed) for name in names), default=False))
    return int(max((_search(name, given) for name in names), default=False))


def _tell(name: str, seed: int) -> bool:
    play, found = _play(name, seed)
    print(play.tell())
    print(f"{name}, seed {seed}: {play.settings}; {play.fault}")
    for rank, error in sorted(play.ends.items()):
        print(f"rank {rank} ended with {error!r}")
    print(f"FOUND: {found}" if found else "nothing was found")
    return found is not None


def _play(name: str, seed: int) -> tuple[Play, Finding | None]:
    try:
        return SCENARIOS[name].play(Tape(seed)), None
    except Finding as finding:
        play: Play = finding.play  # type: ignore[attr-defined]
        return play, finding


def _search(name: str, given: argparse.Namespace) -> bool:
    began, runs, found_some = time.monotonic(), 0, 0
    for seed in range(given.first, given.first + given.runs):
        runs += 1
        try:
            play, found = _play(name, seed)
        except Exception:
            print(f"{name}, seed {seed}: the simulation itself failed")
            traceback.print_exc()
            return True
        if found is not None:
            found_some += 1
            print(f"{name}, seed {seed}: {play.settings}; {play.fault}\n    {found}")
            if given.lines:
                print(play.tell(given.lines))
            if not given.all:
                break
        del play
        if runs % 5 == 0:
            gc.collect()
        if time.monotonic() - began > given.seconds:
            break
    took = time.monotonic() - began
    print(
        f"{name}: {runs} runs in {took:.1f} s, {60 * runs / took:.0f} a minute; "
        f"{found_some} with findings",
        flush=True,
    )
    return found_some > 0


if __name__ == "__main__":
    raise SystemExit(main())
