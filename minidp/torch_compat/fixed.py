"""Attributes that torch's DDP has, and that nobody reads after construction.

``ddp.find_unused_parameters = True`` is accepted by torch in silence, changes nothing
or breaks the next step. A script that does so may be right, so it is no error here,
but a warning says that the value has no effect, and where to pass it instead.
"""

from __future__ import annotations

from typing import Any

from minidp.console import warn

_INSTEAD = {
    "static_graph": "pass static_graph=True to the constructor, or call "
    "_set_static_graph() before the first step",
    "mixed_precision": "run the forward in torch.autocast",
    "parameters_to_ignore": "before you wrap the module, call DataParallel."
    "_set_params_and_buffers_to_ignore_for_model(module, names)",
    "process_group": "pass it to the constructor, or call _update_process_group()",
    "bucket_bytes_cap": "pass bucket_cap_mb to the constructor",
    "bucket_bytes_cap_list": "pass bucket_cap_mb_list to the constructor",
    "bucket_bytes_cap_default": "leave bucket_cap_mb at None in the constructor",
}
# Attributes of torch's class, and options whose names it does not have as attributes.
_FIXED = (
    *("find_unused_parameters", "gradient_as_bucket_view", "static_graph"),
    *("batched_grad_copy", "lazy_bucket_allocation", "skip_all_reduce_unused_params"),
    *("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default"),
    *("mixed_precision", "average_over", "parameters_to_ignore", "process_group"),
    *("bucket_cap_mb", "bucket_cap_mb_list", "unsynced", "hang_timeout"),
    *("check_replicas_every", "check_finite_grads", "audit_every", "audit_action"),
)


class Fixed:
    """The descriptor of an attribute that the constructor sets for good.

    A later assignment is kept, as torch keeps it, and warned of if it changes the
    value.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, ddp: Any, owner: type | None = None) -> Any:
        if ddp is None:
            return self
        if self._name not in vars(ddp):
            raise AttributeError(self._name)
        return vars(ddp)[self._name]

    def __set__(self, ddp: Any, value: Any) -> None:
        if "_reducer" in vars(ddp):  # the constructor is past this attribute
            self._warn(ddp, value)
        vars(ddp)[self._name] = value

    def __delete__(self, ddp: Any) -> None:
        del vars(ddp)[self._name]

    def _warn(self, ddp: Any, value: Any) -> None:
        name = self._name
        given = vars(ddp).get(name, getattr(ddp._given, name, None))
        # `reset` assigns the group that is used already, and must not be warned of.
        if name == "process_group":
            given = ddp._reducer.communicator.group
        if value is given or (type(value) is type(given) and value == given):
            return
        remedy = _INSTEAD.get(name, f"pass {name} to the constructor")
        warn(
            f"[rank {ddp._reducer.rank}] {name} = {value!r} has no effect on how "
            f"gradients are averaged, because the module is wrapped already; it was "
            f"{given!r}. What to do: {remedy}."
        )


def fix_options(owner: type) -> None:
    """Let a class warn when options are assigned that nobody reads any more."""
    for name in _FIXED:
        descriptor = Fixed()
        descriptor.__set_name__(owner, name)
        setattr(owner, name, descriptor)
