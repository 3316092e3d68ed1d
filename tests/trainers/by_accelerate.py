"""A net trained by Hugging Face Accelerate: `train.py` says what is common to all."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy

from tests.trainers.train import LEARNING_RATE, main, make_data, make_net, sgd


def train(wrapping):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    net = make_net()
    with wrapping():  # the hook-in: prepare() is what wraps
        model, optimizer, loader = accelerator.prepare(
            net, sgd(net, LEARNING_RATE), make_data()
        )
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


if __name__ == "__main__":
    main(train)
