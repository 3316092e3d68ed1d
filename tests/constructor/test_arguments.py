"""The constructor's arguments: torch's checks, in torch's order, plus a few of ours."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import minidp
from minidp import DataParallel
from minidp.data_parallel.inputs import moved
from minidp.replica.parameters import examine
from tests.support.oracle import TAKES, skip_unless_torch_takes


class Scale(nn.Module):
    def __init__(self, *, device="cpu", frozen=False, ignored=()):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, device=device), requires_grad=not frozen)
        self._ddp_params_and_buffers_to_ignore = list(ignored)

    def forward(self, x):
        return self.w * x


ONE = torch.ones(1)


class Tied(nn.Module):
    """Shared, sparse, frozen parameters; registration order is not definition order."""

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


MODULES = {
    "plain": Scale,
    "frozen": lambda: Scale(frozen=True),
    "all ignored": lambda: Scale(ignored=["w", ".w"]),
    "lazy": lambda: nn.LazyLinear(2),
    "meta": lambda: Scale(device="meta"),
    "two device types": lambda: nn.Sequential(Scale(), Scale(device="meta")),
}
# What torch refuses as well, in the same class: module, options, class, our text.
REFUSED_BY_BOTH = [
    ("plain", {"delay_all_reduce_named_params": []}, ValueError, "at the same time."),
    ("plain", {"param_to_hook_all_reduce": ONE}, ValueError, "at the same time."),
    # The module comes first.
    ("frozen", {"device_ids": [0, 1]}, RuntimeError, "a module doesn't have any param"),
    ("all ignored", {}, RuntimeError, "is frozen or on the ignore list"),
    ("plain", {"device_ids": [0, 1]}, ValueError, "a single element, but got [0, 1]."),
    ("plain", {"device_ids": [0]}, ValueError, "parameters on ['cpu']. Leave both at"),
    ("plain", {"output_device": 1}, ValueError, "got device_ids None, output_device 1"),
    ("lazy", {}, RuntimeError, "Uninitialized: weight, bias."),
    ("meta", {}, RuntimeError, "have no data to synchronise: w. Materialise"),
    ("two device types", {}, ValueError, "module parameters locate in {"),
]


@pytest.mark.parametrize(("module", "options", "kind", "text"), REFUSED_BY_BOTH)
def test_torch_refuses_it_too(lone_group, module, options, kind, text):
    ours = error_of(DataParallel, MODULES[module], options)
    assert type(ours) is kind
    assert isinstance(error_of(DistributedDataParallel, MODULES[module], options), kind)
    assert text in str(ours)


FLAGS = (
    *("find_unused_parameters", "static_graph", "gradient_as_bucket_view"),
    *("skip_all_reduce_unused_params", "batched_grad_copy", "broadcast_buffers"),
    "forward_sync_buffers",
)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_are_read_as_torch_reads_them(lone_group, flag):
    skip_unless_torch_takes([flag])
    for value in ("yes", "", b"no", [], {}, object()):
        ours = error_of(DataParallel, Scale, {flag: value})
        assert isinstance(ours, TypeError)
        assert f"{flag} must be True or False, but got {value!r}" in str(ours)
        theirs = error_of(DistributedDataParallel, Scale, {flag: value})
        assert isinstance(theirs, TypeError)
    for value in (None, 0, 1, 2, 1.0, np.True_, np.int64(1), torch.tensor(True)):
        for wrap in (DataParallel, DistributedDataParallel):
            assert error_of(wrap, Scale, {flag: value}) is None


def test_a_text_is_no_flag_of_ours_either(lone_group):
    for flag in ("init_sync", "check_finite_grads"):
        with pytest.raises(TypeError, match=f"{flag} must be True or False.*'no'"):
            DataParallel(Scale(), **{flag: "no"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hang_timout", "hang_timeout"),
        ("find_unused_paramters", "find_unused_parameters"),
        ("bucket_cap", "bucket_cap_mb"),
        ("nonsense", None),
    ],
)
@pytest.mark.parametrize("wrap", [DataParallel, minidp.attach])
def test_an_unknown_argument_names_the_one_that_was_meant(
    lone_group, wrap, name, meant
):
    with pytest.raises(TypeError, match="got an unexpected keyword") as caught:
        wrap(Scale(), **{name: 3})
    hint = f". Did you mean {meant!r}?" if meant else ""
    assert str(caught.value).endswith(f"keyword argument {name!r}{hint}")


# ----------------------------------------------------------- tensors to be overwritten


def with_buffer(value):
    module = Scale()
    module.register_buffer("extra", value)
    return module


EXPANDED = torch.zeros(1).expand(3)
NOT_WRITABLE = [
    (EXPANDED, "extra (expanded: several of its elements"),
    (torch.eye(2).to_sparse(), "extra (sparse_coo)"),
]


@pytest.mark.parametrize(("value", "text"), NOT_WRITABLE)
def test_a_buffer_that_cannot_be_overwritten_is_named(lone_group, value, text):
    error = error_of(DataParallel, lambda: with_buffer(value), {})
    assert type(error) is RuntimeError
    assert text in str(error)
    assert isinstance(
        error_of(DistributedDataParallel, lambda: with_buffer(value), {}), RuntimeError
    )
    # Nobody overwrites it: it may be what it likes.
    module = with_buffer(value)
    module._ddp_params_and_buffers_to_ignore = ["extra"]
    for each, options in [
        (module, {}),
        (with_buffer(value), {"broadcast_buffers": False}),
        (with_buffer(value), {"init_sync": False, "forward_sync_buffers": False}),
    ]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            DataParallel(each, **options)(ONE).sum().backward()


def test_an_expanded_parameter_is_named(lone_group):
    module = Scale()
    module.odd = nn.Parameter(EXPANDED, requires_grad=False)
    with pytest.raises(RuntimeError, match=r"odd \(expanded"):
        DataParallel(module)
    DataParallel(module, init_sync=False)(ONE).sum().backward()


def test_an_expanded_buffer_that_comes_later_is_named(lone_group):
    ddp = DataParallel(with_buffer(torch.zeros(3)))
    ddp(ONE).sum().backward()
    ddp.module.extra = EXPANDED
    with pytest.raises(RuntimeError, match=r"extra \(expanded"):
        ddp(ONE)
    ddp.module.extra = EXPANDED.clone()
    ddp(ONE).sum().backward()


def test_a_buffer_on_the_meta_device_has_nothing_to_send(lone_group):
    for wrap in (DataParallel, DistributedDataParallel):
        wrap(with_buffer(torch.zeros(3, device="meta")))(ONE).sum().backward()
    options = {"check_replicas_every": 1}
    ddp = DataParallel(with_buffer(torch.zeros(3, device="meta")), **options)
    ddp(ONE).sum().backward()


def test_a_wrapped_wrapper_is_warned_of(lone_group):
    for inner in (DataParallel, DistributedDataParallel):
        with pytest.warns(UserWarning, match=r"although the module is a wrapper"):
            ddp = DataParallel(inner(Scale()))
        ddp(ONE).sum().backward()
        assert ddp.module.module.w.grad.tolist() == [1, 1]
        with pytest.warns(UserWarning, match=r"although its part 1 is a wrapper"):
            DataParallel(nn.Sequential(Scale(), inner(Scale())))


def test_wrappers_that_share_no_parameter_may_be_nested(lone_group):
    """Each parameter is on the ignore list of one of them, or of both."""
    ignore = DataParallel._set_params_and_buffers_to_ignore_for_model
    for kind in (DataParallel, DistributedDataParallel):
        inner = kind(Scale())
        outer = nn.Sequential(Scale(), inner)
        ignore(outer, ["1.module.w"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ddp = DataParallel(outer)
        ddp(ONE).sum().backward()
        assert [p.grad is not None for p in ddp.parameters()] == [True, True]
        part = nn.Sequential(Scale(), Scale())
        ignore(part, ["0.w"])
        inner = kind(part)
        outer = nn.Sequential(Scale(), inner)
        ignore(outer, ["1.module.1.w"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DataParallel(outer)
        ignore(outer, ["1.module.0.w"])
        with pytest.warns(UserWarning, match=r"although its part 1 is a wrapper"):
            DataParallel(outer)


LOW = _MixedPrecision(*[torch.bfloat16] * 3)
# Torch's makes a CUDA stream, which a torch with CUDA cannot without a driver.
HAS_STREAMS = not torch.version.cuda or torch.cuda.is_available()
THEIRS = None if HAS_STREAMS else RuntimeError
# What ours raises; what torch does instead, where None is silence; our text.
PAIRS = "delay_all_reduce_named_params must be pairs (name, parameter), as from "
STRICTER_THAN_TORCH = [
    ({"bucket_cap_mb": -1}, ValueError, None, "bucket_cap_mb must be finite"),
    ({"output_device": 0}, ValueError, None, "output_device 0"),
    ({"process_group": "w"}, TypeError, TypeError, "is a member, but got 'w' (str)."),
    ({"bucket_cap_mb_list": [-1]}, ValueError, TypeError, "bucket_cap_mb_list must be"),
    ({"bucket_cap_mb": "25"}, TypeError, ValueError, "bucket_cap_mb must be a number"),
    ({"mixed_precision": "bf16"}, ValueError, AttributeError, "but got 'bf16'"),
    ({"mixed_precision": LOW}, ValueError, THEIRS, "inside torch.autocast"),
    ({"mixed_precision": LOW}, ValueError, THEIRS, "bf16_compress_hook"),
    (delaying(7), TypeError, TypeError, "not iterable"),
    (
        delaying(["w"]),
        TypeError,
        ValueError,
        PAIRS + "named_parameters(), but got (str",
    ),
    (delaying([("w", torch.ones(2))]), TypeError, ValueError, "but got (str, Tensor)."),
    (delaying([], until="w"), TypeError, None, "must be a parameter, but got 'w'."),
]


@pytest.mark.parametrize("case", STRICTER_THAN_TORCH, ids=lambda case: str(case[0]))
def test_difference_stricter_than_torch(lone_group, case):
    options, ours, theirs, text = case
    skip_unless_torch_takes(options)
    error = error_of(DataParallel, Scale, options)
    assert type(error) is ours
    assert text in str(error)
    found = error_of(DistributedDataParallel, Scale, options)
    assert isinstance(found, theirs or type(None))


def test_signature_is_torchs_with_more_options():
    skip_unless_torch_takes(["batched_grad_copy", "forward_sync_buffers"])
    theirs = list(inspect.signature(DistributedDataParallel).parameters.values())
    parameters = list(inspect.signature(DataParallel).parameters.values())
    ours, extra = parameters[: len(theirs)], parameters[len(theirs) :]
    if "lazy_bucket_allocation" not in TAKES:  # on each torch, as it does no harm
        assert extra.pop(0).name == "lazy_bucket_allocation"
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert {p.name: p.default for p in extra} == {
        "unsynced": "raise",
        "hang_timeout": "auto",
        "check_replicas_every": "auto",
        "check_finite_grads": False,
        "bucket_layout": None,
        "average_over": "ranks",
        "logical_ranks": None,
        "audit_every": 0,
        "audit_action": "raise",
    }
    assert {p.kind for p in extra} == {inspect.Parameter.KEYWORD_ONLY}


def test_what_only_ours_checks(lone_group):
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, but got list\."):
        DataParallel([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"unsynced must be one of .*got 'never'"):
        DataParallel(Scale(), unsynced="never")
    with pytest.raises(ValueError, match="gives the name w to a parameter of another"):
        DataParallel(Scale(), **delaying([("w", nn.Parameter(torch.ones(2)))]))


def test_delayed_parameters_may_come_from_an_iterator(lone_group):
    module = nn.Sequential(Scale(), Scale())
    options = delaying(module[0].named_parameters(prefix="0"), until=module[1].w)
    ddp = DataParallel(module, **options)
    for each in (ddp, copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        (found,) = each._delay_all_reduce_params
        assert found is each.module[0].w
        assert each.bucket_layout["buckets"] == [["1.w"], ["0.w"]]


# --------------------------------------------------------------------- choice of group


def test_no_default_group(monkeypatch):
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        monkeypatch.setattr(module, "is_initialized", lambda: False)
    for wrap in (DistributedDataParallel, DataParallel):
        with pytest.raises(ValueError, match="Default process group has not been init"):
            wrap(Scale())


@pytest.fixture
def mesh(lone_group):
    return init_device_mesh("cpu", (1,))


def test_a_mesh_and_a_group_are_checked_before_the_module(mesh, lone_group):
    ddp = DataParallel(Scale(), device_mesh=mesh)
    assert ddp.process_group is mesh.get_group(0)
    assert ddp.device_mesh is mesh
    both = {"process_group": lone_group, "device_mesh": mesh}
    for options in (both, {"device_mesh": init_device_mesh("cpu", (1, 1))}):
        errors = [
            error_of(wrap, lambda: Scale(frozen=True), options)
            for wrap in (DistributedDataParallel, DataParallel)
        ]
        assert [type(error) for error in errors] == [RuntimeError] * 2
        assert str(errors[0])[:30] == str(errors[1])[:30]


def test_difference_group_comes_before_the_delayed_arguments(lone_group, mesh):
    """We must know the group first: the other ranks are told why this one leaves."""
    options = {
        "process_group": lone_group,
        "device_mesh": mesh,
        "param_to_hook_all_reduce": torch.ones(1),
    }
    assert type(error_of(DistributedDataParallel, Scale, options)) is ValueError
    assert type(error_of(DataParallel, Scale, options)) is RuntimeError


# ----------------------------------------------------------- which parameters take part


def test_managed_parameters_are_torchs(lone_group):
    module = Tied()
    theirs, sparse = DistributedDataParallel(module)._build_params_for_reducer()
    ours = examine(module, {})
    assert [id(p) for p in ours.managed.values()] == [id(p) for p in theirs]
    assert [name in ours.sparse for name in ours.managed] == sparse
    assert list(ours.managed) == [
        *("scale", "late.weight", "late.bias", "early.bias"),
        *("table.weight", "bag.weight"),
    ]
    assert ours.sparse == {"table.weight", "bag.weight"}
    assert "fixed" in ours.parameters
    spec = {s.name: s for s in ours.specs}["table.weight"]
    assert (spec.shape, spec.stride) == ((3, 2), (2, 1))
    assert (spec.dtype, spec.device.type, spec.sparse) == (torch.float32, "cpu", True)


def test_unknown_names_on_the_ignore_list_are_told(lone_group):
    module = Tied()
    module._ddp_params_and_buffers_to_ignore = ["lat.bias", "scale", "gone"]
    text = r"ignore list names .* it does not have: gone, lat\.bias\.$"
    with pytest.warns(UserWarning, match=text) as caught:
        DataParallel(module)
    assert caught[0].filename == __file__


# ----------------------------------------------------------------------------- inputs

Pair = namedtuple("Pair", "first second")


def to_meta(value):
    return moved(value, torch.device("meta"))


def test_inputs_are_moved_through_containers():
    x = torch.ones(1)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2)])
    value = {"a": [x, 3], "b": Pair(x, "x"), "c": (x, packed), "d": OrderedDict(e=x)}
    moved = to_meta(value)
    assert [type(moved[key]) for key in "abcd"] == [list, Pair, tuple, OrderedDict]
    tensors = moved["a"][0], moved["b"].first, *moved["c"], moved["d"]["e"]
    assert all(tensor.data.device.type == "meta" for tensor in tensors)
    assert (moved["a"][1], moved["b"].second) == (3, "x")
    for other in (None, 3, {1, 2}, object(), "text"):
        assert to_meta(other) is other
