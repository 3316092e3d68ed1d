"""Actions that go wrong in real trainings, or are legal and look like ones that do."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import tempfile

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed import rpc
from torch.func import functional_call

from minidp import DataParallel
from tests.support.actions import ACTIONS, action, plain, squares
from tests.support.both import done

# -- forwards and backwards ------------------------------------------------------------


def by_method(module, x, _rank):
    return squares(module.other(x))


def of_b(module, x, _rank):
    return [module.b(x).sum()]


def penalised(module, x, _rank):
    x = x.clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return [out.pow(2).sum(), slope.pow(2).sum()]


def penalised_on_rank_0(module, x, rank):
    return (plain if rank else penalised)(module, x, rank)


def fast_weights(module, x, _rank):
    fast = {n: p * 0.5 for n, p in module.named_parameters()}
    return squares(functional_call(module, fast, (x,)))


@contextlib.contextmanager
def worker_of_rpc():
    """Start RPC with this process as the only worker, and shut it down afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/rpc"
        options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            rpc.shutdown()


@action("steps of distributed autograd")
def in_a_context(stage):
    """Make two steps whose gradients come from a context of distributed autograd."""
    with worker_of_rpc():
        for _ in range(2):
            stage.play("zero, forward")
            made = stage.waiting.pop()
            with dist_autograd.context() as context:
                dist_autograd.backward(context, made.losses)
                found = dist_autograd.get_gradients(context)
                for param in stage.model.parameters():
                    param.grad = found[param].clone()
            stage.due.append((made.loss, made.count))
            stage.play("step")


@action("compiled backward")
def backward_under_compiled_autograd(stage):
    # Here: it imports the compiler, which takes seconds.
    from tests.support.compiling import clean_compiler, compiled_backwards

    with clean_compiler(), compiled_backwards():
        stage.play("backward")


@action("transformed")
def in_a_transform(stage):
    """Differentiate the model by `torch.func`, as for a saliency map: no backward."""
    stage.count += 1
    x = stage.x(stage.rank, stage.count)
    torch.func.grad(lambda x: sum(squares(stage.model(x))))(x)


@action("faked")
def with_fake_tensors(stage):
    """Run a forward with tensors that hold no data, for the outputs' shapes."""
    stage.count += 1
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage.model(stage.x(stage.rank, stage.count))


@action("outer")
def through_another_wrapper(stage):
    """Run a forward of a wrapper around the wrapper."""
    if not hasattr(stage, "outer"):
        stage.outer = stage.wrap(stage.model)
        stage.undo.append(lambda: delattr(stage, "outer"))
    stage.forward(module=stage.outer)


@action("penalty")
def penalty(stage):
    """Run the backward of a loss that no forward made."""
    stage.model.module.b.weight.square().sum().backward()


@action("interrupted")
def interrupted(stage):
    """Press Ctrl-C in a backward on all ranks, as in a notebook, and go on."""

    def ctrl_c(_grad):
        raise KeyboardInterrupt

    stage.handles.append(stage.model.module.a.weight.register_hook(ctrl_c))
    with contextlib.suppress(KeyboardInterrupt):
        stage.play("forward, backward")
    stage.unhook()


def fail(_):
    raise ValueError("user code")


def set_grad(make):
    """Return an action: a hook sets the gradient of b.weight in one backward."""

    def add(stage):
        def hook(param):
            param.grad = make(param.grad)

        weight = stage.model.module.b.weight
        stage.handles.append(weight.register_post_accumulate_grad_hook(hook))

    return add


@action("grad")
def grad_function(stage, what="dropped"):
    """Call `torch.autograd.grad`; what it returns is dropped, kept or applied."""
    if not stage.waiting:
        return
    made = stage.waiting.pop()
    params = [p for p in stage.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(sum(made.losses), params, allow_unused=True)
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            if what == "kept":
                param.grad = grad
            elif what == "applied":
                param -= 0.1 * grad


@action("saliency")
def saliency(stage, how="grad"):
    """Ask for the gradient of the input alone, with a forward that announces averages.

    ``how``: by `torch.autograd.grad`, or by a backward into the input.
    """
    x = stage.x(stage.rank, 500).requires_grad_()
    out = stage.model(x).sum()
    if how == "grad":
        torch.autograd.grad(out, x)
    else:
        out.backward(inputs=[x])


@action("trace")
@torch.no_grad()
def trace(stage):
    """Look at every attribute, and run a forward, as an export of the model does."""
    torch.jit.trace(stage.model, stage.x(stage.rank, 502))


@action("generator's turn")
def turn_of_the_generator(stage):
    """Run a backward through the model that needs another network's gradients only."""
    generator = nn.Linear(3, 3)
    out = stage.model(generator(stage.x(stage.rank, 501))).mean()
    out.backward(inputs=[*generator.parameters()])


@action("lent weights")
def evaluate_lent(stage, how="evaluate"):
    """Run a forward with parameters that are lent to the module for its duration.

    ``how``: leave it at that, or run a backward into them, or two inner steps by hand.
    """
    lent = {
        name: nn.Parameter(param.detach() * 0.9)
        for name, param in stage.model.named_parameters()
    }
    x = stage.x(stage.rank, 502)
    for _ in range(2 if how == "inner" else 1):
        loss = functional_call(stage.model, lent, (x,)).pow(2).sum()
        if how == "backward":
            loss.backward()
        elif how == "inner":
            grads = torch.autograd.grad(loss, [*lent.values()], allow_unused=True)
            lent = {
                name: param if grad is None else param.detach() - 0.1 * grad
                for (name, param), grad in zip(lent.items(), grads, strict=True)
            }
            lent = {name: value.requires_grad_() for name, value in lent.items()}


class NoisyStep(torch.optim.SGD):
    """Trains weights that carry each rank's own noise outside of `step`."""

    def disturb(self):
        self.noise = []
        for param in self.param_groups[0]["params"]:
            self.noise.append(0.1 * torch.randn(param.shape, generator=self.generator))
            param.data += self.noise[-1]

    def step(self, closure=None):
        for param, noise in zip(
            self.param_groups[0]["params"], self.noise, strict=True
        ):
            param.data -= noise
        # Exactly, whatever the rounding was.
        for param, kept in zip(self.param_groups[0]["params"], self.kept, strict=True):
            param.data.copy_(kept)
        return super().step(closure)


@action("noisy optimizer")
def use_noisy_optimizer(stage):
    params = [p for p in stage.model.parameters() if p.requires_grad]
    optimizer = NoisyStep(params, lr=0.1)
    optimizer.generator = torch.Generator().manual_seed(stage.rank)
    stage.optimizers["step"] = optimizer


@action("noise")
def add_noise(stage):
    optimizer = stage.optimizers["step"]
    optimizer.kept = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    optimizer.disturb()


class AveragingStep(torch.optim.SGD):
    """Averages in its own step: gradients before torch's, or parameters after it."""

    averages = ""

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        if self.averages == "gradients":
            self.average([param.grad for param in params if param.grad is not None])
        loss = super().step(closure)
        if self.averages == "parameters":
            self.average([param.data for param in params])
        return loss

    def average(self, tensors):
        for tensor in tensors:
            torch.distributed.all_reduce(tensor, group=self.group)
            tensor /= torch.distributed.get_world_size(self.group)


@action("optimizer that averages")
def use_averaging_optimizer(stage, what):
    params = [p for p in stage.model.parameters() if p.requires_grad]
    torch.optim.SGD(params, lr=0.1)  # lets torch run hooks around super().step(), too
    optimizer = AveragingStep(params, lr=0.1)
    optimizer.averages, optimizer.group = what, stage.group
    stage.optimizers["step"] = optimizer


class AveragingAround(torch.optim.Optimizer):
    """Lets another optimizer step, and averages the parameters then."""

    def __init__(self, inner, group):
        self.inner, self.group = inner, group
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step(closure)
        for param in self.param_groups[0]["params"]:
            torch.distributed.all_reduce(param.data, group=self.group)
            param.data /= torch.distributed.get_world_size(self.group)


@action("averaging optimizer around another")
def use_optimizer_around_another(stage):
    inner = stage.optimizers["step"]
    stage.optimizers["step"] = AveragingAround(inner, stage.group)


@action("gradients by torch.func")
def functional_gradients(stage, through="module"):
    """Set ``.grad`` by `torch.func.grad`, which no hook sees.

    The forward is that of the module, or ``through`` the "wrapper".
    """
    stage.count += 1
    x = stage.x(stage.rank, stage.count)
    module = stage.model if through == "wrapper" else stage.model.module
    values = {name: p.detach() for name, p in module.named_parameters()}
    grads = torch.func.grad(lambda all_: sum(squares(functional_call(module, all_, x))))
    for name, grad in grads(values).items():
        module.get_parameter(name).grad = grad


@action("average .grad")
def average_gradients(stage):
    """Average the gradients by hand, as Composer does after micro-batches."""
    for param in stage.model.parameters():
        if param.grad is not None:
            torch.distributed.all_reduce(param.grad, group=stage.group)
            param.grad /= stage.world_size


# -- parameters ------------------------------------------------------------------------


@action("shrink")
@torch.no_grad()
def shrink(stage, how="clamp"):
    """Change all parameters alike on all ranks."""
    for param in stage.model.parameters():
        param.clamp_(-0.3, 0.3) if how == "clamp" else param.mul_(0.9)


@action("climb by grad")
def climb_by_grad(stage):
    """Move the parameters uphill, by what `torch.autograd.grad` returns."""
    made = stage.waiting.pop()
    params = [p for p in stage.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(sum(made.losses), params)
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param += 0.05 * grad


@action("reload")
def reload(stage):
    """Load weights that are the same on all ranks."""
    state = stage.model.module.state_dict()
    stage.model.module.load_state_dict({n: v * 0.9 for n, v in state.items()})


@action("hand step")
@torch.no_grad()
def by_hand(stage, what_then="drop"):
    """Step without an optimizer, and then drop the gradients (or keep them)."""
    for param in stage.model.parameters():
        if param.grad is not None:
            param -= 0.1 * param.grad
            param.grad = None if what_then == "drop" else param.grad


@action("average")
def average_parameters(stage):
    for param in stage.model.parameters():
        torch.distributed.all_reduce(param.data, group=stage.group)
        param.data.div_(stage.world_size)


@action("step a part")
def step_a_part(stage, and_then="send"):
    """Let each rank step one layer, as ZeRO does, and send it to the other."""
    layers = [stage.model.module.a, stage.model.module.b]
    for param in layers[1 - stage.rank].parameters():
        param.grad = None
    stage.optimizers["step"].step()
    for owner, layer in enumerate(layers if and_then == "send" else ()):
        for param in layer.parameters():
            torch.distributed.broadcast(param.data, group_src=owner, group=stage.group)


@action("step half")
def step_half(stage, name):
    """Step one of two optimizers, each of which holds one layer."""
    layer = getattr(stage.model.module, name)
    if name not in stage.optimizers:
        stage.optimizers[name] = torch.optim.SGD(layer.parameters(), lr=0.1)
    stage.optimizers[name].step()


@action("serve")
def serve(stage, and_then="send"):
    """Let rank 0 step for all, and send the parameters to the others."""
    if stage.rank == 0:
        stage.optimizers["step"].step()
    for param in stage.model.parameters() if and_then == "send" else ():
        torch.distributed.broadcast(param.data, group_src=0, group=stage.group)


@action("look at own gradients")
def look_at_own_gradients(stage, how="object"):
    """Make a local backward, and put the averages back afterwards."""
    params = [*stage.model.parameters()]
    kept = [p.grad if how == "object" else p.grad.clone() for p in params]
    if how == "object":
        stage.model.zero_grad()
    stage.model.module(stage.x(stage.rank, stage.count)).sum().backward()
    for param, grad in zip(params, kept, strict=True):
        if how == "object":
            param.grad = grad
        else:
            param.grad.copy_(grad)


@action("foreign weights")
def foreign_weights(stage, how):
    """Make two steps of foreign tensors, and copy them to the parameters."""
    own = dict(stage.model.named_parameters())
    others = {n: p.detach().clone().requires_grad_() for n, p in own.items()}
    optimizer = torch.optim.SGD(others.values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        x = stage.x(stage.rank, stage.count)
        functional_call(stage.model, others, (x,)).pow(2).sum().backward()
        if how == "optimizer":
            optimizer.step()
        with torch.no_grad():
            for name, param in own.items():
                if how != "optimizer":
                    others[name] -= 0.1 * others[name].grad
                param.copy_(others[name])
        if how == "optimizer":  # by hand, only the next step can tell
            stage.note()


@action("save")
def save(stage):
    stage.saved = [param.detach().clone() for param in stage.model.parameters()]


@action("climb")
@torch.no_grad()
def climb(stage):
    """Move the parameters along their gradients, uphill."""
    for param in stage.model.parameters():
        param += 0.05 * param.grad


@action("disturb")
@torch.no_grad()
def disturb(stage):
    generator = torch.Generator().manual_seed(stage.rank)
    for param in stage.model.parameters():
        param += 0.1 * torch.randn(param.shape, generator=generator)


@action("restore")
@torch.no_grad()
def restore(stage):
    for param, old in zip(stage.model.parameters(), stage.saved, strict=True):
        param.copy_(old)


@action("load")
def load(stage, part=""):
    module = stage.model.module.get_submodule(part)
    module.load_state_dict({n: v + 0.5 for n, v in module.state_dict().items()})


@action("add a half")
def add_half(stage):
    stage.model.module.b.weight.data[0, 0] += 0.5


# -- the module and its wrappers -------------------------------------------------------


@action("cast")
def cast(stage, *dtypes):
    for dtype in dtypes:
        if hasattr(nn.Module, dtype):
            getattr(stage.model, dtype)()
        else:
            stage.model.to(getattr(torch, dtype))
    stage.is_changed = True


@action("cast b")
def cast_b(stage, *dtypes):
    for dtype in dtypes:
        getattr(stage.model.module.b, dtype)()
    stage.is_changed = True


def setting(name, make):
    """Return an action that sets an attribute of the module, alike on all ranks."""

    def change(stage):
        torch.manual_seed(1)
        setattr(stage.model.module, name, make())
        stage.is_changed = True

    return change


@action("parameter replaced")
def replace_parameter(stage):
    """Replace b.weight by a parameter with the same values."""
    layer = stage.model.module.b
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    stage.is_changed = True


@action("parameter added to the optimizer")
def add_parameter(stage):
    if not hasattr(stage.model.module, "scale"):
        ACTIONS["parameter added"](stage)
        added = {"params": [stage.model.module.scale]}
        stage.optimizers["step"].add_param_group(added)


@action("unpickle")
def unpickle(stage):
    file = io.BytesIO()
    torch.save(stage.model, file)
    file.seek(0)
    stage.model = torch.load(file, weights_only=False)


@action("deepcopy")
def deepcopy(stage):
    stage.model = copy.deepcopy(stage.model)


@action("wrap again")
def wrap_again(stage):
    stage.kept = stage.model
    stage.model = stage.wrap(stage.model.module)


@action("schedule")
def schedule(stage):
    """Step a scheduler, made at first, which halves the rate at every second step."""
    optimizer = stage.optimizers["step"]
    if not hasattr(stage, "scheduler") or stage.scheduler.optimizer is not optimizer:
        stage.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    stage.scheduler.step()


@action("optimizer of a copy")
def optimizer_of_a_copy(stage):
    copied = copy.deepcopy(stage.model.module)
    stage.optimizers["step"] = torch.optim.SGD(copied.parameters(), lr=0.1)


@action("optimizer of the first module")
def optimizer_of_before(stage):
    """Use an optimizer that holds parameters which the model has no more."""
    stage.optimizers["step"] = stage.model.module.optimizers[0]


# -- comm hooks ------------------------------------------------------------------------


@action("hook")
def average_in_a_hook(stage):
    stage.has_hook = True
    stage.model.register_comm_hook(None, stage.comm_hook)


@action("local hook")
def reduce_in_few_ranks(stage):
    """Register a comm hook of post-local SGD: it averages over one rank only."""

    def hook(_state, bucket):  # torch reads annotations
        if stage.is_over:
            group = stage.model.process_group
            torch.distributed.all_reduce(bucket.buffer().div_(2), group=group)
        return done(bucket.buffer())

    stage.model.register_comm_hook(None, hook)


def none(_average):
    return None


# Once, in the place of the right result; each gets the function that averages.
BAD_HOOKS = {
    "hook fails early": fail,
    "hook returns None early": none,
    "hook raises": lambda average: fail(average()),
    "hook's future raises": lambda average: done(average()).then(fail),
    "hook returns None": lambda average: none(average()),
    "hook returns a tensor": lambda average: average(),
    "hook's future brings None": lambda average: done(none(average())),
    "hook's future brings a list": lambda average: done([average()]),
    "hook's future is too short": lambda average: done(average()[:-1].clone()),
    "hook's future is too long": lambda average: done(torch.cat([average()] * 2)),
    "hook's future has another dtype": lambda average: done(average().double()),
    "hook brings NaN": lambda average: done(torch.full_like(average(), float("nan"))),
}

for name, wrong in BAD_HOOKS.items():
    ACTIONS[name] = lambda stage, wrong=wrong: setattr(stage, "wrong_hook", wrong)
for name, loss in {
    "penalised": penalised,
    "penalised on rank 0": penalised_on_rank_0,
    "fast weights": fast_weights,
    "plain": plain,
}.items():
    ACTIONS[name] = lambda stage, loss=loss: setattr(stage, "loss", loss)
for name, loss in {"method": by_method, "only b": of_b}.items():
    ACTIONS[name] = lambda s, loss=loss: s.forward(loss, module=s.model.module)
ACTIONS |= {
    "raise in backward": lambda stage: stage.handles.append(
        stage.model.module.a.bias.register_hook(fail)
    ),
    "drop .grad": set_grad(lambda grad: None),
    "replace .grad": set_grad(torch.clone),
    "expand .grad": set_grad(lambda grad: torch.zeros(1).expand(grad.shape)),
    "NaN": lambda stage: setattr(stage, "has_nan", True),
    "sync": lambda stage: stage.model.sync_gradients(),
    "layer added": setting("c", lambda: nn.Linear(3, 3)),
    "layer replaced": setting("b", lambda: nn.Linear(3, 3)),
    "parameter added": setting("scale", lambda: nn.Parameter(torch.ones(3))),
    "nothing": lambda stage: stage.model.to(torch.float32).to("cpu"),
    "no reentrance afterwards": lambda stage: stage.undo.append(
        lambda: setattr(stage.model.module, "use_reentrant", False)
    ),
}


# -- ways back to training -------------------------------------------------------------


@action("plain reset")
def plain_reset(stage, copy_from=None):
    """Recover as the README says, without new values; torch's DDP has no reset()."""
    if isinstance(stage.model, DataParallel):
        stage.model.reset(copy_from=copy_from)
    stage.waiting.clear()


ACTIONS["copying reset"] = lambda stage: plain_reset(stage, copy_from=0)


class Bare(nn.Module):
    """What is left of a wrapper that is gone."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


@action("drop the wrapper")
def drop_the_wrapper(stage):
    """Keep only the module; wrap it again before recovery."""
    module = stage.model.module
    stage.model = Bare(module)
    gc.collect()
    stage.undo.append(lambda: stage.begin(module))
