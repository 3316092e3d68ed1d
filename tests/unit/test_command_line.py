"""``minidp report``: exit statuses, messages, files."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from minidp import _console, _picture
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
    said = capsys.readouterr().err
    assert "What to do: pip install matplotlib." in said
    assert "minidp[" not in said  # minidp may have come from a checkout
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


def test_report_is_a_module_of_its_own(files):
    words = [sys.executable, "-W", "error", "-m", "minidp.report"]
    done = subprocess.run(
        [*words, files[0]], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rank 0 of 2; gloo on cpu")
    assert "Is communication hidden?" in done.stdout


# --------------------------------------------------------------- `minidp ... | head`


class Pipe:
    """A stream whose reader has gone."""

    def __init__(self, *, buffered):
        reader, writer = os.pipe()
        os.close(reader)
        file = os.fdopen(writer, "wb", -1 if buffered else 0)
        self.stream = io.TextIOWrapper(file, write_through=not buffered)

    def end(self):
        """As at the end of the interpreter; raises what would be printed there."""
        self.stream.close()


@pytest.fixture(params=["buffered", "unbuffered"])
def pipe(request):
    return Pipe(buffered=request.param == "buffered")


EVERY_COMMAND = [
    [],
    ["--help"],
    ["--version"],
    *([name, "--help"] for name in COMMANDS),
    ["native", "status"],
    ["doctor"],
    ["doctor", "--json"],
    ["report", "FILE"],
    ["report", "FILE", "--trace", "TRACE"],
]


def status_of(words):
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def alone(monkeypatch):
    """No job around: a doctor looks at this process only."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINIDP_NATIVE", "0")


@pytest.mark.parametrize("words", EVERY_COMMAND, ids=" ".join)
def test_a_closed_pipe_is_no_error(words, pipe, files, tmp_path, monkeypatch, alone):
    trace = tmp_path / "trace"
    paths = {"FILE": files[0], "TRACE": str(trace)}
    words = [paths.get(word, word) for word in words]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        expected = status_of(words)
        assert sys.stdout.getvalue()
        trace.unlink(missing_ok=True)
        patch.setattr(sys, "stdout", pipe.stream)
        assert status_of(words) == expected
        pipe.end()
    assert trace.exists() == ("--trace" in words)  # the rest is done all the same


@pytest.mark.parametrize("words", [["nope"], ["report", "/nope"]], ids=" ".join)
def test_errors_into_a_closed_pipe_keep_their_status(words, pipe, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", io.StringIO())
        expected = status_of(words)
        patch.setattr(sys, "stderr", pipe.stream)
        assert status_of(words) == expected != 0
        pipe.end()


def test_without_standard_streams_nothing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    _console.say_on_stderr("not for standard output")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", None)
    _console.say("nobody reads this")
    assert main(["native", "status"]) in (0, 1)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_native_status_into_head():
    command = f"{sys.executable} -m minidp.native status | head -1"
    command += "; exit ${PIPESTATUS[0]}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "MINIDP_NATIVE": "0"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "native kernels: not loaded\n"
