"""A net trained by Lightning Fabric: `train.py` says what is common to all."""

from __future__ import annotations

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.nn.functional import cross_entropy

from tests.trainers.train import LEARNING_RATE, main, make_data, make_net, sgd


def train(wrapping):
    class Strategy(DDPStrategy):
        def setup_module(self, module):
            with wrapping():
                return super().setup_module(module)

    fabric = Fabric(accelerator="cpu", devices=2, strategy=Strategy())
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    net = make_net()
    model, optimizer = fabric.setup(net, sgd(net, LEARNING_RATE))
    loader = fabric.setup_dataloaders(make_data())
    for step, (x, y) in enumerate(loader):
        is_last = step % 2 == 1  # of an accumulation
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(cross_entropy(model(x), y))
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return type(model._forward_module), net.state_dict()


if __name__ == "__main__":
    main(train)
