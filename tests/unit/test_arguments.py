"""The constructor's arguments: torch's checks, in torch's order, plus a few of ours."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from minidp import DataParallel, _arguments
from minidp._inputs import move_inputs
from minidp._managed import examine
from tests.support.oracle import skip_unless_torch_takes


class Scale(nn.Module):
    def __init__(self, *, device="cpu", frozen=False):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, device=device), requires_grad=not frozen)

    def forward(self, x):
        return self.w * x


def frozen():
    return Scale(frozen=True)


def all_ignored():
    module = Scale()
    module._ddp_params_and_buffers_to_ignore = ["w", ".w"]
    return module


def lazy():
    return nn.LazyLinear(2)


def meta():
    return Scale(device="meta")


def two_device_types():
    return nn.Sequential(Scale(), Scale(device="meta"))


def delaying(pairs, until=None):
    """The two arguments that delay all-reduces, in the usual case or a wrong one."""
    return {
        "delay_all_reduce_named_params": pairs,
        "param_to_hook_all_reduce": torch.ones(1) if until is None else until,
    }


def error_of(wrap, build, options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wrap(build(), **options)
        except Exception as error:
            return error
    return None


# Build, options, error class, what ours says.
REFUSED_BY_BOTH = [
    (
        Scale,
        {"delay_all_reduce_named_params": []},
        ValueError,
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at "
        "the same time.",
    ),
    (
        Scale,
        {"param_to_hook_all_reduce": torch.ones(1)},
        ValueError,
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at "
        "the same time.",
    ),
    (
        frozen,
        {},
        RuntimeError,
        "DistributedDataParallel is not needed when a module doesn't have any "
        "parameter that requires a gradient. (Every parameter of this module is frozen "
        "or on the ignore list.)",
    ),
    (
        all_ignored,
        {},
        RuntimeError,
        "DistributedDataParallel is not needed when a module doesn't have any "
        "parameter that requires a gradient. (Every parameter of this module is frozen "
        "or on the ignore list.)",
    ),
    (
        Scale,
        {"device_ids": [0, 1]},
        ValueError,
        "device_ids can only be None or contain a single element, but got [0, 1].",
    ),
    (
        Scale,
        {"device_ids": [0]},
        ValueError,
        "DataParallel device_ids and output_device arguments only work with "
        "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
        "[0], output_device None, and module parameters on ['cpu']. Leave both at None "
        "here.",
    ),
    (
        Scale,
        {"output_device": 1},
        ValueError,
        "DataParallel device_ids and output_device arguments only work with "
        "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
        "None, output_device 1, and module parameters on ['cpu']. Leave both at None "
        "here.",
    ),
    (
        lazy,
        {},
        RuntimeError,
        "Modules with uninitialized parameters can't be used with `DataParallel`. Run "
        "a dummy forward pass to correctly initialize the modules. Uninitialized: "
        "weight, bias.",
    ),
    (
        meta,
        {},
        RuntimeError,
        "Parameters on the meta device have no data to synchronise: w. Materialise "
        "them first, for example with module.to_empty(device=...) and an "
        "initialisation.",
    ),
]
ids = [f"{build.__name__} {options}" for build, options, *_ in REFUSED_BY_BOTH]


@pytest.mark.parametrize(("build", "options", "kind", "text"), REFUSED_BY_BOTH, ids=ids)
def test_torch_refuses_it_too(lone_group, build, options, kind, text):
    theirs = error_of(DistributedDataParallel, build, options)
    ours = error_of(DataParallel, build, options)
    assert type(ours) is kind
    assert isinstance(theirs, kind)
    assert str(ours) == text


def test_device_types_may_not_be_mixed(lone_group):
    ours = error_of(DataParallel, two_device_types, {})
    theirs = error_of(DistributedDataParallel, two_device_types, {})
    assert type(ours) is type(theirs) is ValueError
    assert str(ours).startswith(
        "DataParallel's input module must be on the same type of devices, but input "
        "module parameters locate in {"
    )


# What torch does instead stands beside it: None is silence.
STRICTER_THAN_TORCH = [
    (Scale, {"bucket_cap_mb": -1}, ValueError, None),
    (Scale, {"output_device": 0}, ValueError, None),
    (Scale, {"process_group": "world"}, TypeError, TypeError),
    (Scale, {"bucket_cap_mb_list": [-1]}, ValueError, TypeError),
    (Scale, {"bucket_cap_mb": "25"}, TypeError, ValueError),  # "25" * 2**20
    (Scale, {"mixed_precision": "bf16"}, TypeError, AttributeError),
    (Scale, {"mixed_precision": torch.bfloat16}, TypeError, AttributeError),
    (
        Scale,
        {"mixed_precision": _MixedPrecision(param_dtype=torch.int32)},
        TypeError,
        RuntimeError,
    ),
    (Scale, delaying(7), TypeError, TypeError),
    (Scale, delaying(["w"]), TypeError, ValueError),
    (Scale, delaying([("w", torch.ones(2))]), TypeError, ValueError),
    (Scale, delaying([], until="w"), TypeError, None),
]
ids = [str(options) for _, options, *_ in STRICTER_THAN_TORCH]


@pytest.mark.parametrize(
    ("build", "options", "ours", "theirs"), STRICTER_THAN_TORCH, ids=ids
)
def test_difference_stricter_than_torch(lone_group, build, options, ours, theirs):
    skip_unless_torch_takes(options)
    assert type(error_of(DataParallel, build, options)) is ours
    found = error_of(DistributedDataParallel, build, options)
    assert isinstance(found, theirs or type(None))


ACCEPTED_BY_BOTH = [
    {"device_ids": []},
    {"device_ids": None, "output_device": None},
    {"bucket_cap_mb": 0},
    {"bucket_cap_mb": 0.5},
    {"bucket_cap_mb_list": []},
    {"bucket_cap_mb_list": [1, 2.5]},
    {"check_reduction": True},
    {"broadcast_buffers": False},
    {"dim": 3},
    {"init_sync": False},
    {"batched_grad_copy": True},
    {"skip_all_reduce_unused_params": True},
    {"mixed_precision": None},
]


@pytest.mark.parametrize("options", ACCEPTED_BY_BOTH, ids=str)
def test_torch_accepts_it_too(lone_group, options):
    skip_unless_torch_takes(options)
    assert error_of(DistributedDataParallel, Scale, options) is None
    assert error_of(DataParallel, Scale, options) is None


def test_signature_is_torchs_with_more_options():
    skip_unless_torch_takes(["batched_grad_copy", "forward_sync_buffers"])
    theirs = list(inspect.signature(DistributedDataParallel).parameters.values())
    parameters = list(inspect.signature(DataParallel).parameters.values())
    ours, extra = parameters[: len(theirs)], parameters[len(theirs) :]
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert {p.name: p.default for p in extra} == {
        "unsynced": "raise",
        "hang_timeout": "auto",
        "check_replicas_every": "auto",
        "check_finite_grads": False,
        "bucket_layout": None,
    }
    assert {p.kind for p in extra} == {inspect.Parameter.KEYWORD_ONLY}


def test_module_must_be_a_module(lone_group):
    with pytest.raises(TypeError) as caught:
        DataParallel([nn.Linear(1, 1)])
    assert str(caught.value) == "module must be a torch.nn.Module, but got list."


def test_unsynced_is_checked(lone_group):
    with pytest.raises(ValueError, match=r"unsynced must be one of .*got 'never'"):
        DataParallel(Scale(), unsynced="never")


def test_what_is_wrong_with_mixed_precision(lone_group):
    with pytest.raises(TypeError) as caught:
        DataParallel(Scale(), mixed_precision=torch.float16)
    assert str(caught.value) == (
        "mixed_precision must have a param_dtype, a reduce_dtype and a buffer_dtype, "
        "each a floating torch.dtype or None (torch.nn.parallel.distributed."
        "_MixedPrecision), but got torch.float16."
    )


def test_what_is_wrong_with_delayed_parameters(lone_group):
    with pytest.raises(TypeError) as caught:
        DataParallel(Scale(), **delaying([("w", 3)]))
    assert str(caught.value) == (
        "delay_all_reduce_named_params must be pairs (name, parameter), as from "
        "named_parameters(), but got (str, int)."
    )
    with pytest.raises(ValueError, match="gives the name w to a parameter of another"):
        DataParallel(Scale(), **delaying([("w", nn.Parameter(torch.ones(2)))]))


def test_delayed_parameters_may_come_from_an_iterator(lone_group):
    module = nn.Sequential(Scale(), Scale())
    delayed = module[0].named_parameters(prefix="0")
    options = {
        "delay_all_reduce_named_params": delayed,
        "param_to_hook_all_reduce": module[1].w,
    }
    ddp = DataParallel(module, **options)
    for each in (ddp, copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        (found,) = each._delay_all_reduce_params
        assert found is each.module[0].w
        assert each._reducer.pipeline.layout.assignment == ((1,), (0,))


# --------------------------------------------------------------------- choice of group


def test_group_is_the_default_one(lone_group):
    assert DataParallel(Scale()).process_group is lone_group


def test_no_default_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(
        torch.distributed.distributed_c10d, "is_initialized", lambda: False
    )
    theirs = error_of(DistributedDataParallel, Scale, {})
    ours = error_of(DataParallel, Scale, {})
    assert type(ours) is type(theirs) is ValueError
    assert str(theirs).startswith("Default process group has not been initialized")
    assert str(ours) == (
        "Default process group has not been initialized: call "
        "torch.distributed.init_process_group() first (torchrun sets the environment "
        "variables that it reads), or pass process_group."
    )


def test_group_must_be_a_group(lone_group):
    with pytest.raises(TypeError) as caught:
        DataParallel(Scale(), process_group="world")
    assert str(caught.value) == (
        "process_group must be a torch.distributed.ProcessGroup of which this process "
        "is a member, but got 'world' (str)."
    )


@pytest.fixture
def mesh(lone_group):
    return init_device_mesh("cpu", (1,))


def test_group_of_a_mesh(mesh):
    ddp = DataParallel(Scale(), device_mesh=mesh)
    assert ddp.process_group is mesh.get_group(0)
    assert ddp.device_mesh is mesh


def test_group_and_mesh(mesh, lone_group):
    options = {"process_group": lone_group, "device_mesh": mesh}
    theirs = error_of(DistributedDataParallel, Scale, options)
    ours = error_of(DataParallel, Scale, options)
    assert type(ours) is type(theirs) is RuntimeError
    assert str(ours) == str(theirs)


def test_mesh_of_two_dimensions(lone_group):
    options = {"device_mesh": init_device_mesh("cpu", (1, 1))}
    theirs = error_of(DistributedDataParallel, Scale, options)
    ours = error_of(DataParallel, Scale, options)
    assert type(ours) is type(theirs) is RuntimeError
    assert str(ours).startswith("Only 1D device mesh is supported, but got ")


def test_group_comes_before_other_checks(lone_group, mesh):
    """Torch's order: a frozen module with two groups is told about the groups."""
    options = {"process_group": lone_group, "device_mesh": mesh}
    for wrap in (DistributedDataParallel, DataParallel):
        assert "process_group and device_mesh" in str(error_of(wrap, frozen, options))


def test_frozen_comes_before_device_ids(lone_group):
    for wrap in (DistributedDataParallel, DataParallel):
        error = error_of(wrap, frozen, {"device_ids": [0, 1]})
        assert "doesn't have any parameter" in str(error)


def test_difference_group_comes_before_the_delayed_arguments(lone_group, mesh):
    """We must know the group first: the other ranks are told why this one leaves."""
    options = {
        "process_group": lone_group,
        "device_mesh": mesh,
        "param_to_hook_all_reduce": torch.ones(1),
    }
    assert type(error_of(DistributedDataParallel, Scale, options)) is ValueError
    assert type(error_of(DataParallel, Scale, options)) is RuntimeError


# -------------------------------------------------------------------------- buffers


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, False),
        ({"broadcast_buffers": True}, True),
        ({"broadcast_buffers": False}, True),
        ({"forward_sync_buffers": True}, False),
        ({"forward_sync_buffers": False}, False),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, True),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True),
    ],
    ids=str,
)
def test_buffer_flags_are_torchs(lone_group, options, warns):
    skip_unless_torch_takes(["forward_sync_buffers"])
    flags = []
    for wrap in (DistributedDataParallel, DataParallel):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp = wrap(nn.BatchNorm1d(2), **options)
        kinds = [w.category for w in caught]
        assert kinds == [FutureWarning] * warns
        flags.append((ddp.forward_sync_buffers, ddp.broadcast_buffers))
    assert flags[0] == flags[1]


@pytest.mark.parametrize(
    ("broadcast_buffers", "forward_sync_buffers", "expected"),
    [
        (None, None, (True, True)),
        (True, None, (True, True)),
        (False, None, (False, False)),
        (None, True, (True, True)),
        (None, False, (False, True)),
        (False, True, (True, True)),
        (True, False, (False, True)),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_buffer_flags(broadcast_buffers, forward_sync_buffers, expected):
    found = _arguments.buffer_flags(
        broadcast_buffers=broadcast_buffers, forward_sync_buffers=forward_sync_buffers
    )
    assert found == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"broadcast_buffers": True},
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` for the "
            "broadcasts before forwards; construction then always broadcasts.",
        ),
        (
            {"broadcast_buffers": True, "forward_sync_buffers": True},
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified; "
            "`broadcast_buffers` is deprecated and ignored.",
        ),
        (
            {"check_reduction": True},
            "The argument `check_reduction` is deprecated and ignored.",
        ),
    ],
    ids=str,
)
def test_deprecations_point_at_the_caller(lone_group, options, text):
    with pytest.warns(FutureWarning) as caught:
        DataParallel(Scale(), **options)
    assert [str(w.message) for w in caught] == [text]
    assert caught[0].filename == __file__


def test_broadcast_buffers_is_an_alias(lone_group):
    ddp = DataParallel(nn.BatchNorm1d(2), forward_sync_buffers=False)
    assert ddp.broadcast_buffers is False
    ddp.broadcast_buffers = True
    assert ddp.forward_sync_buffers is True
    assert ddp.will_sync_module_buffers() is True


# ----------------------------------------------------------- which parameters take part


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.late = nn.Linear(2, 2)
        self.early = nn.Linear(2, 2)
        self.early.weight = self.late.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.fixed = nn.Parameter(torch.ones(1), requires_grad=False)
        self.table = nn.Embedding(3, 2, sparse=True)
        self.bag = nn.EmbeddingBag(3, 2, sparse=True)
        self.same = self.table


def test_managed_parameters_are_torchs(lone_group):
    module = Tied()
    theirs, sparse = DistributedDataParallel(module)._build_params_for_reducer()
    ours = examine(module, {})
    assert [id(p) for p in ours.managed.values()] == [id(p) for p in theirs]
    assert [name in ours.sparse for name in ours.managed] == sparse
    assert list(ours.managed) == [
        "scale",
        "late.weight",
        "late.bias",
        "early.bias",
        "table.weight",
        "bag.weight",
    ]
    assert ours.sparse == {"table.weight", "bag.weight"}


def test_frozen_parameters_take_part_but_are_not_managed():
    replica = examine(Tied(), {})
    assert "fixed" in replica.parameters
    assert "fixed" not in replica.managed


@pytest.mark.parametrize("listed", ["scale", ".scale"])
def test_root_parameters_may_be_ignored_by_either_name(listed):
    module = Tied()
    module._ddp_params_and_buffers_to_ignore = [listed, "late.bias"]
    replica = examine(module, {})
    assert replica.ignored == {"scale", "late.bias"}
    for names in (replica.parameters, replica.managed):
        assert "scale" not in names
        assert "late.bias" not in names


def test_unknown_names_on_the_ignore_list_are_told(lone_group):
    module = Tied()
    module._ddp_params_and_buffers_to_ignore = ["lat.bias", "scale", "gone"]
    with pytest.warns(UserWarning, match="ignore list") as caught:
        DataParallel(module)
    assert [str(w.message) for w in caught] == [
        "The module's ignore list names parameters or buffers that it does not have: "
        "gone, lat.bias."
    ]
    assert caught[0].filename == __file__


def test_torchs_function_makes_the_list(lone_group):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = ["0.weight", "1.running_mean"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    ddp = DataParallel(module)
    assert ddp.parameters_to_ignore == set(names)
    assert "1.running_mean" not in ddp.named_module_buffers
    assert ddp._reducer.names == ("0.bias", "1.weight", "1.bias")


def test_specs_say_what_the_layout_needs():
    spec = {s.name: s for s in examine(Tied(), {}).specs}["table.weight"]
    assert (spec.shape, spec.stride) == ((3, 2), (2, 1))
    assert (spec.dtype, spec.device.type, spec.sparse) == (torch.float32, "cpu", True)


# ----------------------------------------------------------------------------- inputs


Pair = namedtuple("Pair", "first second")


def test_inputs_are_moved_through_containers():
    meta = torch.device("meta")
    value = torch.ones(1)
    moved = move_inputs(
        {
            "a": [value, 3],
            "b": Pair(value, "x"),
            "c": (value,),
            "d": OrderedDict(e=value),
        },
        meta,
    )
    assert moved["a"][0].device == meta
    assert moved["a"][1] == 3
    assert type(moved["b"]) is Pair
    assert moved["b"].first.device == meta
    assert moved["b"].second == "x"
    assert type(moved["c"]) is tuple
    assert moved["c"][0].device == meta
    assert type(moved["d"]) is OrderedDict
    assert moved["d"]["e"].device == meta


def test_other_inputs_are_passed_on_as_they_are():
    for value in (None, 3, {1, 2}, object(), "text"):
        assert move_inputs(value, torch.device("meta")) is value


def test_packed_sequences_move():
    packed = nn.utils.rnn.pack_sequence([torch.ones(2)])
    assert move_inputs(packed, torch.device("cpu")).data.tolist() == [1, 1]
