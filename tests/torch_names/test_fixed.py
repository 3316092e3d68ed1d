"""What happens when an attribute or option is assigned after construction."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

from minidp import DataParallel
from minidp.torch_compat.versions import NEWEST, OLDEST, note_version


class Own(DataParallel):
    """Keeps an option under its own name, as subclasses do."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float, hang_timeout: int):
        super().__init__(module, bucket_cap_mb=bucket_cap_mb, hang_timeout=hang_timeout)
        self.bucket_cap_mb = bucket_cap_mb
        self.hang_timeout = hang_timeout


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("find_unused_parameters", True, "pass find_unused_parameters to the"),
        ("gradient_as_bucket_view", True, "pass gradient_as_bucket_view to the"),
        ("static_graph", True, r"_set_static_graph\(\) before the first step"),
        ("batched_grad_copy", True, "pass batched_grad_copy to the constructor"),
        ("lazy_bucket_allocation", True, "pass lazy_bucket_allocation to the"),
        ("skip_all_reduce_unused_params", True, "pass skip_all_reduce_unused"),
        ("bucket_bytes_cap", 1000, "pass bucket_cap_mb to the constructor"),
        ("bucket_bytes_cap_list", [5], "pass bucket_cap_mb_list to the"),
        ("mixed_precision", torch.float16, "run the forward in torch.autocast"),
        ("parameters_to_ignore", {"weight"}, "_set_params_and_buffers_to_ignore"),
        ("average_over", "items", "pass average_over to the constructor"),
        ("bucket_cap_mb", 3, "pass bucket_cap_mb to the constructor"),
        ("unsynced", "ignore", "pass unsynced to the constructor"),
        ("hang_timeout", 7, "pass hang_timeout to the constructor"),
        ("check_replicas_every", 5, "pass check_replicas_every to the"),
        ("process_group", object(), r"call _update_process_group\(\)"),
    ],
)
def test_an_assignment_without_effect_is_kept_and_warns(
    lone_group, name, value, remedy
):
    ddp = DataParallel(nn.Linear(2, 2))
    before = getattr(ddp, name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if before is not None:
            setattr(ddp, name, before)  # no change
    with pytest.warns(UserWarning, match=rf"\[rank 0\] {name} = .*no effect.*{remedy}"):
        setattr(ddp, name, value)
    assert getattr(ddp, name) is value


def test_options_are_no_attributes_until_somebody_makes_them(lone_group):
    ddp = DataParallel(nn.Linear(2, 2), bucket_cap_mb=3)
    with pytest.raises(AttributeError, match="has no attribute 'bucket_cap_mb'"):
        ddp.bucket_cap_mb  # noqa: B018
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = Own(nn.Linear(2, 2), 3, 30)
    assert (own.bucket_cap_mb, own.hang_timeout) == (3, 30)
    del own.hang_timeout
    assert not hasattr(own, "hang_timeout")


def test_a_static_graph_by_attribute_does_not_hide_the_method(lone_group):
    ddp = DataParallel(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="no effect"):
        ddp.static_graph = True
    assert not ddp._get_ddp_logging_data().get("static_graph")
    ddp._set_static_graph()
    assert ddp._get_ddp_logging_data()["static_graph"]


# --------------------------------------------------------------------- version of torch


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (f"{NEWEST[0]}.{NEWEST[1] + 1}.0+cu140", "newer than"),
        (f"{NEWEST[0] + 1}.0.0a0+git123", "newer than"),
        (f"{OLDEST[0]}.{OLDEST[1] - 1}.1", "older than"),
        (f"{NEWEST[0]}.{NEWEST[1]}.9", ""),
        (f"{OLDEST[0]}.{OLDEST[1]}.0+cpu", ""),
        ("unknown", ""),
    ],
)
def test_a_version_that_was_not_tested_says_so_once(caplog, version, said):
    note_version.cache_clear()
    with caplog.at_level(logging.INFO, logger="minidp"):
        note_version(version)
        note_version(version)
    assert len(caplog.records) == bool(said)
    assert said in caplog.text
    note_version.cache_clear()
