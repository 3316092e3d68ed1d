"""The mean over all labels of a step, by three trainers::

    torchrun -m minidp.run --average-over items over_items.py TRAINER OUT

Each sequence has its own number of labels. Every step takes the whole data set, two
micro-batches on each of two ranks, so that the order of samples does not matter. Rank 0
writes the weights and the losses that were logged to OUT.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

STEPS, LEARNING_RATE, PADDING = 3, 0.5, -100


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_data():
    """12 sequences of 5 labels, most of which are padding in some of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, 4, generator=generator, dtype=torch.float64)
    y = x[..., :3].argmax(-1)
    y[torch.arange(5) > torch.arange(12)[:, None] % 5] = PADDING
    return TensorDataset(x, y)


def mean_loss(logits, y):
    return cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PADDING)


def alone():
    """Weights and losses of one process that takes the whole batch at once."""
    net, (x, y) = make_net(), make_data().tensors
    optimizer, losses = torch.optim.SGD(net.parameters(), LEARNING_RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net.state_dict(), losses


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, losses = make_net(), []
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    loader = DataLoader(make_data(), batch_size=3)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(STEPS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model.weigh_loss(mean_loss(model(x), y), (y != PADDING).sum())
                # It divides by that number.
                accelerator.backward(loss * accelerator.gradient_accumulation_steps)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(model.item_totals.mean_loss.item())
    return accelerator.unwrap_model(model).state_dict(), losses


def lightning():
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    losses = []

    class Labels(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, _):
            x, y = batch
            model = self.trainer.strategy.model  # the wrapper
            loss = model.weigh_loss(mean_loss(self.net(x), y), (y != PADDING).sum())
            return loss * self.trainer.accumulate_grad_batches  # it divides by that

        def on_before_optimizer_step(self, _optimizer):
            loss = self.trainer.strategy.model.item_totals.mean_loss
            self.log("loss", loss)
            losses.append(loss.item())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), LEARNING_RATE)

    model = Labels()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(),
            max_epochs=STEPS,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(make_data(), batch_size=3))
    return model.net.state_dict(), losses


class WithLogits(nn.Module):
    """As Transformers' Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x, labels=None):
        return {"logits": self.net(x)}


def transformers():
    from transformers import Trainer, TrainingArguments

    class OverItems(Trainer):
        def log(self, logs, *others, **more):
            if "loss" in logs:
                logs["loss"] = self.model_wrapped.item_totals.mean_loss.item()
            super().log(logs, *others, **more)

    def summed_loss(outputs, labels, num_items_in_batch=None):
        n = (labels != PADDING).sum()
        loss = mean_loss(outputs["logits"], labels)
        return trainer.model_wrapped.weigh_loss(loss, n)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=False,  # no message of its own
            num_train_epochs=STEPS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = WithLogits()
        samples = [{"x": x, "labels": y} for x, y in make_data()]
        trainer = OverItems(
            model, arguments, train_dataset=samples, compute_loss_func=summed_loss
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return model.net.state_dict(), losses


TRAINERS = {train.__name__: train for train in (accelerate, lightning, transformers)}

if __name__ == "__main__":
    weights, losses = TRAINERS[sys.argv[1]]()
    if dist.get_rank() == 0:
        torch.save({"weights": dict(weights), "losses": losses}, sys.argv[2])
    dist.destroy_process_group()
