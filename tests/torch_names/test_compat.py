"""Torch's private names on our object, side by side with torch's where that works."""

from __future__ import annotations

import logging.handlers

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from tests.support.both import Scalars, grads, modes, on_both, same, values, x_of
from tests.support.combined import in_turns
from tests.support.fresh import run_fresh
from tests.support.ranks import as_in_torch, on_ranks

WRAPPERS = (DistributedDataParallel, DataParallel)

# --------------------------------------------------------------------------- the names

# Private methods that third parties call.
PRIVATE = (
    *("_pre_forward", "_post_forward", "_get_ddp_logging_data", "_set_static_graph"),
    *("_set_ddp_runtime_logging_sample_rate", "_check_reducer_finalized"),
    *("_update_process_group", "_remove_autograd_hooks", "_set_ddp_sink_clone"),
    *("_register_fused_optim", "_register_buffer_comm_hook"),
    *("_register_builtin_comm_hook", "_get_data_parallel_params"),
    *("_set_params_and_buffers_to_ignore_for_model", "_build_params_for_reducer"),
    *("_build_debug_param_to_name_mapping", "_default_broadcast_coalesced"),
    *("_divide_by_initial_world_size", "_authoritative_rank", "_join_config"),
    *("_has_rebuilt_buckets", "_bucket_config"),
)
ABSENT = {
    "_delay_grad_buffer": "delayed gradients have buckets, as all others",
    "_delay_grad_views": "the same",
    "_delay_all_reduce_all_params": "nothing special about it",
    "_static_graph_delay_allreduce_enqueued": "the end of a backward is seen otherwise",
    "buffer_hook": "torch's object behind _register_buffer_comm_hook",
    "_mp_stream": "mixed_precision is refused",
    "_submodule_to_event": "the same",
}
ABSENT_IN_REDUCER = {
    "_set_optimizer_in_backward": "DataParallel steps such optimizers itself",
    "_set_mixed_precision_param_dtype": "mixed_precision is refused",
    "_set_sparse_metadata": "for a sparse all-reduce of NCCL that nobody calls",
    "set_logger": "the logging looks at the reducer, not the other way round",
    "_pybind11_conduit_v1_": "pybind11's own",
    "_set_static_graph": "a method of DataParallel, where others call it",
    "_set_ddp_runtime_logging_sample_rate": "the same",
    "_update_process_group": "the same",
    "_remove_autograd_hooks": "the same",
    "_autograd_hook": "only torch's own class calls it, inside its forward or join()",
    "_install_post_backward_futures": "the same",
    "_push_all_rebuilt_params": "the same",
    "_reset_state": "the same",
    "_run_comm_hook": "the same",
    "_set_forward_pass_work_handle": "the same",
    "get_backward_stats": "nobody calls it; a Recorder has the times",
}
OTHER_VALUES = {
    "use_side_stream_for_tensor_copies": "nothing is copied here",
}


def names_of(theirs):
    """Torch's public names, its object's own attributes, and PRIVATE."""
    public = {name for name in dir(theirs) if not name.startswith("_")}
    own = {name for name in vars(theirs) if not name.startswith("__")}
    return public | own | {*PRIVATE}


def test_every_name_is_there_or_has_a_reason_not_to_be(lone_group):
    theirs, ours = (wrap(Scalars(), static_graph=True) for wrap in WRAPPERS)
    assert {name for name in names_of(theirs) if not hasattr(ours, name)} <= {*ABSENT}
    assert [name for name in ABSENT if hasattr(ours, name)] == []
    of_torch = {name for name in dir(theirs.reducer) if not name.startswith("__")}
    missing = {name for name in of_torch if not hasattr(ours.reducer, name)}
    assert missing == {*ABSENT_IN_REDUCER}


def test_values_are_torchs(lone_group):
    changes = {"find_unused_parameters": True, "bucket_cap_mb": 3}
    for options in (changes, {"bucket_cap_mb_list": [1, 2]}):
        theirs, ours = (wrap(nn.BatchNorm1d(2), **options) for wrap in WRAPPERS)
        for name in names_of(theirs) - {*ABSENT, *OTHER_VALUES}:
            value = getattr(theirs, name, ())
            if isinstance(value, bool | int | str | None | list | set):
                assert same(value, getattr(ours, name)), name
        assert theirs.process_group is ours.process_group
        assert list(ours.named_module_buffers) == list(theirs.named_module_buffers)


def test_it_is_a_ddp_for_others(lone_group):
    net = nn.Linear(2, 2)
    ddp = DataParallel(net)
    assert isinstance(ddp, DistributedDataParallel)
    assert issubclass(DataParallel, DistributedDataParallel)
    assert not isinstance(net, DistributedDataParallel)
    assert set(get_model_state_dict(ddp)) == {"weight", "bias"}
    assert DataParallel.__module__ == "minidp"
    with pytest.raises(AttributeError, match="no attribute 'reducers'"):
        ddp.reducers  # noqa: B018


# ------------------------------------------------------------------------ ignored names


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.inner = nn.BatchNorm1d(2)


def test_ignored_and_data_parallel_parameters(lone_group):
    for wrap in WRAPPERS:
        module = Deep()
        names = ["inner.weight", "inner.running_mean", "w"]
        wrap._set_params_and_buffers_to_ignore_for_model(module, names)
        assert module._ddp_params_and_buffers_to_ignore == names
        assert module.inner.running_mean._ddp_ignored
        (only,) = wrap._get_data_parallel_params(module)
        assert only is module.inner.bias
    # Torch's gives all names.
    pairs = list(DataParallel._get_data_parallel_params(module, named_params=True))
    assert [name for name, _ in pairs] == ["inner.bias"]
    ddp = DataParallel(module)  # torch's wants ".w" for the root, besides
    assert ddp.bucket_layout["buckets"] == [["inner.bias"]]
    module = Deep()
    DataParallel._set_params_and_buffers_to_ignore_for_model(module, [".w"])
    assert module.w._ddp_ignored
    (bucket,) = DataParallel(module).bucket_layout["buckets"]
    assert set(bucket) == {"inner.weight", "inner.bias"}


# ------------------------------------------------------------- changes after wrapping


@as_in_torch(2)
@pytest.mark.parametrize("when", ["early", "twice", "late"])
def test_set_static_graph(ctx, wrap, when):
    ddp = wrap(Scalars(2))
    if when == "twice":
        ddp._set_static_graph()
    if when == "late":
        ddp(x_of(ctx)).backward()
    try:
        ddp._set_static_graph()
    except RuntimeError as error:
        if isinstance(ddp, DataParallel):  # torch has set its flag by then
            assert not ddp.static_graph
            ddp(x_of(ctx)).backward()
        data = ddp._get_ddp_logging_data()
        assert "should be called before training loop starts" in data["error"]
        return type(error).__name__, "set_static_graph" in str(error), data["has_error"]
    history = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(x_of(ctx), [0]).backward()  # unused from the first on: fine when static
        history.append(values(ddp))
    return history, ddp.static_graph, ddp._get_ddp_logging_data()["static_graph"]


@as_in_torch(2)
@modes
def test_remove_autograd_hooks(ctx, wrap, mode):
    ddp = wrap(Scalars(2), **mode)
    ddp(x_of(ctx)).backward()
    ddp._remove_autograd_hooks()
    ddp._remove_autograd_hooks()
    optimizer = torch.optim.SGD(ddp.parameters(), 1.0)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x_of(ctx)).backward()
        optimizer.step()
    return values(ddp), [p.item() for p in ddp.parameters()]


# ------------------------------------------------------------------------ the reducer


@as_in_torch(2)
def test_reducer_entries(ctx, wrap):
    ddp = wrap(Scalars(3), bucket_cap_mb_list=[0.000005])
    reducer = ddp.reducer
    reducer.prepare_for_forward()
    seen = [reducer._rebuild_buckets()]
    ddp(x_of(ctx)).sum().backward()
    seen += [reducer._rebuild_buckets(), reducer._rebuild_buckets()]
    buckets = reducer._get_zeros_like_grad_buckets()
    seen.append([(b.index(), b.buffer().tolist(), b.is_last()) for b in buckets])
    buckets[0].buffer().fill_(ctx.rank + 1.0)
    summed = reducer._run_allreduce_hook(buckets[0]).wait()
    seen += [t.tolist() for t in (summed if isinstance(summed, list) else [summed])]
    # A forward in its parts; the end of the backward is there already.
    ddp.zero_grad()
    ddp._set_ddp_sink_clone(False)
    if isinstance(ddp, DataParallel):
        inputs, kwargs = ddp._pre_forward(x_of(ctx), use=[0, 1, 2])
        ddp._post_forward(ddp.module(*inputs, **kwargs)).sum().backward()
        reducer._delay_all_reduce()
        assert values(ddp) == [1.5] * 3
    return seen


@as_in_torch(2)
def test_only_modes_that_exchange_it_have_a_used_map(ctx, wrap):
    found = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        ddp = wrap(Scalars(), **options)
        ddp(x_of(ctx)).backward()
        used = ddp.reducer._get_local_used_map()
        found.append(None if used is None else used.tolist())
    return found


# ----------------------------------------------------------------------------- logging


def logged(ctx, wrap, options):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net.append(nn.Linear(2, 1, dtype=torch.float64))
    net[3].forward = lambda x: net[3].weight.sum() * x.double() + net[3].bias
    ddp = wrap(net, **options)
    first = ddp._get_ddp_logging_data()
    with ddp.join(enable=not options):
        for _ in range(4):
            ddp(torch.ones(2, 3) * (ctx.rank + 1)).sum().backward()
    ddp(torch.ones(2, 3))
    return first, ddp._get_ddp_logging_data()


OF_ITERATIONS = {"iteration", "unused_parameter_size"}
OF_ITERATIONS.add("prev_iteration_grad_ready_order_indices")


def num_buckets(data):
    return len(data["bucket_sizes"].split(", "))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb_list": [0.00003], "broadcast_buffers": False},
    ],
    ids=str,
)
def test_logging_data(pool, options):
    """Errors and comm hooks: `tests/conformance`."""
    for theirs, ours in pool.run(on_both, 2, logged, options):
        for a, b in zip(theirs, ours, strict=True):
            b.pop("can_set_static_graph", None)  # torch's is not visible in time
            measured = {key for key in a if "_time" in key} | OF_ITERATIONS
            # Torch has these from the first iteration on.
            a = {"has_rebuilt_buckets": 0, "num_buckets_reduced": num_buckets(b)} | a
            assert b.pop("iteration") - a.get("iteration", 0) in (0, 1)  # it began
            assert a.keys() - measured == b.keys()
            for key in b:
                assert type(a[key]) is type(b[key]), key
                if key.startswith("rebuilt_"):  # leftovers: a difference
                    assert sorted(a[key].split(", ")) == sorted(b[key].split(", "))
                else:
                    assert a[key] == b[key], key
        with pytest.raises(KeyError, match=r"from minidp.record\(model\)"):
            ours[1]["forward_compute_time"]


# -------------------------------------------------------------------------- device mesh


@on_ranks(4)
def test_tensor_parallel_inside(ctx):
    """Two by two: replicas of a block that is sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    results = []
    for wrap in WRAPPERS:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        parallelize_module(block, mesh["tp"], plan)
        ddp = wrap(block, device_mesh=mesh["dp"])
        params = list(ddp.parameters())  # torch's transform hides them later
        optimizer = torch.optim.SGD(params, 0.1)
        history = []
        for step in range(3):
            replica = ctx.rank // 2
            x = torch.linspace(-1, 1, 8).reshape(2, 4) * (replica + 1) + step
            ddp(x).square().sum().backward()
            history.append([p.grad.clone() for p in params])
            optimizer.step()
            optimizer.zero_grad()
        results.append((history, [p.detach().clone() for p in params]))
    assert same(*results)
    assert len(params) == 4


# -------------------------------------------------------------------------- environment


def debugged(ctx):
    log = logging.handlers.BufferingHandler(1000)
    logger = logging.getLogger("minidp")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    ddp = DataParallel(Scalars(3), find_unused_parameters=True)
    for uses in ([0, 1, 2], [0, 2]):
        ddp.zero_grad()
        ddp(x_of(ctx), uses).backward()
    found = values(ddp)
    level = ddp._get_ddp_logging_data()["torch_distributed_debug"]
    ddp.reset()
    ddp.zero_grad()
    ddp(x_of(ctx)).backward()
    texts = [record.getMessage() for record in log.buffer]
    told = [text for text in texts if "unused" in text]
    return told, found, level, values(ddp)


@pytest.mark.parametrize("level", in_turns(["DETAIL", "INFO"]))
def test_distributed_debug(level):
    """Torch's own crashes with DETAIL on gloo."""
    env = {"TORCH_DISTRIBUTED_DEBUG": level}
    results = run_fresh(debugged, 2, env=env, timeout=90.0, group_timeout=20)
    for rank, (records, found, told, again) in enumerate(results):
        assert records == [f"[rank {rank}] unused parameters: w.1"]
        assert found == [1.5, None, 1.5]
        assert told == level
        assert again == [1.5] * 3


LAST_CAP = {
    "PYTORCH_DDP_USE_SIDE_STREAM": "0",
    "DDP_DISABLE_COMM_MEM": "0",
    "DDP_SET_LAST_BUCKET_CAP": "1",
}


@as_in_torch(2, fresh={"env": LAST_CAP, "timeout": 90.0, "group_timeout": 20})
def test_environment_variables(ctx, wrap):
    """The small bucket is the last one; the two others change nothing here."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    dist._DEFAULT_FIRST_BUCKET_BYTES = 20_000
    ddp = wrap(net)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 64) * (ctx.rank + 1)).sum().backward()
    ddp(torch.ones(2, 64))
    data = ddp._get_ddp_logging_data()
    sizes, indices = (
        data[f"rebuilt_{name}"] for name in ("bucket_sizes", "per_bucket_param_indices")
    )
    assert indices.split(", ")[-1].startswith("0 1")  # ascending, too
    first, last = map(int, sizes.split(", "))
    assert first > last >= 20_000
    return sizes, indices, grads(net)
