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
from pathlib import Path

import pytest

from minidp.overlap import Timeline, from_json, report
from tests.support.pool import PRELOADED

pytestmark = pytest.mark.fresh

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


def play(words: str, output: Path) -> None:
    """Run a script in this process; it prints to a file, and its end is ours."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    script, *sys.argv[1:] = words.split()
    sys.argv[0] = str(FOLDER / script)
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(sys.argv[0], run_name="__main__")


def run(words: str, folder: Path) -> tuple[str, str]:
    """Run a script: whether it says that all was identical, and all that it printed."""
    output = folder / "output.txt"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "sklearn.datasets"])
    process = context.Process(target=play, args=(f"{words} --epochs 2", output))
    process.start()
    process.join()
    text = output.read_text()
    output.unlink()
    (answer,) = re.findall(r"^identical: (yes|no)$", text, re.MULTILINE)
    is_wrong = answer == "no" and "--ranks 3" not in words
    assert process.exitcode == is_wrong, text
    return answer, text


@pytest.mark.parametrize("script", TWO_RANKS)
def test_two_ranks_have_torchs_bits_and_are_recorded(script, tmp_path):
    recording = tmp_path / "recording.json"
    answer, text = run(f"{script} --save {recording}", tmp_path)
    assert answer == "yes"
    assert "compared: 40 tensors x 10 steps" in text
    assert re.search(r"a step takes \S+ ms, torch's DDP \S+ ms", text)
    timelines = from_json(recording.read_text())
    assert [timeline.where.rank for timeline in timelines] == [0, 1]
    assert "Is communication hidden?" in report(timelines)
    if script.startswith("stage"):
        for timeline in timelines:
            check_what_travelled_when(script, timeline)


def check_what_travelled_when(script: str, timeline: Timeline) -> None:
    assert len(timeline.steps) == 24
    for layout in timeline.layouts:
        assert sorted(i for message in layout for i in message) == list(range(20))
        assert len(layout) == (20 if script < "stage3" else 5)
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


def test_launching_in_an_order_of_ones_own_is_wrong(tmp_path):
    answer, text = run("stage4_wrong_order.py", tmp_path)
    assert answer == "no"
    assert "step 0, rank 0: towers.0.weight" in text
    assert run("stage4_wrong_order.py --in-order", tmp_path)[0] == "yes"


@pytest.mark.nightly
def test_more_than_two_ranks_have_the_bits_that_the_readme_says(tmp_path):
    said = re.findall(
        r"^python \S+/(\w+\.py --ranks 3.*?)  +# (.*)$", README, re.MULTILINE
    )
    assert len(said) == 3
    for words, answer in said:
        assert f"identical: {run(words, tmp_path)[0]}" == answer


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
