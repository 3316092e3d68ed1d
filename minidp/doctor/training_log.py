"""Record what a training loop does, for ``doctor.watch``.

A loop tells nobody what it does. So it is watched by hooks on the model and its
optimizers, and by replacements of three functions that scripts call. The end of the
block removes them all. None of them may disturb the training: their errors are kept in
`TrainingLog.mishaps`.
"""

from __future__ import annotations

import builtins
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from minidp.core import NO_TASK, current_task, find_tensors, untraced
from minidp.replica import sum_of_bits

from .checks.loader import sampler_of
from .checks.model import option, synchroniser, wrapped_module
from .checks.ranks import digest_of
from .words import in_words

NUM_COMPARED = 3  # batches that are compared between ranks
Note = TypeVar("Note", bound=Callable[..., None])


def _harmless(note: Note) -> Note:
    """Let a method keep its errors in `mishaps` instead of raising them.

    The compiler does not trace it.
    """

    @untraced
    @functools.wraps(note)
    def noting(self: TrainingLog, *arguments: Any) -> None:
        try:
            note(self, *arguments)
        except Exception as error:
            self.mishaps.add(f"{note.__name__}: {in_words(error)}")

    return cast("Note", noting)


def _after(note: Callable[[Any, Any], None], original: Callable[..., Any]) -> Any:
    """Return a function that calls ``note(args, kwargs)``, and then ``original``."""

    @functools.wraps(original)
    def noting(*values: Any, **options: Any) -> Any:
        note(values, options)
        return original(*values, **options)

    return noting


class TrainingLog:
    """Record the training of one rank inside `recording`.

    Attributes:
        facts: What was seen, for the checks of `doctor.checks.training`.
        mishaps: Errors that came up while recording.
    """

    def __init__(self, model: nn.Module, loader: Any = None) -> None:
        self.model = model
        # Parameters that DDP ignores may differ between ranks.
        ignored = option(model, "parameters_to_ignore", default=())
        named = wrapped_module(model).named_parameters()
        self._params = {name: param for name, param in named if name not in ignored}
        self._trainable = {n: p for n, p in self._params.items() if p.requires_grad}
        self._loader, self._sampler = loader, sampler_of(loader)
        sampler = self._sampler
        splits = hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True)
        self._arrived: set[str] = set()  # parameters that got a gradient since a step
        self._tasks: set[int] = set()  # ids of synchronised backwards since a step
        self._samples: list[int] = []  # how many each forward got since a step
        self.mishaps: set[str] = set()
        self.facts: dict[str, Any] = {
            "host": socket.gethostname(),
            "is_wrapped": synchroniser(model) is not None,
            "finds_unused": option(model, "find_unused_parameters", default=False),
            "sees_epochs": isinstance(loader, DataLoader),
            "shuffles": bool(splits),
            "epochs": [],  # the sampler's number of each epoch
            "batches": [],  # a checksum of each of the first batches
            "backwards": [],  # how many were synchronised before each optimizer step
            "over_items": option(model, "average_over", default="ranks") == "items",
            "samples": [],  # how many each forward got, by optimizer step
            "unused": [],  # parameters without a gradient in some step
            "local_steps": 0,  # optimizer steps inside no_sync()
            "values": [],  # checksums of parameters at the beginning and the end
            "lines": 0,  # how many were printed without the word "rank"
            "saved": [],  # absolute paths that torch.save wrote to
        }

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in `facts` the training that the block does.

        If the block raises, the checksums of the parameters at its end are missing.
        """
        model = self.model
        with ExitStack() as undo:

            def keep(hook: Any) -> None:
                undo.callback(hook.remove)

            keep(model.register_forward_pre_hook(self._note_batch, with_kwargs=True))
            keep(model.register_forward_hook(self._note_forward))
            for name, param in self._trainable.items():
                arrive = functools.partial(self._note_arrival, name)
                keep(param.register_post_accumulate_grad_hook(arrive))
            keep(register_optimizer_step_pre_hook(self._note_step))
            patches: tuple[tuple[Any, str, Any], ...] = (
                (DataLoader, "__iter__", self._note_epoch),
                (builtins, "print", self._note_line),
                (torch, "save", self._note_save),
            )
            for owner, name, note in patches:
                original = getattr(owner, name)
                undo.callback(setattr, owner, name, original)
                setattr(owner, name, _after(note, original))
            self._note_values()
            yield
        self._note_values()

    @_harmless
    def _note_values(self) -> None:
        sums = {name: int(sum_of_bits(param)) for name, param in self._params.items()}
        self.facts["values"].append(sums)

    @_harmless
    def _note_batch(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the size of a batch, and its digest, before a forward that trains.

        The size is that of the first tensor that has dimensions: the number of its
        rows, or of its elements if it holds integers.
        """
        batches = self.facts["batches"]
        trains = torch.is_grad_enabled() and self.model.training
        tensors = find_tensors([args, kwargs]) if trains else []
        # Integers are mostly ids of tokens, and there the length of the texts counts,
        # too.
        sizes = [
            len(t) if t.is_floating_point() else t.numel() for t in tensors if t.dim()
        ]
        self._samples += sizes[:1]
        if trains and len(batches) < NUM_COMPARED:
            sums = [int(sum_of_bits(t)) for t in tensors if not t.is_meta]
            if sums:
                batches.append(digest_of(sums))

    def _synchronises(self) -> bool:
        return bool(option(self.model, "require_backward_grad_sync", default=True))

    @_harmless
    def _note_forward(self, _model: nn.Module, _args: Any, output: Any) -> None:
        """Let the backward of a forward outside no_sync() be noted in `_tasks`."""
        if torch.is_grad_enabled() and self._synchronises():
            for tensor in find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._tasks.add(current_task()))

    def _note_arrival(self, name: str, _param: torch.Tensor) -> None:
        self._arrived.add(name)

    @_harmless
    def _note_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Note what has happened since the last step, before an optimizer step."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = held.intersection(map(id, self._trainable.values()))
        # At a step inside a backward, other gradients are still missing, so it does not
        # count. Neither does one of an optimizer that holds other parameters.
        if current_task() != NO_TASK or not self._arrived or not ours:
            return
        self.facts["backwards"].append(len(self._tasks))
        self.facts["samples"].append(self._samples)
        self._samples = []
        unused = self._trainable.keys() - self._arrived
        self.facts["unused"] = sorted(unused.union(self.facts["unused"]))
        self.facts["local_steps"] += not self._synchronises()
        self._arrived.clear()
        self._tasks.clear()

    @_harmless
    def _note_epoch(self, values: Any, _options: Any) -> None:
        """Note the epoch of its sampler when the watched loader is iterated."""
        if values[0] is self._loader:
            epoch = getattr(self._sampler, "epoch", None)
            self.facts["epochs"].append(epoch if isinstance(epoch, int) else None)

    @_harmless
    def _note_line(self, values: Any, options: Any) -> None:
        if options.get("file") in (None, sys.stdout):
            text = " ".join(map(str, values))
            # A line that names the rank is meant to be printed on all ranks.
            self.facts["lines"] += bool(text.strip()) and "rank" not in text.lower()

    @_harmless
    def _note_save(self, values: Any, options: Any) -> None:
        file = values[1] if len(values) > 1 else options.get("f")
        if isinstance(file, str | os.PathLike):
            self.facts["saved"].append(os.path.abspath(os.fspath(file)))
