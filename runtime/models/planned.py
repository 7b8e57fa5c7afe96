"""Run an unmodified PyG model on rectangular blocks: one opt-in line.

    model = planned(model)                    # 1. wrap
    for batch in loader:                      #    PlannedLoader, either kind of batch
        out = model(batch)                    # 2. was model(batch.x, batch.edge_index)
        y = batch.y[: len(out)]               # 3. out holds the seeds' rows alone
        ...

A model with forward(x, edge_index) computes every layer for every vertex of the batch, although
layer l is needed only for those within L - l hops of the seeds. Here each convolution, in the order
of calls, gets the block of its layer: SAGEConv, GCNConv and GATConv in their plain forms run on the
kernels of `layers`, any other as conv((x, x[:num_dst]), edge_index).

What the model does between convolutions may depend on all rows, as batch norm and residuals do. So
the first batch runs both ways, in evaluation mode and in training mode without dropout. Where
outputs differ, the model keeps running unchanged, with one warning. every_hop batches have no
edge_index for an unchanged run, hence no check.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.models.adjacency import TorchBlock, torch_blocks
from gnnplan.runtime.models.weights import fill_weights
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch


def minibatch_of(data: Any) -> MiniBatch:
    """Return the nested blocks behind a first_seen PyG batch.

    `data` has x, edge_index, num_sampled_nodes and num_sampled_edges as of NeighborLoader: vertices
    and edges by hop, an edge's hop being that of its destination.
    """
    if any(
        getattr(data, name, None) is None for name in ("num_sampled_nodes", "num_sampled_edges")
    ):
        raise InputError(
            "planned: expected a batch with num_sampled_nodes and num_sampled_edges, found none; "
            "use PlannedLoader or NeighborLoader"
        )
    if getattr(data, "weights_of_sampler", False):
        raise InputError(
            "planned: expected edges without a sampler's weights, which forward(x, edge_index) "
            "ignores, found some in edge_weight; use a built-in model with this sampler"
        )
    nodes, edges = np.cumsum(data.num_sampled_nodes), np.cumsum(data.num_sampled_edges)
    source, target = data.edge_index.cpu().numpy()
    if np.any(target[1:] < target[:-1]):
        order = np.argsort(target, kind="stable")
        source, target = source[order], target[order]
    starts = np.searchsorted(target, np.arange(nodes[-2] + 1))
    if not np.array_equal(starts[nodes[:-1]], edges):
        raise InputError("planned: expected edges by the hop of their destination (first_seen)")
    indices = source.astype(np.int32)
    blocks = [
        Block(
            num_src=int(nodes[hop + 1]),
            num_dst=int(nodes[hop]),
            indptr=starts[: nodes[hop] + 1],
            indices=indices[: edges[hop]],
        )
        for hop in reversed(range(len(edges)))
    ]
    n_id = getattr(data, "n_id", None)
    n_id = np.arange(nodes[-1]) if n_id is None else n_id.cpu().numpy()
    return MiniBatch(
        blocks=blocks,
        n_id=n_id,
        seeds=n_id[: nodes[0]],
        input_id=np.arange(nodes[0]),
        dialect=Dialect.FIRST_SEEN,
        num_sampled_nodes=list(data.num_sampled_nodes),
        num_sampled_edges=list(data.num_sampled_edges),
        x=data.x,
    )


TOLERANCE = 1e-4
"""Largest difference between both ways, relative to 1 + the largest output."""
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, InputError)
"""Errors of a model that meets rows or arguments that it was not written for."""


class _UnusualError(InputError):
    """Says that blocks cannot follow the way in which the model calls its convolutions."""


@dataclass(kw_only=True)
class _Run:
    """One forward pass over blocks."""

    x: Tensor
    edge_index: Tensor
    blocks: list[TorchBlock]
    gcn_blocks: list[TorchBlock]
    """Blocks with PyG's weights of the sampled subgraph; empty where no layer needs them."""
    calls: int = 0


class Planned(nn.Module):
    """A PyG model on rectangular blocks; made by `planned`.

    Attributes:
        model: the wrapped model, which owns the parameters and the state dictionary.
        uses_blocks: True or False once the first batch has decided, None before.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.uses_blocks: bool | None = None
        self._warned_of_weights = False
        self._convs = list(dict.fromkeys(_convolutions(model)))
        if not self._convs:
            raise InputError(
                "planned: expected a model with torch_geometric convolutions, found none"
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped model's state."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the wrapped model's state."""
        return self.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Rename what `state_dict` wrote, where a module around this one loads its own state."""
        mine = [name for name in state_dict if name.startswith(prefix)]
        inside = {f"{prefix}model.{n.removeprefix(prefix)}": state_dict.pop(n) for n in mine}
        state_dict.update(inside)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, batch: Any) -> Tensor:
        """Compute the outputs of the seeds, (num_seeds, out).

        Args:
            batch: a MiniBatch whose `x` is filled, or PyG Data as NeighborLoader and PlannedLoader
                give it (x, edge_index, num_sampled_nodes, num_sampled_edges).

        Raises:
            InputError: weighted blocks, a batch that ranks share or without sampled counts, or an
                every_hop batch with a model that blocks cannot follow.
        """
        sampled = batch if isinstance(batch, MiniBatch) else minibatch_of(batch)
        if getattr(batch, "edge_weight", None) is not None and not self._warned_of_weights:
            self._warned_of_weights = True
            warnings.warn(
                "planned: the batch's edge_weight is not used: forward(x, edge_index) is called "
                "without it; leave the model unwrapped to give it edge weights",
                UserWarning,
                stacklevel=2,
            )
        if sampled.exchanges:
            raise InputError(
                "planned: expected a batch of this rank alone, found one that ranks share, whose "
                "layers exchange rows; plan with --batching independent"
            )
        if any(block.weight is not None for block in sampled.blocks):
            raise InputError(
                "planned: expected blocks without weights, which forward(x, edge_index) ignores, "
                "found weighted ones; use a built-in model with this sampler"
            )
        run = self._run_of(sampled)
        if sampled.dialect != Dialect.FIRST_SEEN:
            return self._on_blocks_or_refuse(run)
        if self.uses_blocks is None and sampled.num_edges:
            self.uses_blocks = self._check(run)
        if self.uses_blocks:
            return self._on_blocks(run)
        return self._unchanged(run)

    def _run_of(self, batch: MiniBatch) -> _Run:
        from torch_geometric.nn import GCNConv

        device = batch.x.device
        blocks = [block.to(device) for block in torch_blocks(batch)]
        gcn_blocks: list[TorchBlock] = []
        if any(isinstance(conv, GCNConv) for conv in self._convs):
            weighted = fill_weights(replace(batch), Workload(model="gcn", gcn_norm="sampled"))
            gcn_blocks = [block.to(device) for block in torch_blocks(weighted)]
        edge_index = blocks[0].edge_index()
        return _Run(x=batch.x, edge_index=edge_index, blocks=blocks, gcn_blocks=gcn_blocks)

    def _unchanged(self, run: _Run) -> Tensor:
        return self.model(run.x, run.edge_index)[: run.blocks[-1].num_dst]

    def _on_blocks(self, run: _Run) -> Tensor:
        run.calls = 0
        with ExitStack() as stack:
            for conv in self._convs:
                stack.enter_context(_swapped_forward(conv, run))
            out = self.model(run.x, run.edge_index)
        if run.calls != len(run.blocks):
            raise _UnusualError(f"{run.calls} convolutions ran over {len(run.blocks)} sampled hops")
        return out

    def _on_blocks_or_refuse(self, run: _Run) -> Tensor:
        try:
            return self._on_blocks(run)
        except _UnusualError as error:
            raise InputError(
                f"planned: this model cannot run on every_hop blocks ({error}); sample with the "
                "first_seen dialect"
            ) from None

    def _check(self, run: _Run) -> bool | None:
        """Return whether blocks give the model's own outputs in both modes; None: not known yet."""
        if any(is_lazy(parameter) for parameter in self.model.parameters()):
            return None  # the first run makes them, with the same draws as unwrapped
        why = None
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules()):
            why = "SyncBatchNorm takes its statistics from all rows of all ranks"
        padded = _with_more_rows(run)
        for training in (False, True):
            if why is None:
                try:
                    expected = self._tried(self._unchanged, padded, training)
                except _FAILURES:
                    return None  # for example one row alone, which batch norm refuses
                why = self._difference(expected, padded, training)
        if why is not None:
            warnings.warn(
                f"planned: {type(self.model).__name__} runs unchanged, on all sampled vertices, "
                f"because blocks give another result: {why}",
                UserWarning,
                stacklevel=4,
            )
        return why is None

    def _tried(self, forward: Callable[[_Run], Tensor], run: _Run, training: bool) -> Tensor:
        """Run in a mode without a trace in the model or in any random state."""
        with torch.no_grad(), _as_it_was(self.model, run.x.device), _NoDropout():
            self.model.train(training)
            return forward(run)

    def _difference(self, expected: Tensor, run: _Run, training: bool) -> str | None:
        try:
            found = self._tried(self._on_blocks, run, training)
        except _FAILURES as error:
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        if found.shape != expected.shape:
            return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
        largest = float((found - expected).abs().max()) if found.numel() else 0.0
        allowed = TOLERANCE * (1 + float(expected.abs().max())) if found.numel() else 0.0
        mode = "training" if training else "evaluation"
        # Written so that NaN counts as a difference.
        return None if largest <= allowed else f"outputs differ by {largest:.2g} in {mode} mode"


def _with_more_rows(run: _Run) -> _Run:
    """Add a quarter more sources without edges, so that every layer's block leaves out rows."""
    more = run.x.shape[0] // 4 + 1
    x = torch.cat([run.x, run.x[:1].expand(more, *run.x.shape[1:])])

    def padded(blocks: list[TorchBlock]) -> list[TorchBlock]:
        return [replace(b, num_src=b.num_src + more) for b in blocks[:1]] + blocks[1:]

    return replace(run, x=x, blocks=padded(run.blocks), gcn_blocks=padded(run.gcn_blocks))


def planned(model: nn.Module) -> Planned:
    """Wrap a PyG model so that it runs on rectangular blocks, as model(batch).

    `model` has forward(x, edge_index) and calls one convolution per sampled hop, in order; a model
    without any raises InputError. Its parameters stay its own, so any optimiser of them serves.
    """
    return Planned(model)


def _convolutions(module: nn.Module) -> Iterator[nn.Module]:
    """List the outermost message-passing layers, in order of definition."""
    from torch_geometric.nn import MessagePassing

    if isinstance(module, MessagePassing):
        yield module
        return
    for child in module.children():
        yield from _convolutions(child)


@contextmanager
def _swapped_forward(conv: nn.Module, run: _Run) -> Iterator[None]:
    """Let the convolution compute its layer's block for one forward pass."""
    original, own = conv.forward, vars(conv).get("forward")

    def forward(x: Any, edge_index: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        block = _next_block(run, x, edge_index, [*args, *kwargs.values()])
        return _convolve(conv, original, x, block, run)

    conv.forward = forward
    try:
        yield
    finally:
        if own is None:
            del conv.forward
        else:
            conv.forward = own


def _next_block(run: _Run, x: Any, edge_index: Any, others: list[Any]) -> TorchBlock:
    if run.calls >= len(run.blocks):
        raise _UnusualError(f"more convolutions than the {len(run.blocks)} sampled hops")
    block = run.blocks[run.calls]
    if edge_index is not run.edge_index:
        raise _UnusualError("a convolution gets another edge_index than the batch's")
    if any(other is not None for other in others):
        raise _UnusualError("a convolution gets further arguments")
    if not isinstance(x, Tensor) or x.shape[0] != block.num_src:
        raise _UnusualError("a convolution gets other rows than those of its block")
    return block


def _convolve(
    conv: nn.Module, original: Callable[..., Tensor], x: Tensor, block: TorchBlock, run: _Run
) -> Tensor:
    from torch_geometric.nn import GCNConv

    from gnnplan.runtime.models.build import apply_conv, supports

    layer = run.calls
    run.calls += 1
    if not supports(conv):
        return original((x, x[: block.num_dst]), block.edge_index())
    return apply_conv(conv, x, run.gcn_blocks[layer] if isinstance(conv, GCNConv) else block)


@contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back every module's mode, buffers and tensor attributes, and all random states."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [
        (holder, name, value, value.clone())
        for module in model.modules()
        for holder in (module._buffers, vars(module))
        for name, value in holder.items()
        if isinstance(value, Tensor)
    ]
    draws = random.getstate(), np.random.get_state()  # noqa: NPY002 - the models' own draws
    try:
        with torch.random.fork_rng(processor_of(device).random_devices):
            yield
    finally:
        random.setstate(draws[0])
        np.random.set_state(draws[1])  # noqa: NPY002
        for module, training in modes:
            module.training = training
        for holder, name, value, before in kept:
            value.copy_(before)
            holder[name] = value


class _NoDropout(TorchFunctionMode):
    """Makes dropout keep everything, so that two runs in training mode can be compared."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "dropout" in getattr(func, "__name__", "") and func is not torch.native_dropout:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)
