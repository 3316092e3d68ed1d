"""``minidp report``: exit statuses, messages, files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from minidp import console as output
from minidp.__main__ import COMMANDS, main
from minidp.overlap.timeline import from_json, to_json
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


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 2, "what is wrong with this machine"),
        (["doctor", "--help"], 0, "--json"),
        (["native", "--help"], 0, "compile the extension"),
        (["report", "--help"], 0, "with minidp.record(model) as rec:"),
        (["run", "--help"], 0, "torchrun ... -m minidp.run train.py ARGS"),
        (["tune", "--help"], 0, "minidp tune -n 2 --out buckets.json train.py ARGS"),
        (["--version"], 0, "minidp "),
        (["report"], 2, "FILE"),
        (["nonsense"], 2, "invalid choice"),
        (["run", "nope.py"], 2, "there is no script nope.py"),
        (["tune", "nope.py"], 2, "there is no script nope.py"),
        (["run", "--limit", "0", "train.py"], 2, "a positive number of seconds, not 0"),
        (["native", "status"], 1, "MINIDP_NATIVE"),
    ],
)
def test_words_and_exit_statuses(words, status, says, alone, capsys):
    assert status_of(words) == status
    printed = capsys.readouterr()
    assert says in printed.out + printed.err


MISSPELT = [
    (words, option)
    for words, options in [
        (["doctor"], ["--json", "--timeout", "--wait"]),
        (["native", "build"], ["--force", "--verbose", "--optional"]),
        (["report"], ["--html", "--trace", "--json"]),
        (["run"], ["--report", "--save", "--compare", "--hang-timeout", "--before"]),
        (["tune"], ["--out", "--copy", "--no-copy", "--static-graph"]),
        ([], ["--version"]),
    ]
    for option in options
]


@pytest.mark.parametrize(
    ("words", "option"),
    MISSPELT,
    ids=lambda v: v if isinstance(v, str) else " ".join(v),
)
@pytest.mark.parametrize("value", [[], ["3", "x.py"]], ids=["alone", "and more"])
def test_a_misspelt_option_is_named_by_its_own_command(words, option, value, capsys):
    wrong = option[:4] + option[3:]  # a letter twice: no abbreviation
    if not value and words in (["run"], ["tune"], ["report"]):
        value = ["x.py"]  # they need one word
    if not words:
        value = []
    assert status_of([*words, wrong, *value]) == 2
    said = capsys.readouterr().err
    command = " ".join(["minidp", *words])
    assert said.startswith(f"usage: {command} [")
    assert f"{command}: error: unrecognized arguments: {wrong}" in said
    assert f"; did you mean {option}? (`{command} --help` lists all)\n" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rn", "x.py"], "minidp: error: argument COMMAND: invalid choice: 'rn' "),
        (["rn", "x.py"], "; did you mean run?"),
        (["native", "biuld"], "; did you mean build?"),
        (["run", "-N", "2", "x.py"], "arguments: -N; did you mean -n? ("),
        (
            ["tune", "--hang_timeout=3", "--uot", "b", "x.py"],
            "--hang-timeout, --out? (",
        ),
        (["run", "--zzz", "x.py"], "run: error: unrecognized arguments: --zzz (`mini"),
        (
            ["run", "-n", "two", "x.py"],
            "argument -n: expected how many ranks to start, 1 or more, but got two",
        ),
        (["run", "--limit", "x", "x.py"], "a positive number of seconds, not x"),
    ],
)
def test_other_wrong_words(words, says, capsys):
    assert status_of(words) == 2
    assert says in capsys.readouterr().err


def test_options_of_the_script_are_its_own(tmp_path, alone, capsys):
    script = tmp_path / "x.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    assert status_of(["run", str(script), "--hang-timout", "3"]) == 0
    assert "['--hang-timout', '3']" in capsys.readouterr().out


def test_every_command_has_such_a_test():
    assert {words[0] for words, _ in MISSPELT if words} == {*COMMANDS}


def test_report_of_one_rank_and_of_several(files, capsys):
    words = [sys.executable, "-W", "error", "-m", "minidp.report", files[0]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert main(["report", files[0]]) == 0
    printed = capsys.readouterr().out
    assert printed == done.stdout  # `python -m minidp.report`
    assert printed.startswith("rank 0 of 2; gloo on cpu; torch 2.13\n")
    assert "Is communication hidden? 44% of the gradients' 18.0 ms per step;" in printed
    assert (
        "Why? 10.0 ms of what is exposed are bucket 1 (layers.0): 10.0 ms on" in printed
    )
    assert "rec.gather() tells it apart" in printed
    assert "When each rank comes" not in printed
    assert main(["report", *files]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ranks 0, 1 of 2")
    assert "When each rank comes" in printed
    assert main(["report", files[0], files[0]]) == 1
    assert "must be of different ranks" in capsys.readouterr().err


def test_all_exports(files, tmp_path):
    kinds = ("html", "trace", "json")
    out = {kind: tmp_path / f"out.{kind}" for kind in kinds}
    options = [word for kind, path in out.items() for word in (f"--{kind}", str(path))]
    assert main(["report", *files, *options]) == 0
    assert out["html"].read_text().startswith("<!doctype html>")
    assert json.loads(out["trace"].read_text())["traceEvents"]
    merged = from_json(out["json"].read_text())
    assert [t.where.rank for t in merged] == [0, 1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "error: {path}: No such file or directory\n"),
        (b"{}", "error: {path} is not a recording"),
        (b"\xff\xfe\xff", "error: {path} is damaged: UnicodeDecodeError"),
        (b"\n", "error: {path} is damaged: JSONDecodeError"),
        (to_json([]).encode(), "error: {path} is damaged: it holds no rank"),
    ],
)
def test_bad_files_end_with_their_name(content, says, tmp_path, capsys):
    path = tmp_path / "steps.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["report", str(path)]) == 1
    assert capsys.readouterr().err.startswith(says.format(path=path))


def test_a_picture_is_refused_and_the_page_named(files, tmp_path, capsys):
    picture = tmp_path / "out.png"
    assert main(["report", files[0], "--png", str(picture)]) == 1
    assert "What to do: write a page for the browser" in capsys.readouterr().err
    assert not picture.exists()


# --------------------------------------------------------------- `minidp ... | head`


@pytest.fixture(params=["buffered", "unbuffered"])
def pipe(request):
    """A stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    is_buffered = request.param == "buffered"
    file = os.fdopen(writer, "wb", -1 if is_buffered else 0)
    return io.TextIOWrapper(file, write_through=not is_buffered)


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
    ["nope"],
    ["report", "/nope"],
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
    stream = "stderr" if {"nope", "/nope"} & {*words} else "stdout"
    with monkeypatch.context() as patch:
        patch.setattr(sys, stream, io.StringIO())
        expected = status_of(words)
        assert getattr(sys, stream).getvalue()
        trace.unlink(missing_ok=True)
        patch.setattr(sys, stream, pipe)
        assert status_of(words) == expected
        pipe.close()  # raises what would be printed at the interpreter's end
    assert expected or stream == "stdout"
    assert trace.exists() == ("--trace" in words)  # the rest is done all the same


def test_without_standard_streams_nothing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    output.say_on_stderr("not for standard output")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", None)
    output.say("nobody reads this")
    assert main(["native", "status"]) in (0, 1)
