"""What the training loop meters of a step on a GPU, whose work its host waits for once."""

import pytest
import torch
from torch import Tensor

from runtime import meter as metering
from runtime.comm.collectives import Communicator
from runtime.meter import StageMeter
from runtime.stages import Stage
from runtime.train import minibatch
from runtime.train.minibatch import GradientBuffer, TrainLoop, make_optimizer
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
