"""What a training loop does, written down while it runs; nothing stays patched.

loader          a new epoch: which epoch does the sampler think it is?
forward         which batch?                          (first few steps)
backward        synchronised? which parameters got a gradient?
optimizer step  how many synchronised backwards since the last one? same gradients
                on all ranks?                         (first few steps)
                inside no_sync()?
print, save     on this rank, too?
begin, end      the values of all parameters
"""

from __future__ import annotations

import builtins
import functools
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minidp._autograd import NO_TASK, current_task, find_tensors
from minidp._desync import sum_of_bits
from minidp._untraced import untraced

from ._checks_loader import sampler_of
from ._consultation import option, wrapped_module
from ._random_streams import state_of
from ._timebox import in_words

NUM_COMPARED = 3  # steps whose batches and gradients are compared between ranks
_MOST_LINES = 1000
Note = TypeVar("Note", bound=Callable[..., None])


def _harmless(note: Note) -> Note:
    """What goes wrong while something is noted must not end the training."""

    @untraced
    @functools.wraps(note)
    def noting(self: TrainingLog, *arguments: Any) -> None:
        try:
            note(self, *arguments)
        except Exception as error:
            self.mishaps.add(f"{note.__name__}: {in_words(error)}")

    return cast("Note", noting)


def _after(note: Callable[[Any, Any], None], original: Callable[..., Any]) -> Any:
    """The same function, after its arguments were noted."""

    @functools.wraps(original)
    def noting(*values: Any, **options: Any) -> Any:
        note(values, options)
        return original(*values, **options)

    return noting


class TrainingLog:
    """Records one rank's training between `start` and `stop`.

    Args:
        model: wrapped or not.
        loader: whose epochs are watched; None: of none.
    """

    def __init__(self, model: nn.Module, loader: Any = None) -> None:
        self.batches: list[int] = []  # a checksum of each of the first batches
        self.gradients: list[dict[str, int]] = []  # of the first steps, by parameter
        self.backwards: list[int] = []  # synchronised ones, for each optimizer step
        self.unused: set[str] = set()  # without a gradient in some step
        self.local_steps = 0  # of optimizers, inside no_sync()
        self.values: list[dict[str, int]] = []  # checksums at the begin and at the end
        self.epochs: list[int | None] = []  # what the sampler said at each beginning
        self.lines: list[str] = []  # digests of what was printed
        self.saved: list[str] = []  # absolute paths
        self.mishaps: set[str] = set()  # what could not be noted
        self.sees_epochs = False
        self.model = model
        # Those are each rank's own.
        self._ignored = set(option(model, "parameters_to_ignore", default=()))
        self._params = {
            name: param
            for name, param in wrapped_module(model).named_parameters()
            if param.requires_grad and name not in self._ignored
        }
        self._sampler = None if loader is None else sampler_of(loader)
        self._arrived: set[str] = set()  # since the last step
        self._tasks: set[int] = set()  # synchronised backwards since the last step
        self._undo = ExitStack()

    def as_json(self) -> dict[str, Any]:
        """The facts for other ranks."""
        return {
            "host": socket.gethostname(),
            "batches": self.batches,
            "gradients": self.gradients,
            "backwards": self.backwards,
            "unused": sorted(self.unused),
            "epochs": self.epochs,
            "lines": self.lines,
            "saved": sorted(set(self.saved)),
            "num_params": len(self._params),
            "local_steps": self.local_steps,
            "values": self.values,
        }

    # -- attach and detach -------------------------------------------------------------

    def start(self) -> None:
        """Attach everything; `stop` takes it away, also when this raises."""
        try:
            self._attach()
        except BaseException:
            self.stop()
            raise

    def _attach(self) -> None:
        model, undo = self.model, self._undo.callback
        undo(model.register_forward_pre_hook(self._note_batch, with_kwargs=True).remove)
        undo(model.register_forward_hook(self._note_forward).remove)
        for name, param in self._params.items():
            noting = self._arrivals_of(name)
            undo(param.register_post_accumulate_grad_hook(noting).remove)
        undo(register_optimizer_step_pre_hook(self._note_step).remove)
        self._replace(builtins, "print", _after(self._note_line, builtins.print))
        self._replace(torch, "save", _after(self._note_save, torch.save))
        self._observe(self._sampler)
        self.note_values()

    @_harmless
    def note_values(self) -> None:
        """What the replica holds, frozen parameters included."""
        module = wrapped_module(self.model)
        self.values.append(
            {
                name: int(sum_of_bits(param))
                for name, param in module.named_parameters()
                if name not in self._ignored
            }
        )

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    @_harmless
    def _observe(self, sampler: Any) -> None:
        """Note each ``iter(sampler)``: Python asks the class for it, not the object."""
        if sampler is None:
            return
        kind = type(sampler)
        note = self.epochs.append

        def begin(self: Any) -> Any:
            epoch = getattr(self, "epoch", None)
            note(epoch if isinstance(epoch, int) else None)
            return kind.__iter__(self)

        observed = type(kind.__name__, (kind,), {"__iter__": begin})
        sampler.__class__ = observed
        self._undo.callback(setattr, sampler, "__class__", kind)
        self.sees_epochs = True

    def stop(self) -> None:
        """Take all hooks away; everything is as before `start`."""
        self._undo.close()

    # -- what happens ------------------------------------------------------------------

    @_harmless
    def _note_batch(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        if not (torch.is_grad_enabled() and self.model.training):
            return
        if len(self.batches) < NUM_COMPARED:
            tensors = find_tensors([args, kwargs])
            sums = [int(sum_of_bits(t)) for t in tensors if not t.is_meta]
            if sums:
                self.batches.append(int(state_of(sums)[:12], 16))

    @_harmless
    def _note_forward(self, model: nn.Module, _args: Any, output: Any) -> None:
        synchronises = option(model, "require_backward_grad_sync", default=True)
        if not (torch.is_grad_enabled() and synchronises):
            return
        for tensor in find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._note_backward)

    def _note_backward(self, _grad: torch.Tensor) -> None:
        self._tasks.add(current_task())

    def _arrivals_of(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(_param: torch.Tensor) -> None:
            self._arrived.add(name)

        return note

    @_harmless
    def _note_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        ours = {id(param) for param in self._params.values()}
        if current_task() != NO_TASK:
            return  # it steps in the backward, when other gradients are still to come
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self._arrived or not ours & held:
            return
        self.backwards.append(len(self._tasks))
        self.unused |= {*self._params} - self._arrived
        synchronises = option(self.model, "require_backward_grad_sync", default=True)
        self.local_steps += not synchronises
        if synchronises and len(self.gradients) < NUM_COMPARED:
            self.gradients.append(
                {
                    name: int(sum_of_bits(param.grad))
                    for name, param in self._params.items()
                    if param.grad is not None
                    and param.grad.layout is torch.strided
                    and id(param) in held
                }
            )
        self._arrived.clear()
        self._tasks.clear()

    @_harmless
    def _note_line(self, values: Any, options: Any) -> None:
        if options.get("file") not in (None, sys.stdout):
            return
        text = " ".join(map(str, values))
        # Whoever names the rank means to print on all of them.
        if (
            text.strip()
            and "rank" not in text.lower()
            and len(self.lines) < _MOST_LINES
        ):
            self.lines.append(state_of(text))

    @_harmless
    def _note_save(self, values: Any, options: Any) -> None:
        file = values[1] if len(values) > 1 else options.get("f")
        if isinstance(file, str | os.PathLike):
            self.saved.append(os.path.abspath(os.fspath(file)))
