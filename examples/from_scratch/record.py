"""Record when gradients came and when messages travelled, for ``minidp report``.

The stages know nothing of it: hooks on the model, its parameters and the optimizer see
the phases of a step, and meanwhile `dist.all_reduce` is one that also notes the time.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidp.overlap import from_json, html_page
from minidp.overlap.timeline import (
    BucketTimes,
    Param,
    Span,
    Step,
    Timeline,
    Where,
    to_json,
)

Layout = tuple[tuple[int, ...], ...]
now = time.perf_counter_ns


@dataclass
class Message:
    """One all-reduce."""

    members: tuple[int, ...]  # the parameters whose gradients it sums
    launched_ns: int
    done_ns: int = 0  # 0: nobody has said so yet


@dataclass
class Pass:
    """One forward and its backward."""

    forward: Span
    backward_ns: int = 0  # when the gradient of the output came
    ready_ns: dict[int, int] = field(default_factory=dict)  # by parameter
    messages: list[Message] = field(default_factory=list)


class Recorder:
    """Record the steps of one rank while the ``with`` block runs."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.params = list(model.parameters())
        self.steps: list[tuple[list[Pass], Span]] = []  # passes, and the optimizer
        self.passes: list[Pass] = []  # of the step that runs

    def __enter__(self) -> "Recorder":
        """Hook into everything."""
        self.all_reduce: Any = dist.all_reduce
        dist.all_reduce = self.timed_all_reduce
        self.hooks: list[Any] = [
            self.model.register_forward_pre_hook(self.before_forward),
            self.model.register_forward_hook(self.after_forward),
            self.optimizer.register_step_pre_hook(self.before_optimizer),
            self.optimizer.register_step_post_hook(self.after_optimizer),
        ]
        # A hook of this kind runs before those of the stages.
        self.hooks += [
            param.register_hook(self.noting(i)) for i, param in enumerate(self.params)
        ]
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave no trace."""
        dist.all_reduce = self.all_reduce
        for hook in self.hooks:
            hook.remove()

    # -- what happens in a step --------------------------------------------------------

    def before_forward(self, *_: Any) -> None:
        """A forward begins."""
        self.begin_ns = now()

    def after_forward(self, _model: nn.Module, _inputs: Any, scores: Tensor) -> None:
        """A forward ended: its output tells when the backward begins."""
        one = Pass(Span(self.begin_ns, now()))
        self.passes.append(one)
        scores.register_hook(lambda _grad: setattr(one, "backward_ns", now()))

    def noting(self, i: int) -> Callable[[Tensor], None]:
        """Return a hook that notes when the gradient of parameter ``i`` comes."""
        return lambda _grad: self.passes[-1].ready_ns.update({i: now()})

    def timed_all_reduce(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        """All-reduce as always; note when it was launched and when it was done."""
        message = Message(self.members(tensor), now())
        if message.members:  # else it is no message of gradients
            self.passes[-1].messages.append(message)
        work = self.all_reduce(tensor, *args, **options)
        if work is None:  # a blocking one
            message.done_ns = now()
        else:
            work.get_future().then(lambda _: setattr(message, "done_ns", now()))
        return work

    def members(self, tensor: Tensor) -> tuple[int, ...]:
        """Return which parameters' gradients are in a tensor: one, or a bucket's."""
        for bucket in getattr(self.model, "buckets", ()):
            if bucket.buffer is tensor:
                inside = set(map(id, bucket.params))
                return tuple(i for i, p in enumerate(self.params) if id(p) in inside)
        return tuple(i for i, p in enumerate(self.params) if p.grad is tensor)

    def before_optimizer(self, *_: Any) -> None:
        """All averages are in ``.grad``."""
        self.begin_ns = now()

    def after_optimizer(self, *_: Any) -> None:
        """A step ended."""
        self.steps.append((self.passes, Span(self.begin_ns, now())))
        self.passes = []

    # -- the result --------------------------------------------------------------------

    def gather(self) -> None:
        """Bring the recordings of all ranks together; all ranks call it."""
        self.timelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self.timelines, self.timeline())

    def save(self, path: Path) -> None:
        """Write what was gathered."""
        path.write_text(to_json(self.timelines))

    def timeline(self) -> Timeline:
        """Return the steps of this rank."""
        layouts: dict[Layout, int] = {}  # which parameters each message had
        begins = [passes[0].forward.begin_ns for passes, _ in self.steps]
        ends = [*begins[1:], self.steps[-1][1].end_ns]
        steps = []
        for number, (passes, optimizer) in enumerate(self.steps):
            layout = tuple(message.members for message in passes[-1].messages)
            times = step_times(passes, optimizer, len(self.params))
            place = layouts.setdefault(layout, len(layouts))
            steps.append(Step(number, place, end_ns=ends[number], **times))
        where = Where(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            backend="gloo",
            device="cpu",
            host=platform.node(),
            versions={"torch": str(torch.__version__)},
            no_shared_memory="plain torch.distributed",
        )
        params = tuple(
            Param(name.removeprefix("module."), param.nbytes, "float32 on cpu")
            for name, param in self.model.named_parameters()
        )
        return Timeline(where, params, tuple(layouts), tuple(steps))


def step_times(passes: list[Pass], optimizer: Span, num_params: int) -> dict[str, Any]:
    """Return the times of a step, as arguments of `Step`.

    Its last backward sends messages; those before it are local (`no_sync`).
    """
    *local, last = passes
    ready, end_ns = last.ready_ns, optimizer.begin_ns  # of the waiting and copying
    backwards = [Span(one.backward_ns, max(one.ready_ns.values())) for one in passes]
    buckets = []
    for number, message in enumerate(last.messages):
        came = [ready[i] for i in message.members if i in ready]
        full_ns = max(came, default=backwards[-1].end_ns)
        done_ns = min(message.done_ns or end_ns, end_ns)
        times = accumulate((full_ns, message.launched_ns, done_ns, end_ns), max)
        buckets.append(BucketTimes(number, *times))
    return {
        "forwards": (last.forward,),
        "backward": backwards[-1],
        "finalize_end_ns": end_ns,
        "buckets": tuple(buckets),
        "optimizers": (optimizer,),
        "ready_ns": tuple(ready.get(i) for i in range(num_params)),
        "local_forwards": tuple(one.forward for one in local),
        "local_backwards": tuple(backwards[:-1]),
    }


def show(path: Path) -> None:
    """Write the page of a recording beside it; say how to look at both."""
    page = path.with_suffix(".html")
    page.write_text(html_page(from_json(path.read_text())))
    print(f"recorded: minidp report {path}, and its page {page}")
