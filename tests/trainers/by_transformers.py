"""A net trained by Transformers' Trainer: `train.py` says what is common to all."""

from __future__ import annotations

import tempfile

from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from tests.trainers.train import LEARNING_RATE, main, make_data, make_net


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def train(wrapping):
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
        model = Classifier()
        samples = [{"x": x, "labels": y} for x, y in make_data().dataset]
        trainer = Trainer(model=model, args=arguments, train_dataset=samples)
        with wrapping():  # it wraps when it trains, by Accelerate
            trainer.train()
    return type(trainer.model_wrapped), model.net.state_dict()


if __name__ == "__main__":
    main(train)
