"""An emulated GPU of this process: a device of torch's CPU whose tensors are told from the host's.

Tensors that lie on it have `device` cpu:0, those of the host cpu. What CUDA refuses is refused:
numpy's view of a device's tensor, operations on tensors of both, kernels that are given memory of
the host which is not page-locked, more memory than there is, and work in lanes that do not wait
for each other (DEC-105). Nothing here is ever timed.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.runtime.comm.collectives import job_timeout
from gnnplan.runtime.emulation.memory import DeviceLanes, DeviceMemory, OrderError, Reachable
from gnnplan.runtime.errors import CollectiveError
from gnnplan.runtime.processor import EMULATED

_EITHER = {
    "aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::set_", "aten::_to_copy",
}  # fmt: skip
"""Operations on a device's tensor that take the host's tensors beside it."""
_WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim", "aten::bincount", "aten::equal",
    "aten::is_nonzero", "aten::repeat_interleave",
}  # fmt: skip
"""Operations that end when the device is done."""


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, in lists and tuples too."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from tensors_in(each)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


class CollectiveRules:
    """Hold a rank's collectives to NCCL's rules: gloo carries them here, and has none (DEC-112).

    Calls come in the same order on all ranks, which one thread alone can promise. Each is looked at
    before it is made: which thread makes it, and whether all ranks make the same one.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._sides: dict[tuple[int, ...], Any] = {}
        self.calls = 0
        """Number of calls that kept the rules."""

    def issue_from(self, thread: int | None) -> None:
        """Let a thread make all calls from here on; None: the one that makes the next."""
        self._thread = thread

    def check(self, group: Any, call: str, tensor: Tensor) -> None:
        """Refuse a call from another thread, or one that other ranks do not make now; collective.

        CollectiveError is raised on every rank where their calls differ.
        """
        here = threading.get_ident()
        if self._thread is None:
            self._thread = here
        if here != self._thread:
            raise CollectiveError(
                f"{call}: expected all collectives of a GPU to come from one thread, found one "
                f"from {threading.current_thread().name}; issue it by the order's thread"
            )
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        mine = self._signature(group, call, tensor)
        found: list[Any] = [None] * len(ranks)
        dist.all_gather_object(found, mine, group=self._side(ranks))
        for rank, theirs in zip(ranks, found, strict=True):
            if theirs != found[0]:
                raise CollectiveError(
                    f"expected all ranks to make the same collective, found {found[0]} on rank "
                    f"{ranks[0]} and {theirs} on rank {rank}; issue them in one order"
                )
        self.calls += 1

    def _signature(self, group: Any, call: str, tensor: Tensor) -> str:
        shape = list(tensor.shape)
        if call == "all_to_all":
            shape[:1] = []  # ranks send different numbers of rows
        whole: Any = dist.group.WORLD
        name = (group or whole).group_name
        return f"{call} of {tensor.dtype} {shape} in group {name}"

    def _side(self, ranks: tuple[int, ...]) -> Any:
        """Return the group by which these ranks compare, whichever group they call in."""
        if ranks not in self._sides:
            self._sides[ranks] = dist.new_group(
                list(ranks), backend="gloo", use_local_synchronization=True, timeout=job_timeout()
            )
        return self._sides[ranks]


class EmulatedGpu:
    """One device.

    Args:
        index: its number on its host, as the plan has it.
        capacity_bytes: of its memory; None: any.
        context_bytes: of it that a process takes before any data.
        peers: numbers of the devices whose memory it can map.
    """

    def __init__(
        self,
        *,
        index: int = 0,
        capacity_bytes: int | None = None,
        context_bytes: int = 0,
        peers: Sequence[int] = (),
    ) -> None:
        self.index, self.peers = index, frozenset(peers)
        self.lanes = DeviceLanes()
        self.rules = CollectiveRules()
        self.memory = DeviceMemory(capacity_bytes, context_bytes, self.lanes)
        self.locked: dict[int, int] = {}
        """Page-locked memory of the host: bytes by first address."""
        self._living: dict[int, tuple[Any, int]] = {}
        """Of the host too, and mapped of peers: as long as their tensors live."""
        self._coming: dict[int, tuple[Any, str, int]] = {}
        self.here = threading.local()

    def take(self, value: Any) -> Any:
        """Count what a call made as the device's; returns it.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        made = list(tensors_in(value))
        clock = self.lanes.issue()
        for tensor in made:
            if self.memory.find(tensor) is None:
                self.memory.take(tensor)
        self.memory.write(made, clock)
        return value

    def give(self, tensor: Tensor) -> Tensor:
        """Count a tensor as the host's, and return it."""
        self.memory.release(tensor)
        return tensor

    def wait_for_lane(self) -> None:
        """Let this thread wait for the current lane's work."""
        self.lanes.tell_thread(self.lanes.mark())

    def download(self, tensor: Tensor, **changes: Any) -> Tensor:
        """Copy a tensor of the device to the host; the thread waits for it."""
        self.memory.read([tensor], self.lanes.issue())
        self.wait_for_lane()
        return self.give(tensor.to(copy=True, **changes))

    def expect(self, tensor: Tensor) -> None:
        """Note that a copy to a tensor of the host is under way in the current lane."""
        storage = tensor.untyped_storage()
        key, lane = storage._cdata, self.lanes.current
        reference = weakref.ref(storage, lambda _: self._coming.pop(key, None))
        self._coming[key] = reference, lane, self.lanes.mark().get(lane, 0)

    def refuse_early_look(self, tensor: Tensor) -> None:
        """Refuse the host a tensor whose copy from the device may be under way.

        Raises:
            OrderError: nobody has waited for it.
        """
        if not self._coming or tensor.layout != torch.strided:
            return
        coming = self._coming.get(tensor.untyped_storage()._cdata)
        if coming is not None and not self.lanes.host_knows(coming[1], coming[2]):
            raise OrderError(
                f"the host reads a tensor of {list(tensor.shape)} while lane {coming[1]!r} may "
                "still copy to it"
            )

    def lock(self, memory: Tensor) -> None:
        """Note that memory of the host is page-locked."""
        self.locked[memory.data_ptr()] = memory.nbytes

    def unlock(self, memory: Tensor) -> None:
        """Note that memory of the host is page-locked no more."""
        self.locked.pop(memory.data_ptr(), None)

    def reach(self, tensor: Tensor) -> Tensor:
        """Let kernels address a tensor that lies elsewhere, while it lives, and return it."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        reference = weakref.ref(storage, lambda _: self._living.pop(address, None))
        self._living[address] = reference, storage.nbytes()
        return tensor

    def _elsewhere(self) -> list[tuple[int, int]]:
        """Ranges outside the device's memory that kernels can address."""
        living = [(at, size) for at, (_, size) in list(self._living.items())]
        return [*list(self.locked.items()), *living]

    def reachable(self) -> Reachable:
        """Return what kernels may read and write now."""
        return Reachable([*self.memory.ranges(), *self._elsewhere()])

    def addresses(self, tensor: Tensor) -> bool:
        """Tell whether a kernel can address a tensor: own memory, a peer's, or page-locked."""
        if self.memory.find(tensor) is not None or tensor.numel() == 0:
            return True
        first = tensor.untyped_storage().data_ptr()
        last = first + tensor.untyped_storage().nbytes()
        return any(at <= first and last <= at + size for at, size in self._elsewhere())


def run_operation(gpu: EmulatedGpu, func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of torch's operations, and note what of the device it reads, writes and makes.

    Raises:
        RuntimeError: it is given tensors of the device and of the host.
        OrderError: its lane does not wait for another one's work that it rests on.
        torch.OutOfMemoryError: there is no room for its result.
    """
    given = list(tensors_in([args, kwargs]))
    held = [tensor for tensor in given if gpu.memory.find(tensor) is not None]
    if not held:
        return func(*args, **kwargs)
    name = func._schema.name
    first = next(iter(given))
    if len(held) < len(given):
        _refuse_both(gpu, name, given, first)
    written = list(_written(func, args, kwargs))
    clock = gpu.lanes.issue()
    seen = {id(tensor) for tensor in written}
    gpu.memory.read((tensor for tensor in held if id(tensor) not in seen), clock)
    gpu.memory.write(written, clock)
    result = func(*args, **kwargs)
    if name == "aten::copy_" and gpu.memory.find(first) is None:
        _download_into(gpu, first, args, kwargs)
        return result
    if name in _WAITING or (name == "aten::index" and _by_mask(args)):
        gpu.wait_for_lane()
    for tensor in tensors_in(result):
        if gpu.memory.find(tensor) is None:
            gpu.memory.take(tensor)
    return result


def _refuse_both(gpu: EmulatedGpu, name: str, given: Sequence[Tensor], first: Tensor) -> None:
    strange = [t for t in given if gpu.memory.find(t) is None and t.dim() > 0]
    indexed = name in _EITHER and (name == "aten::copy_" or gpu.memory.find(first) is not None)
    if strange and not indexed:
        raise RuntimeError(
            f"{name}: expected all tensors on one device, found {list(strange[0].shape)} on the "
            f"host beside tensors of the emulated GPU {gpu.index}"
        )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Arguments that an operation writes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def _by_mask(args: Any) -> bool:
    return any(each.dtype == torch.bool for each in tensors_in(args[1]))


def _download_into(gpu: EmulatedGpu, host: Tensor, args: Any, kwargs: Any) -> None:
    waits_not = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if waits_not:
        gpu.expect(host)
    else:
        gpu.wait_for_lane()


def call_function(gpu: EmulatedGpu, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of torch's as a program of a GPU sees it.

    Raises:
        TypeError: numpy is to look into the device's memory.
        OrderError: the host looks at what is still being copied.
    """
    if getattr(func, "__self__", None) is torch.Tensor.device:
        return func(*args, **kwargs) if gpu.memory.find(args[0]) is None else EMULATED
    special = _METHODS.get(func)
    if special is not None:
        return special(gpu, func, args, kwargs)
    device = kwargs.get("device")
    if device is None:
        return func(*args, **kwargs)
    here = is_emulated(device)
    result = func(*args, **{**kwargs, "device": "cpu"} if here else kwargs)
    if here:
        return gpu.take(result)
    for tensor in tensors_in(result):
        gpu.give(tensor)
    return result


def is_emulated(device: Any) -> bool:
    """Tell whether a device's name is that of an emulated GPU."""
    return torch.device(device) == EMULATED


def _look(gpu: EmulatedGpu, func: Any, args: Any, kwargs: Any) -> Any:
    if gpu.memory.find(args[0]) is not None:
        raise TypeError(
            "expected a tensor of the host for numpy, found one of the emulated GPU "
            f"{gpu.index}; Tensor.cpu() copies it"
        )
    gpu.refuse_early_look(args[0])
    return func(*args, **kwargs)


def _look_anywhere(gpu: EmulatedGpu, func: Any, args: Any, kwargs: Any) -> Any:
    gpu.refuse_early_look(args[0])
    return func(*args, **kwargs)


def _to_host(gpu: EmulatedGpu, func: Any, args: Any, kwargs: Any) -> Any:
    if gpu.memory.find(args[0]) is None:
        return func(*args, **kwargs)
    return gpu.download(args[0])


def _to(gpu: EmulatedGpu, func: Any, args: Any, kwargs: Any) -> Any:
    """`Tensor.to` between host and device; dtypes alone change nothing of where a tensor lies."""
    tensor, rest = args[0], dict(kwargs)
    copy = rest.pop("copy", False)
    parse: Any = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]
    device, dtype, _, _ = parse(*args[1:], **rest)
    if len(args) > 1 and isinstance(args[1], Tensor):
        device = EMULATED if gpu.memory.find(args[1]) is not None else device
    changes = {} if dtype is None else {"dtype": dtype}
    held = gpu.memory.find(tensor) is not None
    if device is None or is_emulated(device) == held:
        return func(tensor, copy=copy, **changes) if copy or changes else tensor
    if held:
        return gpu.download(tensor, **changes)
    return gpu.take(func(tensor, copy=True, **changes))


_METHODS: dict[Any, Any] = {
    torch.Tensor.numpy: _look,
    torch.Tensor.__array__: _look,
    torch.Tensor.tolist: _look_anywhere,
    torch.Tensor.cpu: _to_host,
    torch.Tensor.to: _to,
}
