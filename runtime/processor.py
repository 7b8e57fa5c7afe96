"""What a rank computes on: a GPU, an emulated GPU, or cores; the one place that tells them apart.

    cuda:N   a GPU
    cpu:0    an emulated GPU: the GPU's own path on cores, for tests (`runtime.emulation`)
    cpu      cores

Who has a device asks its processor what it needs to know, and never looks at the device's type.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gnnplan.runtime.device import find_gpu
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.plan.schema import Device, Plan

if TYPE_CHECKING:
    from gnnplan.runtime.emulation.gpu import EmulatedGpu

EMULATED = torch.device("cpu", 0)
"""How torch names an emulated GPU."""
_emulated: "EmulatedGpu | None" = None


class AbstractProcessor(ABC):
    """What computes behind a device of torch's. Implementations are final."""

    is_gpu: ClassVar[bool] = False
    """Whether its path is a GPU's: kernels of Triton, lanes, memory apart from the host's."""
    emulated: ClassVar[bool] = False
    """Whether it is a GPU that is emulated on cores."""
    captures: ClassVar[bool] = False
    """Whether it starts a captured graph of kernels at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def multiprocessors(self) -> int:
        """Multiprocessors, which the grids of kernels follow."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return how much of its memory is free; None where the plan alone bounds it."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in its memory."""

    @abstractmethod
    def page_lock(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host's, page-locked where the device copies from such faster."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that was asked of it."""

    @abstractmethod
    def can_map(self, index: int) -> bool:
        """Return whether it reads the memory of another device of its host in place."""

    @property
    def apart(self) -> bool:
        """Whether its memory is apart from the host's."""
        return self.is_gpu or self.device.type != "cpu"

    @property
    def index(self) -> int:
        """Number of the device on its host."""
        return self.device.index or 0

    @property
    def random_devices(self) -> list[torch.device]:
        """Devices beside the host whose draws have a state of their own."""
        return []

    def seed(self, number: int) -> None:
        """Seed the host's generator, and the device's own where it has one."""
        torch.default_generator.manual_seed(number)

    def round_products(self, *, yes: bool) -> None:  # noqa: B027 - cores have nothing faster
        """Let float32 matrix products round their factors to TF32, or forbid it."""

    def adopt(self, tensor: Tensor, *, instead_of: Tensor) -> None:  # noqa: B027
        """Take memory that processes share for the device's own, in the place of a tensor's."""

    def map_peer(self, tensor: Tensor) -> Tensor:
        """Return memory of another device as this one's kernels read it."""
        return tensor

    def issue_collectives_from(self, thread: int | None) -> None:  # noqa: B027 - NCCL cannot say
        """Note the thread that makes all collectives from here on; None: who makes the next."""

    def check_collective(self, group: Any, call: str, tensor: Tensor) -> None:  # noqa: B027
        """Refuse a collective that breaks the rules of the GPUs' library, where it is watched."""

    def enter_thread(self) -> None:  # noqa: B027 - cores need nothing
        """Make it the device that this thread works on."""


class CoresProcessor(AbstractProcessor):
    """The host's own cores."""

    @property
    def multiprocessors(self) -> int:
        """See `AbstractProcessor.multiprocessors`."""
        return 1

    def free_bytes(self) -> int | None:
        """See `AbstractProcessor.free_bytes`."""
        return None

    def holds(self, tensor: Tensor) -> bool:
        """See `AbstractProcessor.holds`."""
        return tensor.device == self.device

    def page_lock(self, tensor: Tensor) -> Tensor:
        """See `AbstractProcessor.page_lock`."""
        return tensor

    def synchronize(self) -> None:
        """See `AbstractProcessor.synchronize`."""

    def can_map(self, index: int) -> bool:
        """See `AbstractProcessor.can_map`: all of a host's memory is every core's."""
        del index
        return True


class CudaProcessor(AbstractProcessor):
    """A GPU, by CUDA."""

    is_gpu = captures = True

    def __init__(self, device: torch.device) -> None:
        """Take the GPU of a number, or without one this thread's: tensors tell their number."""
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(device)

    @property
    def multiprocessors(self) -> int:
        """See `AbstractProcessor.multiprocessors`."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def free_bytes(self) -> int | None:
        """See `AbstractProcessor.free_bytes`: what torch keeps of memory given back is free too."""
        torch.cuda.ipc_collect()  # what other processes had mapped is given back as well
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def holds(self, tensor: Tensor) -> bool:
        """See `AbstractProcessor.holds`."""
        return tensor.device == self.device

    def page_lock(self, tensor: Tensor) -> Tensor:
        """See `AbstractProcessor.page_lock`."""
        return tensor.pin_memory()

    def synchronize(self) -> None:
        """See `AbstractProcessor.synchronize`."""
        torch.cuda.synchronize(self.device)

    def can_map(self, index: int) -> bool:
        """See `AbstractProcessor.can_map`."""
        if index == self.index:
            return True
        seen = index < torch.cuda.device_count()
        return seen and torch.cuda.can_device_access_peer(self.index, index)

    def round_products(self, *, yes: bool) -> None:
        """See `AbstractProcessor.round_products`."""
        del self
        torch.backends.cuda.matmul.allow_tf32 = yes

    @property
    def random_devices(self) -> list[torch.device]:
        """See `AbstractProcessor.random_devices`."""
        return [self.device]

    def seed(self, number: int) -> None:
        """See `AbstractProcessor.seed`."""
        super().seed(number)
        torch.cuda.default_generators[self.index].manual_seed(number)

    def enter_thread(self) -> None:
        """See `AbstractProcessor.enter_thread`."""
        torch.cuda.set_device(self.device)


class EmulatedProcessor(AbstractProcessor):
    """This process's emulated GPU."""

    is_gpu = emulated = True

    def __init__(self, device: torch.device, gpu: "EmulatedGpu") -> None:
        super().__init__(device)
        self.gpu = gpu

    @property
    def multiprocessors(self) -> int:
        """See `AbstractProcessor.multiprocessors`: few, whose programs run one after the other."""
        return 1

    def free_bytes(self) -> int | None:
        """See `AbstractProcessor.free_bytes`."""
        memory = self.gpu.memory
        return None if memory.capacity_bytes is None else memory.capacity_bytes - memory.used_bytes

    def holds(self, tensor: Tensor) -> bool:
        """See `AbstractProcessor.holds`."""
        return self.gpu.memory.find(tensor) is not None

    def page_lock(self, tensor: Tensor) -> Tensor:
        """See `AbstractProcessor.page_lock`: noted, not done."""
        return self.gpu.reach(tensor)

    @property
    def index(self) -> int:
        """See `AbstractProcessor.index`."""
        return self.gpu.index

    def adopt(self, tensor: Tensor, *, instead_of: Tensor) -> None:
        """See `AbstractProcessor.adopt`."""
        self.gpu.give(instead_of)
        self.gpu.take(tensor)

    def map_peer(self, tensor: Tensor) -> Tensor:
        """See `AbstractProcessor.map_peer`."""
        return self.gpu.reach(tensor)

    def issue_collectives_from(self, thread: int | None) -> None:
        """See `AbstractProcessor.issue_collectives_from`."""
        self.gpu.rules.issue_from(thread)

    def check_collective(self, group: Any, call: str, tensor: Tensor) -> None:
        """See `AbstractProcessor.check_collective`."""
        self.gpu.rules.check(group, call, tensor)

    def synchronize(self) -> None:
        """See `AbstractProcessor.synchronize`."""
        self.gpu.lanes.tell_everyone()

    def can_map(self, index: int) -> bool:
        """See `AbstractProcessor.can_map`."""
        return index == self.gpu.index or index in self.gpu.peers

    def enter_thread(self) -> None:
        """See `AbstractProcessor.enter_thread`."""
        from gnnplan.runtime.emulation.threads import enter_thread

        enter_thread(self.gpu)


def processor_of(device: torch.device) -> AbstractProcessor:
    """Return what computes behind a device."""
    if device.type == "cuda":
        return CudaProcessor(device)
    if device == EMULATED and _emulated is not None:
        return EmulatedProcessor(device, _emulated)
    return CoresProcessor(device)


def use_emulated(gpu: "EmulatedGpu | None") -> None:
    """Make an emulated GPU this process's; None: it has none any more."""
    global _emulated
    _emulated = gpu


def emulated_gpu() -> "EmulatedGpu | None":
    """Return this process's emulated GPU; None where it has none."""
    return _emulated


def open_processor(plan: Plan, rank: int) -> AbstractProcessor:
    """Return what a rank computes on, made current in this thread where it is a GPU.

    Raises:
        InputError: that GPU is not there, or kernels of an emulated one would be compiled.
    """
    planned = plan.strategy.devices[rank]
    if planned.kind == "cpu":
        return CoresProcessor(torch.device("cpu"))
    if planned.emulated:
        return _emulate(plan, planned)
    numbers = range(torch.cuda.device_count())
    shown = [str(torch.cuda.get_device_properties(number).uuid) for number in numbers]
    processor = CudaProcessor(torch.device("cuda", find_gpu(plan, rank, shown)))
    processor.enter_thread()
    return processor


def _emulate(plan: Plan, planned: Device) -> AbstractProcessor:
    """Start the rank's emulated GPU, with the memory and the peers that the plan gives it."""
    from gnnplan.runtime.emulation.gpu import EmulatedGpu
    from gnnplan.runtime.emulation.threads import start

    devices = plan.strategy.devices
    if not all(each.emulated for each in devices):
        raise PlanError("expected all of a plan's GPUs to be emulated, or none; plan again")
    mates = [each for each in devices if each.host == planned.host]
    use = plan.prediction.memory_bytes.get(f"rank{planned.rank}")
    gpu = EmulatedGpu(
        index=planned.index,
        capacity_bytes=None if use is None else use.capacity,
        context_bytes=0 if use is None else use.parts.get("context", 0),
        peers=[each.index for each in mates if each.clique == planned.clique],
    )
    start(gpu)
    return EmulatedProcessor(EMULATED, gpu)


def square_root(x: Tensor) -> Tensor:
    """Return correctly rounded square roots of floating-point x.

    IEEE 754 asks for them; numpy, numba and CUDA give them. torch on a CPU does not (DEC-71).
    """
    return torch.sqrt(x) if x.is_cuda else torch.from_numpy(np.sqrt(x.cpu().numpy())).to(x.device)
