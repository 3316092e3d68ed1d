"""``minidp report``: exit statuses, messages, files."""

from __future__ import annotations

import json
import sys

import pytest

from minidp import _picture
from minidp.__main__ import COMMANDS, main
from minidp._timeline import from_json, to_json
from tests.support.timelines import step, timeline

BUCKETS = [(20, 20, 28, 35), (30, 30, 40, 41)]


@pytest.fixture
def files(tmp_path):
    names = []
    for rank in (0, 1):
        steps = [step(n, BUCKETS, at=60 * n, ready=(29, 12)) for n in range(3)]
        path = tmp_path / f"rank{rank}.json"
        path.write_text(to_json([timeline(steps, rank=rank)]))
        names.append(str(path))
    return names


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert COMMANDS[command].help
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.parametrize("command", ["run", "tune"])
def test_other_commands_are_reached(command, capsys):
    assert main([command, "nope.py"]) == 2
    assert "there is no script nope.py" in capsys.readouterr().err


def test_native_says_why_it_is_not_used(monkeypatch, capsys):
    monkeypatch.setenv("MINIDP_NATIVE", "0")
    assert main(["native", "status"]) == 1
    assert "MINIDP_NATIVE" in capsys.readouterr().out


def test_report_of_one_rank(files, capsys):
    assert main(["report", files[0]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("rank 0 of 2; gloo on cpu; torch 2.13\n")
    assert (
        "Is communication hidden? 44% of the gradients' 18.0 ms per step; 10.0 ms are "
        "exposed (p10 10.0, p90 10.0), 17% of the step.\n"
        "Why? 10.0 ms of them are bucket 1 (layers.0): its last gradient comes 0.0 ms "
        "before the backward ends; then 10.0 ms on the wire.\n"
        "Advice: "
    ) in printed
    assert "rec.gather() tells it apart" in printed
    assert "When each rank comes" not in printed


def test_report_of_several_ranks(files, capsys):
    assert main(["report", *files]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ranks 0, 1 of 2")
    assert "When each rank comes" in printed


def test_all_exports(files, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = {kind: tmp_path / f"out.{kind}" for kind in ("png", "trace", "json")}
    options = [word for kind, path in out.items() for word in (f"--{kind}", str(path))]
    assert main(["report", *files, *options]) == 0
    assert out["png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(out["trace"].read_text())["traceEvents"]
    merged = from_json(out["json"].read_text())
    assert [t.where.rank for t in merged] == [0, 1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "error: {path}: No such file or directory\n"),
        (b"{}", "error: {path} is not a recording"),
        (b"\xff\xfe\xff", "error: {path} is no text"),
        (b"\n", "error: {path} is empty"),
        (b'{"traceEvents": []}', "error: {path} is a trace, not a recording"),
        (to_json([]).encode(), "error: {path} is damaged: it is of no rank"),
    ],
)
def test_bad_files_end_with_their_name(content, says, tmp_path, capsys):
    path = tmp_path / "steps.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["report", str(path)]) == 1
    assert capsys.readouterr().err.startswith(says.format(path=path))


def test_the_same_rank_twice_is_an_error(files, capsys):
    assert main(["report", files[0], files[0]]) == 1
    assert "must be of different ranks" in capsys.readouterr().err


def test_a_picture_without_matplotlib_says_what_to_install(
    files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = ("--png", str(tmp_path / "out.png"), "--trace", str(tmp_path / "t"))
    assert main(["report", files[0], *options]) == 1
    assert "pip install 'minidp[bench]'" in capsys.readouterr().err
    assert (tmp_path / "t").exists()


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        _picture.draw([timeline([])], tmp_path / "out.png")


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 2
    assert "what is wrong with this machine" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("minidp ")


@pytest.mark.parametrize("words", [["report"], ["nonsense"]])
def test_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2


def test_help_shows_how_to_record(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["report", "--help"])
    assert exit_.value.code == 0
    assert "with minidp.record(model) as rec:" in capsys.readouterr().out
