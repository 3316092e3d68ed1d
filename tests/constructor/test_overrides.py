"""Options that a user gives from outside the script, and remedies that say how."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import re
from pathlib import Path

import pytest
from torch import nn

import minidp
from minidp.config import overrides
from minidp.config.overrides import (
    OPTIONS,
    RUN,
    VARIABLES,
    add_options,
    hint_from_outside,
    misspelt,
    passing,
    read_environment,
    replacements,
    setting,
    variables,
)
from minidp.core.modes import EveryParameter, StaticGraph
from minidp.guard.local_acts import Origin
from minidp.guard.mistakes import explain_origins

UNDER_RUN = json.dumps({"command": "run"})


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for option in OPTIONS.values():
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv(RUN, raising=False)


VALUES = {
    "unsynced": ("warn", "warn"),
    "hang_timeout": ("1800", 1800),
    "check_replicas_every": ("100", 100),
    "check_finite_grads": ("1", True),
    "bucket_layout": ("b.json", "b.json"),
    "bucket_cap_mb": ("auto", "auto"),
    "bucket_cap_mb_list": ("1,2.5", [1, 2.5]),
    "find_unused_parameters": ("true", True),
    "skip_all_reduce_unused_params": ("yes", True),
    "static_graph": ("0", False),
    "gradient_as_bucket_view": ("True", True),
    "batched_grad_copy": ("no", False),
    "forward_sync_buffers": ("FALSE", False),
    "average_over": ("items", "items"),
}


def test_each_is_read_from_its_variable():
    known = inspect.signature(minidp.DataParallel).parameters
    of_ours = {name for name, p in known.items() if p.kind is p.KEYWORD_ONLY}
    # Of no use to a script without their loop.
    of_ours -= {"logical_ranks", "audit_every", "audit_action"}
    assert of_ours <= set(OPTIONS) <= set(known)
    assert list(VALUES) == list(OPTIONS)
    texts = {f"MINIDP_{name.upper()}": text for name, (text, _) in VALUES.items()}
    found = read_environment(texts | {"MINIDP_NATIVE": "0", "RANK": "1"})
    assert found == {name: value for name, (_, value) in VALUES.items()}
    assert read_environment(dict.fromkeys(texts, "")) == {}
    for name in ("hang_timeout", "check_replicas_every", "bucket_cap_mb"):
        assert read_environment({OPTIONS[name].variable: "auto"}) == {name: "auto"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("unsynced", "warm", "unsynced must be one of 'raise', 'warn', 'ignore'"),
        ("hang_timeout", "soon", "expected a number, but got 'soon'"),
        ("hang_timeout", "-1", "hang_timeout must be a finite, positive number"),
        ("check_replicas_every", "1.5", "must be a number of steps (int)"),
        ("check_finite_grads", "2", "expected one of 1, true, yes, 0, false, no"),
        ("average_over", "rank", "average_over must be one of 'ranks', 'items'"),
        ("bucket_cap_mb", "-1", "bucket_cap_mb must be finite and not negative"),
        ("bucket_cap_mb_list", "1;2", "expected a number, but got '1;2'"),
    ],
)
def test_what_the_constructor_would_not_take_is_refused_by_name(
    name, text, says, monkeypatch, lone_group, capsys
):
    variable = OPTIONS[name].variable
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=variable) as caught:
        minidp.DataParallel(nn.Linear(1, 1))
    assert says in str(caught.value)
    if OPTIONS[name].metavar:
        with pytest.raises(SystemExit):
            parsed(f"{OPTIONS[name].word}={text}")
        assert says in capsys.readouterr().err


def test_they_replace_what_the_script_passes(monkeypatch, lone_group):
    monkeypatch.setenv("MINIDP_UNSYNCED", "warn")
    monkeypatch.setenv("MINIDP_STATIC_GRAPH", "1")
    monkeypatch.setenv("MINIDP_BUCKET_CAP_MB", "2")
    ddp = minidp.DataParallel(
        nn.Linear(1, 1),
        unsynced="ignore",
        hang_timeout=7.0,
        bucket_cap_mb_list=[3, 4],
        find_unused_parameters=True,
    )
    assert ddp._guard.policy == "warn"
    assert ddp._reducer.communicator.limit == 7.0
    assert ddp.static_graph
    assert ddp.find_unused_parameters
    assert ddp.bucket_bytes_cap == 2 * 2**20
    assert ddp._given.bucket_cap_mb_list is None


def test_none_is_a_value_and_a_list_of_caps_replaces_the_cap(monkeypatch):
    for name in ("hang_timeout", "bucket_cap_mb", "bucket_layout"):
        with monkeypatch.context() as patch:
            patch.setenv(OPTIONS[name].variable, "none")
            assert replacements()[name] is None
    monkeypatch.setenv("MINIDP_BUCKET_CAP_MB_LIST", "1,3")
    caps = {"bucket_cap_mb": None, "bucket_cap_mb_list": [1, 3]}
    assert replacements() == caps


def test_a_second_model_has_a_layout_of_its_own(
    monkeypatch, tmp_path, lone_group, caplog
):
    """As `minidp tune` writes them; a third one has none here."""
    nets = [nn.Sequential(*[nn.Linear(n, 1)] * n) for n in (1, 2, 3)]
    path = tmp_path / "buckets.json"
    for name, net in zip(["buckets.json", "buckets.1.json"], nets, strict=False):
        names = [[name for name, _ in net.named_parameters()]]
        plain = {"format": 1, "rebuilt": True, "buckets": names}
        (tmp_path / name).write_text(json.dumps(plain))
    monkeypatch.setenv("MINIDP_BUCKET_LAYOUT", str(path))
    with caplog.at_level(logging.WARNING, "minidp"):
        rebuilt = [minidp.DataParallel(net).bucket_layout["rebuilt"] for net in nets]
    assert rebuilt == [True, True, False]
    assert "no " + str(tmp_path / "buckets.2.json") in caplog.text
    assert "model number 3" in caplog.text


# ------------------------------------------------------------------- the command line


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


def test_the_command_line_says_the_same(tmp_path, monkeypatch, capsys):
    path = tmp_path / "b.json"
    path.write_text("{}")
    monkeypatch.chdir(tmp_path)
    given = parsed(
        *("--unsynced", "warn", "--hang-timeout=1800", "--bucket-layout", "b.json"),
        *("--static-graph", "--no-gradient-as-bucket-view", "--bucket-cap-mb", "none"),
    )
    assert variables(given) == {
        "MINIDP_UNSYNCED": "warn",
        "MINIDP_HANG_TIMEOUT": "1800",
        "MINIDP_BUCKET_LAYOUT": str(path),  # the script may go to another folder
        "MINIDP_STATIC_GRAPH": "1",
        "MINIDP_GRADIENT_AS_BUCKET_VIEW": "0",
        "MINIDP_BUCKET_CAP_MB": "none",
    }
    assert variables(parsed()) == {}
    with pytest.raises(SystemExit):
        parsed("--bucket-layout", "nope.json")
    assert "there is no file nope.json" in capsys.readouterr().err


def test_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("MINIDP_UNSYNCED", "raise")
    with setting({"MINIDP_UNSYNCED": "warn", "MINIDP_STATIC_GRAPH": "1"}):
        assert read_environment() == {"unsynced": "warn", "static_graph": True}
    assert read_environment() == {"unsynced": "raise"}


def test_a_variable_that_nobody_reads():
    set_by_hand = {"MINIDP_UNSYNCD": "warn", "MINIDP_HANG_TIMEOUT": "3", "HOME": "/"}
    assert misspelt(set_by_hand | {"MINIDP_OF_OTHERS": "1", "MINIDP_NATIVE": "0"}) == [
        "minidp has no variable MINIDP_UNSYNCD; did you mean MINIDP_UNSYNCED?"
    ]


def test_the_constructor_says_so_once(lone_group, monkeypatch, caplog):
    told = overrides._tell_misspelt
    monkeypatch.setenv("MINIDP_SHARED_MEMROY", "0")
    for variables_set, times in [
        ({"LOCAL_RANK": "1"}, 0),
        ({RUN: UNDER_RUN}, 0),
        ({}, 1),
    ]:
        told.cache_clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "minidp"):
            for name, value in variables_set.items():
                patch.setenv(name, value)
            minidp.DataParallel(nn.Linear(1, 1))
            minidp.DataParallel(nn.Linear(1, 1))
        text = "no variable MINIDP_SHARED_MEMROY; did you mean MINIDP_SHARED_MEMORY?"
        assert caplog.text.count(text) == times
    told.cache_clear()


def test_every_variable_that_is_named_in_the_code_is_known_and_documented():
    root = Path(minidp.__file__).parent
    named = re.compile(r"""["'](MINIDP_[A-Z_]+)["']""")
    texts = [path.read_text() for path in root.rglob("*.py")]
    found = {name for text in texts for name in named.findall(text)}
    options = {option.variable for option in OPTIONS.values()}
    assert found | options == VARIABLES.keys()
    section = (root / "run/README.md").read_text().split("## Environment variables")[1]
    rows = re.findall(r"^\| `(MINIDP_[A-Z_]+)` \|", section, re.MULTILINE)
    assert rows == list(VARIABLES)


# -------------------------------------------------------------------------- remedies


def test_remedies_name_what_works_here(monkeypatch):
    assert passing(unsynced="ignore") == "pass unsynced='ignore'"
    assert passing(static_graph=True) == "pass static_graph=True"
    assert hint_from_outside(static_graph=True) == ""
    with minidp.swapped():
        expected = "set MINIDP_UNSYNCED=ignore in the environment"
        assert passing(unsynced="ignore") == expected
        expected = " (here: set MINIDP_STATIC_GRAPH=1 in the environment)"
        assert hint_from_outside(static_graph=True) == expected
    assert passing(unsynced="ignore") == "pass unsynced='ignore'"
    monkeypatch.setenv(RUN, UNDER_RUN)
    assert passing(unsynced="ignore") == "start with `minidp run --unsynced ignore`"
    expected = " (here: start with `minidp run --static-graph`)"
    assert hint_from_outside(static_graph=True) == expected
    assert hint_from_outside(static_graph=False) == expected.replace("--", "--no-")
    for name, (_, value) in VALUES.items():
        if name != "bucket_layout" and name[-4:] != "list":
            words = passing(**{name: value}).partition("minidp run ")[2].strip("`")
            found = getattr(parsed(*words.split()), name)
            assert found is value if isinstance(value, bool) else found == str(value)


def test_errors_of_scripts_that_are_not_to_be_edited(monkeypatch):
    monkeypatch.setenv(RUN, UNDER_RUN)
    assert (
        "`find_unused_parameters=True` (here: start with `minidp run "
        "--find-unused-parameters`), and make sure"
    ) in EveryParameter(1).remedy_for_missing
    static = StaticGraph(1)
    for text in (static.remedy_for_missing, str(static.twice(0, "w"))):
        assert " (here: start with `minidp run --no-static-graph`)" in text
    _, remedy = explain_origins({Origin.QUIET}, model_ran=True)
    assert "run --unsynced ignore`" in remedy
