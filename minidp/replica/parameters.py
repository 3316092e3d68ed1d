"""Find the tensors of a module that take part in synchronisation.

`examine` sorts a module's parameters, and returns them as `ManagedParameters`. The two
checks below it refuse parameters that cannot be averaged, and tensors that rank 0's
values cannot be copied to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from minidp.console import warn
from minidp.layout import ParamSpec

IGNORE_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"  # torch's name, set by users
_OVERLAPS = 1  # what torch answers for an expanded tensor
# Torch's name of an attribute: if it is set, calling the module calls this, and not its
# forward. `module.compile()` sets it.
DETOUR = "_compiled_call_impl"


@dataclass(frozen=True)
class ManagedParameters:
    """A module, and which of its parameters are averaged, ignored, or travel last.

    `examine` makes it. Delayed parameters may belong to another module.
    """

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]  # frozen ones included
    managed: Mapping[str, nn.Parameter]  # trainable, in parameter-index order
    sparse: frozenset[str]  # names of managed parameters with sparse gradients
    ignored: frozenset[str]
    delayed: frozenset[str]  # names of managed parameters that travel last

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters to average, in the order of their indices."""
        return list(self.managed.values())

    @property
    def specs(self) -> list[ParamSpec]:
        """What the plan of the buckets has to know of each managed parameter."""
        return [
            ParamSpec(
                name,
                tuple(param.shape),
                tuple(param.stride()),
                param.dtype,
                param.device,
                name in self.sparse,
                name in self.delayed,
            )
            for name, param in self.managed.items()
        ]


def examine(
    module: nn.Module, delayed: Mapping[str, nn.Parameter]
) -> ManagedParameters:
    """Sort a module's parameters, without those on its ignore list.

    It warns of names on the ignore list that the module does not have.

    Args:
        module: The module to synchronise.
        delayed: Parameters that are to be sent last, by name. The trainable ones among
            them take part even if they are ignored, or belong to another module.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: The module has a parameter of the same name as one of ``delayed``
            that belongs to another module.
        RuntimeError: No parameter is left to average.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, but got {type(module).__name__}."
        )
    ignored = _ignore_list(module) - delayed.keys()
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if ignored - known:
        warn(
            "The module's ignore list names parameters or buffers that it does not "
            f"have: {', '.join(sorted(ignored - known))}.",
        )
    parameters = {n: p for n, p in module.named_parameters() if n not in ignored}
    managed: dict[str, nn.Parameter] = {}
    sparse = set()
    seen: set[int] = set()
    # A shared parameter has several names, and each of them may be on the ignore list.
    # This goes through them in the order in which torch's DDP does.
    owned = [
        (f"{prefix}.{short}".removeprefix("."), owner, param)
        for prefix, owner in module.named_modules()
        for short, param in owner.named_parameters(recurse=False)
    ]
    for name, owner, param in owned:
        if name in ignored or id(param) in seen or not param.requires_grad:
            continue
        seen.add(id(param))
        managed[name] = param
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
            sparse.add(name)
    for name, param in delayed.items():  # of another module
        if id(param) in seen or not param.requires_grad:
            continue
        if name in known:
            raise ValueError(
                f"delay_all_reduce_named_params gives the name {name} to a parameter "
                "of another module, but this module has one of that name."
            )
        managed[name] = parameters[name] = param
    if not managed:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any "
            "parameter that requires a gradient. (Every parameter of this module is "
            "frozen or on the ignore list.)"
        )
    ids = {id(param) for param in delayed.values()}
    late = frozenset(name for name, param in managed.items() if id(param) in ids)
    return ManagedParameters(
        module, parameters, managed, frozenset(sparse), ignored, late
    )


def _ignore_list(module: nn.Module) -> frozenset[str]:
    listed = frozenset(getattr(module, IGNORE_ATTRIBUTE, ()))
    strange = {type(name).__name__ for name in listed if not isinstance(name, str)}
    if strange:
        raise TypeError(
            "The module's ignore list must hold names of parameters and buffers (str), "
            f"but holds {', '.join(sorted(strange))}."
        )
    return frozenset(name.removeprefix(".") for name in listed)


def check_data(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters whose data cannot be averaged, and name them.

    Raises:
        RuntimeError: Some are not initialised, are on the meta device, or were made in
            inference mode.
        TypeError: Some are DTensors.
    """
    lazy = [n for n, p in parameters.items() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with "
            "`DataParallel`. Run a dummy forward pass to correctly initialize the "
            f"modules. Uninitialized: {', '.join(lazy)}."
        )
    meta = [name for name, param in parameters.items() if param.is_meta]
    if meta:
        raise RuntimeError(
            "Parameters on the meta device have no data to synchronise: "
            f"{', '.join(meta)}. Materialise them first, for example with "
            "module.to_empty(device=...) and an initialisation."
        )
    inference = [name for name, param in parameters.items() if param.is_inference()]
    if inference:
        raise RuntimeError(
            "Parameters made inside torch.inference_mode() cannot be trained: "
            f"{', '.join(inference)}. Make the module outside of it."
        )
    dtensors = [n for n, p in parameters.items() if type(p.data).__name__ == "DTensor"]
    if dtensors:
        raise TypeError(
            "DTensor parameters can only be averaged as local tensors: instead of a "
            "process group pass device_mesh, a slice (mesh['dp']) of the mesh they are "
            f"distributed over. DTensors: {', '.join(dtensors)}."
        )


def check_writable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that cannot take rank 0's values.

    Raises:
        RuntimeError: There are some; the text names each, and says why.
    """
    causes = {name: _why_not_writable(tensor) for name, tensor in tensors.items()}
    found = [f"{name} ({why})" for name, why in causes.items() if why]
    if found:
        raise RuntimeError(
            "Every rank gets rank 0's parameters and module buffers, but these cannot "
            f"be overwritten: {', '.join(found)}. What to do: register a dense copy "
            "(.clone(), .to_dense()), or put the name on the module's ignore list "
            "(_set_params_and_buffers_to_ignore_for_model)."
        )


def _why_not_writable(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"{tensor.layout}".removeprefix("torch.")
    if tensor.is_quantized:
        return f"quantized, {tensor.dtype}"
    if torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
        return "expanded: several of its elements are one place in memory"
    return ""
