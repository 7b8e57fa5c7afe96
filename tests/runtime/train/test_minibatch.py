"""What the training loop meters of a step on a GPU, whose work its host waits for once."""

import time

import pytest
import torch
from torch import Tensor

from runtime.comm.collectives import Communicator
from runtime.meter import StageMeter
from runtime.stages import Stage
from runtime.train.minibatch import GradientBuffer, TrainLoop, make_optimizer

WAIT_SECONDS = 0.02


class OnGpu(Tensor):
    """Says that it lies on a GPU; read as a number it takes a while, as a step there does."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda", 0)

    def __float__(self) -> float:
        time.sleep(WAIT_SECONDS)
        return 1.5


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_wait_for_a_gpu_is_part_of_forward_and_backward(on_gpu: bool) -> None:
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
    assert len(found) == 2
    for seconds in found:
        assert seconds >= 1.0 + WAIT_SECONDS if on_gpu else seconds == 1.0
    assert max(meter.seconds(Stage.OPTIMIZER)) < 1.0
