"""A bucket layout as plain data: what is refused, and what comes back."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn

from minidp import DataParallel, comm_hooks
from minidp.config import SavedLayout
from minidp.layout.plan import ParamSpec
from minidp.layout.saved import read_plain, resumed_layout, to_plain
from tests.support.both import error_of, wrapped
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")


def spec(name, *, dtype=torch.float32, sparse=False, delayed=False):
    return ParamSpec(name, (2, 3), (3, 1), dtype, CPU, sparse, delayed)


SPECS = [
    spec("a"),
    spec("b"),
    spec("wide", dtype=torch.float64),
    spec("table", sparse=True),
    spec("late", delayed=True),
    spec("later", dtype=torch.float64, delayed=True),
]
BUCKETS = (("b", "a"), ("table",), ("wide",), ("late",), ("later",))
WRONG_TYPE = [[1, 2], [3], [4], [5], ["6"]]


def plain(*buckets, rebuilt=True):
    return {"format": 1, "rebuilt": rebuilt, "buckets": [list(b) for b in buckets]}


def with_sizes(value, params):
    numel = {name: param.numel() for name, param in params}
    elements = [[numel[name] for name in names] for names in value["buckets"]]
    return value | {"elements": elements}


def buckets_seen(ddp):
    """Make a step, and return the names in each bucket as a comm hook gets them."""
    names = {id(param): name for name, param in ddp.module.named_parameters()}
    found = {}

    def hook(state, bucket):
        found[bucket.index()] = [names[id(param)] for param in bucket.parameters()]
        return comm_hooks.all_reduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    step(ddp)
    return [found[number] for number in sorted(found)]


def whole():
    names = [spec.name for spec in SPECS]
    return with_sizes(plain(*BUCKETS), [(name, torch.empty(6)) for name in names])


def test_without_sizes_the_names_have_to_do():
    saved = read_plain(plain(*BUCKETS))
    assert saved == SavedLayout(BUCKETS, rebuilt=True)
    assert resumed_layout(saved, SPECS).assignment[0] == (1, 0)


def test_the_same_names_with_other_sizes_are_another_model(tmp_path):
    value = whole()
    value["elements"][0][1] += 1
    with pytest.raises(ValueError, match=r"of 6 elements\. Found: one of 7\. .* a\."):
        resumed_layout(read_plain(value), SPECS)
    path = tmp_path / "buckets.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"json does not fit .* minidp tune writes"):
        resumed_layout(read_plain(path), SPECS)


def test_round_trip(tmp_path):
    value = whole()
    saved = read_plain(value)
    layout = resumed_layout(saved, SPECS)
    assert layout.assignment == ((1, 0), (3,), (2,), (4,), (5,))
    assert [slot.offset for slot in layout.buckets[0].slots] == [0, 6]
    assert to_plain(layout, SPECS, rebuilt=True) == value
    path = tmp_path / "buckets.json"
    path.write_text(json.dumps(value | {"tuned": {"note": "is not looked at"}}))
    assert resumed_layout(read_plain(path), SPECS) == layout


@pytest.mark.parametrize("value", [[], 3, (("a",),)], ids=str)
def test_not_a_mapping(value):
    with pytest.raises(TypeError, match="bucket_layout must be a mapping"):
        read_plain(value)


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, text):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"file that minidp tune wrote, .*a\.json"):
        read_plain(path)


@pytest.mark.parametrize(
    ("key", "values", "text"),
    [
        ("format", [2, None], "must be of format 1, but got "),
        ("rebuilt", [1], "must hold 'rebuilt'"),
        (
            "buckets",
            [None, "ab", ["ab"], [["a"], []], [["a", 1]]],
            "must hold 'rebuilt'",
        ),
        ("elements", [[[1]], 3, [1], WRONG_TYPE], "one number for each name"),
    ],
)
def test_another_form(key, values, text):
    for value in values:
        with pytest.raises(ValueError, match=text) as caught:
            read_plain(plain(*BUCKETS) | {key: value})
        assert "What to do: pass what ddp.bucket_layout gave" in str(caught.value)


A, TABLE, WIDE, LATE, LATER = BUCKETS


@pytest.mark.parametrize(
    ("buckets", "texts"),
    [
        ((*BUCKETS, ("a",)), ["some stand in it more than once", "Parameters: a."]),
        ((*BUCKETS, ("x", "y")), ["are not such parameters", "Parameters: x, y."]),
        (BUCKETS[1:], ["Found: some are not in it", "Parameters: a, b."]),
        ((), ["Expected: each of the 6 trainable parameters once"]),
        (
            (("a", "wide"), ("b",), TABLE, LATE, LATER),
            [
                "Expected: one dtype, device and sort of gradient in each bucket",
                "Found: in bucket 0 wide: torch.float64 on cpu, dense; a: torch.float",
                "Parameters: a, wide.",
            ],
        ),
        (
            (("a", "table"), ("b",), WIDE, LATE, LATER),
            ["table: torch.float32 on cpu, sparse, table alone; a: torch.float32 on"],
        ),
        (
            (("a", "late"), ("b",), TABLE, WIDE, LATER),
            ["late: torch.float32 on cpu, dense, delayed; a: torch.float32 on cpu"],
        ),
        (
            (LATE, A, TABLE, WIDE, LATER),
            ["delayed parameters in the last", "bucket 0 before others", "s: late."],
        ),
    ],
    ids=str,
)
def test_a_layout_of_something_else(buckets, texts):
    with pytest.raises(ValueError, match="does not fit this module") as caught:
        resumed_layout(SavedLayout(buckets, rebuilt=True), SPECS)
    for text in [*texts, "What to do: "]:
        assert text in str(caught.value)


def test_sparse_gradients_travel_alone():
    specs = [spec("s", sparse=True), spec("t", sparse=True)]
    with pytest.raises(ValueError, match=r"cpu, sparse, t alone; s: torch.float32"):
        resumed_layout(SavedLayout((("s", "t"),), rebuilt=True), specs)


# ----------------------------------------------------------------- through the object

ALL = ["0.weight", "0.bias", "1.weight", "1.bias"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def of_net(*buckets, rebuilt=True):
    return with_sizes(plain(*buckets, rebuilt=rebuilt), net().named_parameters())


def step(ddp):
    ddp(torch.ones(2, 3)).sum().backward()


def test_the_layout_of_the_next_backward(lone_group):
    ddp = DataParallel(net(), process_group=lone_group, bucket_cap_mb=0)
    assert ddp.bucket_layout == of_net(ALL, rebuilt=False)
    file = io.BytesIO()
    torch.save(ddp.bucket_layout, file)  # a checkpoint can carry it
    file.seek(0)
    assert torch.load(file, weights_only=True) == ddp.bucket_layout
    step(ddp)
    foreseen = ddp.bucket_layout  # the rebuild comes with the next forward
    assert foreseen["rebuilt"] is True
    assert len(foreseen["buckets"]) == 4
    step(ddp)
    assert ddp.bucket_layout == foreseen
    assert foreseen["buckets"] == buckets_seen(ddp)


@pytest.mark.parametrize("is_static", [False, True])
def test_it_is_taken_as_it_is_and_stays(lone_group, is_static):
    given = of_net(["0.bias", "1.weight"], ["1.bias", "0.weight"])
    ddp = DataParallel(net(), process_group=lone_group, bucket_layout=given)
    if is_static:
        ddp._set_static_graph()
    for _ in range(4):
        assert ddp.bucket_layout == given
        step(ddp)
    assert buckets_seen(ddp) == [["0.bias", "1.weight"], ["1.bias", "0.weight"]]
    ddp.reset()
    assert ddp.bucket_layout == copy.deepcopy(ddp).bucket_layout == given


def test_one_that_was_not_rebuilt_is_rebuilt(lone_group):
    given = of_net(["0.bias", "1.weight"], ["1.bias", "0.weight"], rebuilt=False)
    ddp = DataParallel(net(), process_group=lone_group, bucket_layout=given)
    assert ddp.bucket_layout == given
    step(ddp)
    assert ddp.bucket_layout["rebuilt"]
    assert ddp.bucket_layout["buckets"] != given["buckets"]


def test_a_bad_one_is_refused_by_the_constructor(lone_group):
    with pytest.raises(ValueError, match=r"Parameters: 0\.weight, 0\.bias, 1\.weight"):
        DataParallel(net(), process_group=lone_group, bucket_layout=plain(["1.bias"]))


# ------------------------------------------------------------------ the same everywhere


@on_ranks(2)
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (None, "found on rank 1: None"),
        (plain(ALL, rebuilt=False), "found on rank 1: buckets of 4 parameters (not re"),
        (plain(ALL[::-1]), "found on rank 1: buckets of 4 parameters (rebuilt, sha"),
        (plain(ALL[:1], ALL[1:]), "found on rank 1: buckets of 1, 3 parameters (reb"),
    ],
    ids=["none", "not rebuilt", "another order", "other buckets"],
)
def test_ranks_must_have_the_same(ctx, other, text):
    layout = other if ctx.rank else plain(ALL)
    error = error_of(lambda: wrapped(ctx, net(), bucket_layout=layout))
    assert error.startswith("ReplicaMismatchError: ")
    assert "Expected option bucket_layout: buckets of 4 parameters (re" in error
    assert text in error


@on_ranks(2)
def test_a_rank_that_refuses_it_tells_the_others(ctx):
    layout = plain(ALL[1:] if ctx.rank else ALL)
    error = error_of(lambda: wrapped(ctx, net(), bucket_layout=layout))
    mine = "ValueError: bucket_layout"
    theirs = f"ReplicaMismatchError: [rank 0] rank 1 rejected its arguments: {mine}"
    assert error.startswith(mine if ctx.rank else theirs)
