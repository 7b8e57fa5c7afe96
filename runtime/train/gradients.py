"""All gradients of a model in one flat tensor."""

import torch
from torch import Tensor, nn

from runtime.errors import InputError

_ALIGNMENT_BYTES = 64


class GradientBuffer:
    """All gradients of a model in one flat tensor, and the loss in its last place.

    The parameters' `.grad` are views, so that neither the all-reduce nor zeroing copies anything.

    Raises:
        InputError: parameters of more than one dtype or device, or not initialised yet.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise InputError("model: expected parameters of known shape, found lazy ones")
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) != 1:
            raise InputError(f"model: expected parameters of one dtype and device, found {kinds}")
        dtype, device = kinds.pop()
        step = max(_ALIGNMENT_BYTES // dtype.itemsize, 1)
        sizes = [-(-p.numel() // step) * step for p in parameters]
        self.flat = torch.zeros(sum(sizes) + 1, dtype=dtype, device=device)
        self.parameters: list[nn.Parameter] = parameters
        """Those with a gradient, in the model's order."""
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        """Where each begins in `flat`."""
        for parameter, part in zip(parameters, self.flat[:-1].split(sizes), strict=True):
            parameter.grad = part[: parameter.numel()].view_as(parameter)

    @property
    def loss(self) -> Tensor:
        """The loss: this rank's share before the all-reduce, the global one after it."""
        return self.flat[-1]
