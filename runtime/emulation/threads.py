"""Threads of a process on an emulated GPU: their calls of torch, and their kernels, are watched."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gnnplan.runtime.device import require_triton
from gnnplan.runtime.emulation.gpu import EmulatedGpu, call_function, run_operation, tensors_in
from gnnplan.runtime.emulation.memory import CheckedMemory
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.processor import emulated_gpu, use_emulated

_interpreter = threading.RLock()
"""Triton's interpreter changes its language while a kernel runs: one thread at a time."""


class WatchedFunctions(TorchFunctionMode):
    """What a program sees of tensors: where they lie, and where calls put them."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function as a program of a GPU sees it."""
        del types
        if self._gpu.here.kernel:
            return func(*args, **(kwargs or {}))
        return call_function(self._gpu, func, args, kwargs or {})


class WatchedOperations(TorchDispatchMode):
    """What operations do in the device's memory."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what it touches."""
        del types
        if self._gpu.here.kernel:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return run_operation(self._gpu, func, args, kwargs or {})


def enter_thread(gpu: EmulatedGpu) -> None:
    """Watch this thread from here on, until it ends or `leave_thread`; again does nothing."""
    here = gpu.here
    if getattr(here, "watched", None) is None:
        here.kernel, here.functions = False, WatchedFunctions(gpu)
        here.watched = (here.functions, WatchedOperations(gpu))
        for mode in here.watched:
            mode.__enter__()


def leave_thread(gpu: EmulatedGpu) -> None:
    """Watch this thread no longer."""
    for mode in reversed(gpu.here.watched):
        mode.__exit__(None, None, None)
    gpu.here.watched = None


def start(gpu: EmulatedGpu) -> None:
    """Install an emulated GPU in this process, and watch this thread.

    Raises:
        InputError: Triton's kernels were or would be compiled, not interpreted.
    """
    _interpret()
    stop()
    use_emulated(gpu)
    enter_thread(gpu)


def stop() -> None:
    """Remove the emulated GPU from this process, and watch this thread no longer."""
    gpu = emulated_gpu()
    if gpu is not None:
        leave_thread(gpu)
        use_emulated(None)


def _interpret() -> None:
    """Watch every kernel that is launched from here on."""
    require_triton("emulated GPUs")
    from triton import knobs
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        raise InputError(
            "expected TRITON_INTERPRET=1 in the environment of ranks on emulated GPUs, found it "
            "unset; gnnplan train sets it"
        )
    _watch_backward()
    replace_language_once()
    executor: Any = interpreter.GridExecutor
    if not hasattr(executor, "unwatched"):
        executor.unwatched, executor.__call__ = executor.__call__, _launch
        executor.memory = interpreter._interpreter = CheckedMemory(interpreter._interpreter)


def replace_language_once() -> None:
    """Have Triton's interpreter replace its language's functions once, and for good (DEC-136)."""
    from triton.runtime import interpreter

    module: Any = interpreter
    if hasattr(module, "replaced"):
        return
    replace, nothing = module._patch_lang, getattr(module, "_LangPatchScope", type(None))
    module.replaced = dict[int, dict[str, Any]]()

    def replace_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in module.replaced:
            replace(function)
            module.replaced[id(names)] = names
        return nothing()  # to give back

    module._patch_lang = replace_once
    module._get_np_dtype = _by_name(module._get_np_dtype)


def _by_name(number_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remember numpy's number for each type of the language."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = number_of(kind)
        return found

    return find


def _watch_backward() -> None:
    """Let functions of a backward pass see the device as those of the forward pass do.

    torch runs the whole pass as one call of a function, inside which a mode is off.
    """
    module: Any = torch.autograd
    unwatched = module._engine_run_backward
    if hasattr(module, "unwatched"):
        return
    module.unwatched = unwatched

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        gpu = emulated_gpu()
        watched = gpu is not None and getattr(gpu.here, "watched", None) is not None
        with gpu.here.functions if gpu is not None and watched else nullcontext():
            return unwatched(*args, **kwargs)

    module._engine_run_backward = run_backward


def _launch(executor: Any, *args: Any, **kwargs: Any) -> None:
    with _interpreter:
        gpu = emulated_gpu()
        if gpu is None:
            executor.unwatched(*args, **kwargs)
            return
        enter_thread(gpu)
        gpu.here.kernel, executor.memory.reachable = True, gpu.reachable()
        try:
            run_kernel(gpu, lambda: executor.unwatched(*args, **kwargs), (args, kwargs))
        finally:
            gpu.here.kernel, executor.memory.reachable = False, None


def run_kernel(gpu: EmulatedGpu, launch: Callable[[], object], arguments: Any) -> None:
    """Run a kernel, and note which of its tensors it has read or written.

    Raises:
        ValueError: it is given memory of the host that is not page-locked.
        OrderError: its lane does not wait for another one's work that it rests on.
    """
    given = list(tensors_in(list(arguments)))
    for tensor in given:
        if not gpu.addresses(tensor):
            raise ValueError(
                f"a kernel cannot address a tensor of {list(tensor.shape)}: it lies in the host's "
                "memory and is not page-locked"
            )
    clock = gpu.lanes.issue()
    before = [_bytes_of(tensor).clone() for tensor in given]
    gpu.memory.read(given, clock)
    launch()
    changed = [t for t, old in zip(given, before, strict=True) if not _equal(t, old)]
    gpu.memory.write(changed, clock)


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _equal(tensor: Tensor, old: Tensor) -> bool:
    return torch.equal(_bytes_of(tensor), old)
