"""A net trained by Lightning's Trainer: `train.py` says what is common to all."""

from __future__ import annotations

import tempfile

import lightning
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy

from tests.trainers.train import LEARNING_RATE, main, make_data, make_net, sgd


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
        return sgd(self, LEARNING_RATE)


def train(wrapping):
    kinds = []

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


if __name__ == "__main__":
    main(train)
