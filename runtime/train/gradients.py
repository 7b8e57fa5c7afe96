"""A model's gradients in one flat tensor, and its all-reduce during the backward pass.

The buffer is cut into parts in the order in which the backward pass fills them, the last layer's
first. A part is sent when all its gradients are there and the part before it was sent: every rank
sends the same parts in the same order, whatever its share of the batch. With more than two ranks, a
backend may add a smaller tensor in another order, and last bits differ.
"""

import functools

import torch
from torch import Tensor, nn

from gnnplan.runtime.comm.collectives import Communicator, Pending
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.stages import PART_BYTES

_ALIGNMENT_BYTES = 64


class GradientBuffer:
    """All gradients of a model in one flat tensor, with the loss in its last place.

    The parameters' `.grad` are views: neither the all-reduce nor zeroing copies anything. With
    `flagged` the place before the loss tells the ranks of each other's batches that did not fit.
    """

    def __init__(self, model: nn.Module, *, flagged: bool = False) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise InputError("model: expected parameters of known shape, found lazy ones")
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) != 1:
            raise InputError(f"model: expected parameters of one dtype and device, found {kinds}")
        dtype, device = kinds.pop()
        step = max(_ALIGNMENT_BYTES // dtype.itemsize, 1)
        sizes = [-(-p.numel() // step) * step for p in parameters]
        self.flat = torch.zeros(sum(sizes) + 1 + flagged, dtype=dtype, device=device)
        self.parameters: list[nn.Parameter] = parameters
        """Parameters with a gradient, in the model's order."""
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        """Begin of each parameter's gradient in `flat`."""
        own = self.flat[: sum(sizes)]
        for parameter, part in zip(parameters, own.split(sizes), strict=True):
            parameter.grad = part[: parameter.numel()].view_as(parameter)

    @property
    def loss(self) -> Tensor:
        """Loss: this rank's share before the all-reduce, the global one after it."""
        return self.flat[-1]

    @property
    def overflow(self) -> Tensor:
        """Number of ranks whose batch did not fit, after the all-reduce; of `flagged` ones."""
        return self.flat[-2]


class OverlappedReduce:
    """Sender of a model's gradients, in parts of at least `part_bytes`.

    Nothing else of this thread may use the communicator during a backward pass.
    """

    def __init__(
        self, gradients: GradientBuffer, comm: Communicator, *, part_bytes: int = PART_BYTES
    ) -> None:
        self._comm = comm
        self._flat = gradients.flat
        self._parts = _parts(gradients, part_bytes)
        self._missing: list[int] = []
        self._next = 0
        self._pending: list[Pending] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, part))
            for part, (_, _, held) in enumerate(self._parts)
            for parameter in held
        ]
        self.begin()

    @property
    def num_parts(self) -> int:
        """Number of parts of the gradient, without the loss."""
        return len(self._parts)

    def begin(self) -> None:
        """Expect all gradients anew; call before each backward pass."""
        self._missing = [len(held) for _, _, held in self._parts]
        self._next = 0
        self._pending = []

    def finish(self) -> None:
        """Send the rest, the loss last, and wait for all of it; collective."""
        while self._next < len(self._parts):
            self._send()
        self._pending.append(self._comm.start_all_reduce(self._flat[-1:]))
        for pending in self._pending:
            pending.wait()
        self._pending = []

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, part: int, parameter: Tensor) -> None:
        del parameter
        self._missing[part] -= 1
        while self._next < len(self._parts) and self._missing[self._next] == 0:
            self._send()

    def _send(self) -> None:
        first, last, _ = self._parts[self._next]
        self._next += 1
        self._pending.append(self._comm.start_all_reduce(self._flat[first:last]))


def _parts(gradients: GradientBuffer, part_bytes: int) -> list[tuple[int, int, list[nn.Parameter]]]:
    """Return begin, end and parameters of each part, in order of the backward pass."""
    size = gradients.flat.element_size()
    found: list[tuple[int, int, list[nn.Parameter]]] = []
    last = gradients.flat.numel() - 1
    held: list[nn.Parameter] = []
    for parameter, first in zip(
        reversed(gradients.parameters), reversed(gradients.starts), strict=True
    ):
        held.append(parameter)
        if (last - first) * size >= part_bytes or first == 0:
            found.append((first, last, held))
            last, held = first, []
    return found


def open_overlap(
    gradients: GradientBuffer, comm: Communicator, *, asked: bool
) -> OverlappedReduce | None:
    """Make the sender where overlap is asked for and possible; None sends gradients afterwards."""
    hooks = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")
    return OverlappedReduce(gradients, comm) if asked and hooks and comm.size > 1 else None


def overlap_of(
    plan: Plan, gradients: GradientBuffer, comm: Communicator
) -> OverlappedReduce | None:
    """Make the sender that a plan asks for, or None.

    Cooperative batches exchange rows inside the backward pass, by the same communicator.
    """
    strategy = plan.strategy
    beside = strategy.threads.comm > 0 and strategy.batching == "independent"
    return open_overlap(gradients, comm, asked=beside)
