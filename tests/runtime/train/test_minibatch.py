"""A step sums loss and gradient over the global batch; a GPU's work is waited for once."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gnnplan.runtime import meter as metering
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.loader.stages import seed_batch
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train import minibatch
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
from tests.support.clock import FakeClock

WAIT_SECONDS = 0.02
CLOCK = FakeClock()


class OnGpu(Tensor):
    """Says that it lies on a GPU; read as a number it takes a while, as a step there does."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda", 0)

    def __float__(self) -> float:
        CLOCK.sleep(WAIT_SECONDS)
        return 1.5


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_wait_for_a_gpu_is_part_of_forward_and_backward(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (minibatch, metering):
        monkeypatch.setattr(module, "time", CLOCK)
    model = torch.nn.Linear(2, 1)
    gradients = GradientBuffer(model)
    if on_gpu:
        gradients.flat = gradients.flat.as_subclass(OnGpu)
    meter = StageMeter()
    loop = TrainLoop(
        model=model,
        optimizer=make_optimizer(model, learning_rate=0.1, weight_decay=0.0),
        gradients=gradients,
        comm=Communicator(),
        meter=meter,
        task="multiclass",
        seed=0,
    )
    for index in range(2):
        meter.add(Stage.FORWARD_BACKWARD, index, 1.0)
        assert loop.finish_step(0, index, index) == (1.5 if on_gpu else 0.0)
    found = meter.seconds(Stage.FORWARD_BACKWARD)
    assert found == pytest.approx([1.0 + WAIT_SECONDS if on_gpu else 1.0] * 2)
    assert meter.seconds(Stage.OPTIMIZER) == [0.0, 0.0]


class Seeds(nn.Module):
    """A linear model of the seeds' own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor, blocks: object) -> Tensor:
        del blocks
        return self.linear(x)


def share_of(x: Tensor, y: Tensor, rows: slice) -> MiniBatch:
    """A rank's share of a global batch; it may be empty."""
    seeds = np.arange(len(x))[rows]
    return replace(
        seed_batch(0, 0, Dialect.FIRST_SEEN), seeds=seeds, n_id=seeds, input_id=seeds,
        global_num_seeds=len(x), x=x[rows], y=y[rows],
    )  # fmt: skip


@pytest.mark.parametrize("cuts", [[0, 7], [0, 4, 7], [0, 1, 1, 7]])
def test_shares_of_any_size_add_up_to_the_loss_and_gradient_of_the_whole_batch(
    cuts: list[int],
) -> None:
    torch.manual_seed(1)
    x, y, model = torch.randn(7, 2), torch.tensor([0, 1, 2, 0, 1, 2, 0]), Seeds()
    expected = functional.cross_entropy(model(x, None), y)
    (gradient,) = torch.autograd.grad(expected, [model.linear.weight])
    loss, found = 0.0, torch.zeros_like(gradient)
    for first, last in itertools.pairwise(cuts):
        model.zero_grad()
        loop = TrainLoop(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            gradients=GradientBuffer(model),
            comm=Communicator(),
            meter=StageMeter(),
            task="multiclass",
            seed=0,
        )
        loss += loop.step(share_of(x, y, slice(first, last)), 0)
        assert model.linear.weight.grad is not None
        found += model.linear.weight.grad
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(found, gradient)
