"""`examples/from_scratch/`: each stage has torch's bits and leaves a whole recording.

All scripts run as a reader starts them, but for one thing: they are forked from one
process, because to import torch takes longer than the training.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from minidp.overlap import from_json, report

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "from_scratch"
README = (FOLDER / "README.md").read_text()
STAGES = sorted(FOLDER.glob("stage*.py"))
MAX_LINES = 120
TWO_RANKS = [
    "stage1_after_backward.py",
    "stage2_hook_per_parameter.py",
    "stage3_buckets.py",
    "stage4_overlap.py",
    "stage5_no_sync_unused_views.py",
    "minidp_itself.py",
]
SAME = "--ranks 3 --same-messages"
CASES = [
    *TWO_RANKS,
    "stage4_wrong_order.py",
    "stage4_wrong_order.py --in-order",
    f"stage1_after_backward.py {SAME}",
    f"stage2_hook_per_parameter.py {SAME}",
    f"stage4_overlap.py {SAME}",
    f"stage5_no_sync_unused_views.py {SAME}",
    "stage5_no_sync_unused_views.py --ranks 3",
]


@dataclass(frozen=True)
class Outcome:
    status: int | None
    output: str
    recording: Path

    @property
    def is_identical(self) -> bool:
        (answer,) = re.findall(r"^identical: (yes|no)$", self.output, re.MULTILINE)
        return answer == "yes"


def play(words: str, output: Path) -> None:
    """Run a script in this process; it prints to a file, and its end is ours."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    script, *sys.argv[1:] = words.split()
    sys.argv[0] = str(FOLDER / script)
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    out = tmp_path_factory.mktemp("from_scratch")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "sklearn.datasets"])

    def outcome(number: int) -> Outcome:
        output, recording = out / f"{number}.txt", out / f"{number}.json"
        words = f"{CASES[number]} --epochs 2 --save {recording}"
        process = context.Process(target=play, args=(words, output))
        process.start()
        process.join()
        return Outcome(process.exitcode, output.read_text(), recording)

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(CASES, threads.map(outcome, range(len(CASES))), strict=True))


@pytest.mark.parametrize("script", TWO_RANKS)
def test_two_ranks_have_torchs_bits(script: str, outcomes: dict[str, Outcome]) -> None:
    found = outcomes[script]
    assert found.status == 0, found.output
    assert found.is_identical
    assert "compared: 40 tensors x 10 steps" in found.output
    assert re.search(r"a step takes \S+ ms, torch's DDP \S+ ms", found.output)


@pytest.mark.parametrize("script", TWO_RANKS[:5])
def test_the_recording_says_what_travelled_when(
    script: str, outcomes: dict[str, Outcome]
) -> None:
    timelines = from_json(outcomes[script].recording.read_text())
    assert [timeline.where.rank for timeline in timelines] == [0, 1]
    assert "Is communication hidden?" in report(timelines)
    num_messages = 20 if script < "stage3" else 5
    for timeline in timelines:
        assert len(timeline.steps) == 24
        for layout in timeline.layouts:
            assert sorted(i for message in layout for i in message) == list(range(20))
            assert len(layout) == num_messages
        for step in timeline.steps:
            end = step.backward.end_ns
            assert step.forwards[0].end_ns <= step.backward.begin_ns <= end
            assert end <= step.finalize_end_ns <= step.end_ns
            assert len(step.local_backwards) == int(script.startswith("stage5"))
            launched = [bucket.launched_ns for bucket in step.buckets]
            assert launched == sorted(launched)
            if script.startswith(("stage1", "stage3")):
                assert launched[0] >= end
            elif not script.startswith("stage5"):  # whose first bucket may lack a block
                assert launched[0] < end


def test_launching_in_an_order_of_ones_own_is_wrong(
    outcomes: dict[str, Outcome],
) -> None:
    wrong = outcomes["stage4_wrong_order.py"]
    assert not wrong.is_identical
    assert wrong.status == 1
    assert "step 0, rank 0: towers.0.weight" in wrong.output
    right = outcomes["stage4_wrong_order.py --in-order"]
    assert right.is_identical
    assert right.status == 0


def test_with_three_ranks_and_torchs_messages_only_stage_1_has_other_bits(
    outcomes: dict[str, Outcome],
) -> None:
    found = {case: outcomes[case] for case in CASES if case.endswith(SAME)}
    assert [each.is_identical for each in found.values()] == [False, True, True, True]
    assert [each.status for each in found.values()] == [0] * 4
    # Other messages are summed in another order.
    other = outcomes["stage5_no_sync_unused_views.py --ranks 3"]
    assert not other.is_identical
    assert other.status == 0


# ------------------------------------------------------------------------------- text


@pytest.mark.parametrize("script", STAGES, ids=lambda path: path.stem)
def test_a_stage_is_short_and_built_on_torch_alone(script: Path) -> None:
    text = script.read_text()
    assert text.count("\n") <= MAX_LINES
    assert f"python examples/from_scratch/{script.name}" in text
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert not any(name.startswith("minidp") for name in imported)


def test_the_readme_names_every_file_and_each_has_its_picture() -> None:
    for path in FOLDER.iterdir():
        if path.suffix in (".py", ".sh"):
            assert path.name in README, path.name
    pictures = re.findall(r"\((pictures/\S+\.svg)\)", README)
    assert len(set(pictures)) >= 5
    there_are = FOLDER.glob("pictures/*.svg")
    assert {FOLDER / name for name in pictures} == set(there_are)


def test_the_readmes_links_and_places_in_minidp_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (FOLDER / target).exists(), target
    for path, name in re.findall(r"`(\w+(?:\.\w+)*)` in \[`\S+`\]\((\S+)\)", README):
        words = path.split(".")
        text = (FOLDER / name).read_text()
        assert all(re.search(rf"(class|def) {word}\b", text) for word in words), path
