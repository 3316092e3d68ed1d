"""Lightning starts the other rank itself, as ``python own_launcher.py OUT``."""

from __future__ import annotations

import sys

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)

    def training_step(self, batch, _):
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self):
        """The trainer lets go of its wrapper soon after."""
        kind = type(self.trainer.strategy.model)
        what = {"kind": kind.__module__, "weights": self.net.state_dict()}
        torch.save(what, f"{sys.argv[1]}.{self.trainer.global_rank}")


def main():
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(64, 8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(x, x[:, :3].argmax(1))
    trainer.fit(Classifier(), DataLoader(data, batch_size=8))


if __name__ == "__main__":
    main()
