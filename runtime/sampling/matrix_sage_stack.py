"""All layers of stacked GraphSAGE batches, in both dialects."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.matrix_extract import StackedBlocks
from runtime.sampling.matrix_memory import Ledger
from runtime.sampling.matrix_sage import expand_layer, nested, padded, step_streams
from runtime.sampling.matrix_stack import Request, as_batch, forget_nodes, stack_seeds, unstack
from runtime.sampling.matrix_table import Table
from runtime.sampling.minibatch import Block, Dialect, MiniBatch
from runtime.sampling.rng import Purpose


class SageStack:
    """Samples stacks of batches with uniform neighbours.

    Args:
        indptr: int64 [N + 1], plain and read-only.
        indices: int32 or int64 [E].
        fanouts: Checked fan-outs.
        dialect: Which vertices a hop expands.
        seed: The run's seed.
        purpose: Stream of the draws.
        edge_ids: Fill each block's `e_id`.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: tuple[int, ...],
        *,
        dialect: Dialect,
        seed: int,
        purpose: Purpose,
        edge_ids: bool,
    ) -> None:
        self.indptr, self.indices, self.fanouts = indptr, indices, fanouts
        self.dialect, self.seed, self.purpose, self.edge_ids = dialect, seed, purpose, edge_ids
        self.num_nodes = int(indptr.shape[0]) - 1
        degrees = int(np.diff(indptr).max(initial=0)) if -1 in fanouts else 0
        self._widest = [degrees if fanout == -1 else fanout for fanout in fanouts]

    def sample(self, requests: Sequence[Request], table: Table, ledger: Ledger) -> list[MiniBatch]:
        """The batches of one stack."""
        epochs = np.array([request.epoch for request in requests], dtype=np.int64)
        steps = np.array([request.step for request in requests], dtype=np.int64)
        seeds, ends = stack_seeds(requests, self.num_nodes, table)
        nodes, starts = padded(seeds), ends[:-1]
        layers: list[StackedBlocks] = []
        row_starts: list[NDArray[np.int64]] = []
        for hop, fanout in enumerate(self.fanouts):
            layer = expand_layer(
                self.indptr, self.indices,
                step_streams(self.seed, epochs, steps, hop, self.purpose),
                fanout, (nodes, starts, ends), self._widest[hop], table, ledger,
                edge_ids=self.edge_ids,
            )  # fmt: skip
            if layers:
                forget_nodes(layers[-1], ledger)
            layers.append(layer)
            row_starts.append(starts)
            known = np.diff(ends)
            nodes, ends = layer.nodes, layer.ends
            starts = ends[:-1] + (known if self.dialect is Dialect.FIRST_SEEN else 0)
        if self.dialect is Dialect.EVERY_HOP:
            return unstack(layers, requests)
        return _unstack_nested(layers, row_starts, requests, ledger)


def _unstack_nested(
    layers: list[StackedBlocks],
    row_starts: list[NDArray[np.int64]],
    requests: Sequence[Request],
    ledger: Ledger,
) -> list[MiniBatch]:
    """The batches of a first_seen stack: all blocks of a batch are prefixes of one CSR."""
    ptr_ends, edge_ends, ptr, indices, e_id = nested(layers, row_starts, ledger)
    node_ends = [layers[0].dst_ends.tolist(), *(layer.ends.tolist() for layer in layers)]
    hop_edges = [layer.edge_ends.tolist() for layer in layers]
    ptr_list, edge_list = ptr_ends.tolist(), edge_ends.tolist()
    batches = []
    for b, request in enumerate(requests):
        drawn = [ends[b + 1] - ends[b] for ends in hop_edges]
        known = [ends[b + 1] - ends[b] for ends in node_ends]
        first, edge = ptr_list[b], edge_list[b]
        blocks, end = [], edge_list[b + 1]
        for hop in reversed(range(len(layers))):
            blocks.append(
                Block(
                    num_src=known[hop + 1],
                    num_dst=known[hop],
                    indptr=ptr[first : first + known[hop] + 1],
                    indices=indices[edge:end],
                    e_id=None if e_id is None else e_id[edge:end],
                )
            )
            end -= drawn[hop]
        n_id = layers[-1].nodes[node_ends[-1][b] : node_ends[-1][b + 1]]
        batches.append(as_batch(request, blocks, n_id, drawn, Dialect.FIRST_SEEN))
    return batches
