"""A net trained by one of four trainers::

    torchrun by_trainer.py TRAINER OUT torch                      on torch's DDP
    torchrun -m minidp.run by_trainer.py TRAINER OUT torch        unmodified, on minidp
    torchrun by_trainer.py TRAINER OUT minidp    on minidp, by the trainer's own means

Lightning can do without torchrun: it starts the other rank itself.
On rank 0 it writes to OUT what wrapped the net and the weights that it got.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import minidp

LEARNING_RATE = 0.1
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
WAYS = {"torch": contextlib.nullcontext, "minidp": minidp.swapped}


def make_net():
    """A different one on each rank: DDP is to hand out that of rank 0."""
    torch.manual_seed(RANK)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)
    )


def make_data():
    """96 samples in batches of 8, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


def sgd(module):
    """With momentum, so that every step leaves its mark on all later ones."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)


def accelerate(wrapping):
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    net = make_net()
    with wrapping():  # the hook-in: prepare() is what wraps
        model, optimizer, loader = accelerator.prepare(net, sgd(net), make_data())
    kind = type(model)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    weights = accelerator.unwrap_model(model).state_dict()
    accelerator.end_training()
    return kind, weights


def fabric(wrapping):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    class Strategy(DDPStrategy):
        def setup_module(self, module):
            with wrapping():
                return super().setup_module(module)

    fabric = Fabric(accelerator="cpu", devices=2, strategy=Strategy())
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    net = make_net()
    model, optimizer = fabric.setup(net, sgd(net))
    for step, (x, y) in enumerate(fabric.setup_dataloaders(make_data())):
        is_last = step % 2 == 1  # of an accumulation
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(cross_entropy(model(x), y))
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return type(model._forward_module), net.state_dict()


def lightning(wrapping):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    kinds = []

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, _):
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch, _):
            x, y = batch
            self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

        def configure_optimizers(self):
            return sgd(self)

    class Strategy(DDPStrategy):
        def _setup_model(self, model):
            with wrapping():
                wrapped = super()._setup_model(model)
            kinds.append(type(wrapped))
            return wrapped

    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=Strategy(),
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, make_data(), make_data())
    return kinds[0], model.net.state_dict()


class WithLoss(nn.Module):
    """As Transformers' Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def transformers(wrapping):
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            seed=0,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=LEARNING_RATE,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = WithLoss()
        samples = [{"x": x, "labels": y} for x, y in make_data().dataset]
        trainer = Trainer(model=model, args=arguments, train_dataset=samples)
        with wrapping():  # it wraps when it trains, by Accelerate
            trainer.train()
    return type(trainer.model_wrapped), model.net.state_dict()


TRAINERS = {
    train.__name__: train for train in (accelerate, fabric, lightning, transformers)
}

if __name__ == "__main__":
    trainer, out, way = sys.argv[1:]
    kind, weights = TRAINERS[trainer](WAYS[way])
    if RANK == 0:
        name = f"{kind.__module__}.{kind.__qualname__}"
        torch.save({"wrapper": name, "weights": dict(weights)}, out)
    if dist.is_initialized():
        dist.destroy_process_group()
