"""Section 4 of the formulas written down in scipy.sparse: what the stacked kernels are tested by.

Sampler matrices, products and extraction are literal. Only the draws come from numpy's generator,
so that samples agree with the kernels in law, not in bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Matrix = Any
"""A scipy.sparse.csr_matrix, whose stubs know little of its operators."""


def adjacency(indptr: NDArray[np.integer], indices: NDArray[np.integer]) -> Matrix:
    """A, float64 [N, N]; row u lists the vertices that u aggregates from. Parallel edges add up."""
    n = indptr.shape[0] - 1
    return sparse.csr_matrix((np.ones(indices.shape[0]), indices, indptr), shape=(n, n))


def rows_of_ones(rows: Sequence[NDArray[np.int64]], n: int) -> Matrix:
    """A matrix whose row b has ones at the columns rows[b]."""
    indptr = np.concatenate([[0], np.cumsum([row.shape[0] for row in rows])])
    cols = np.concatenate(rows)
    return sparse.csr_matrix((np.ones(cols.shape[0]), cols, indptr), shape=(len(rows), n))


def layer_probabilities(adj: Matrix, q: Matrix, method: str, norm: str) -> Matrix:
    """P = NORM(QA) for `ladies`; for `fastgcn` the same row for all; float64 [k, N]."""
    if method == "fastgcn":
        row = adj.multiply(adj).sum(axis=0)
        p = sparse.csr_matrix(np.repeat(np.asarray(row), q.shape[0], axis=0))
    elif norm == "count2":
        p = (q @ adj).power(2)
    else:
        p = q @ adj.power(2)
    total = np.asarray(p.sum(axis=1)).ravel()
    scale = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
    return sparse.csr_matrix(sparse.diags_array(scale) @ p)


def its_sample(p: Matrix, size: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """ITS without replacement, row by row: duplicates are discarded until there are `size`."""
    chosen = []
    for b in range(p.shape[0]):
        row, cols = p.data[p.indptr[b] : p.indptr[b + 1]], p.indices[p.indptr[b] : p.indptr[b + 1]]
        cols, row = cols[row > 0], row[row > 0]
        picked = np.arange(cols.shape[0]) if cols.shape[0] <= size else np.empty(0, dtype=np.int64)
        prefix = np.cumsum(row)
        while picked.shape[0] < min(size, cols.shape[0]):
            darts = np.searchsorted(prefix, rng.random(size) * prefix[-1], side="right")
            every = np.concatenate([picked, np.minimum(darts, cols.shape[0] - 1)])
            _, first = np.unique(every, return_index=True)
            picked = every[np.sort(first)[:size]]
        chosen.append(np.sort(cols[picked]).astype(np.int64))
    return chosen


def extract_layer(
    adj: Matrix, dst: Sequence[NDArray[np.int64]], drawn: Sequence[NDArray[np.int64]]
) -> Matrix:
    """A_l = Q_R A Q_C of all batches: [sum of destinations, sum of drawn], block diagonal."""
    n, k = adj.shape[0], len(dst)
    nodes = np.concatenate(dst)
    q_r = rows_of_ones([nodes[i : i + 1] for i in range(nodes.shape[0])], n)
    product = sparse.coo_matrix(q_r @ adj)
    batch = np.repeat(np.arange(k), [ids.shape[0] for ids in dst])
    expanded = sparse.csr_matrix(
        (product.data, (product.row, product.col + n * batch[product.row].astype(np.int64))),
        shape=(nodes.shape[0], k * n),
    )
    cols = np.concatenate([ids + n * b for b, ids in enumerate(drawn)])
    q_c = sparse.csc_matrix(
        (np.ones(cols.shape[0]), cols, np.arange(cols.shape[0] + 1)),
        shape=(k * n, cols.shape[0]),
    )
    return sparse.csr_matrix(expanded @ q_c)


def sample_layers_reference(
    adj: Matrix,
    sizes: Sequence[int],
    seeds: Sequence[NDArray[np.int64]],
    *,
    method: str = "ladies",
    norm: str = "fro",
    rng: np.random.Generator,
) -> list[tuple[list[NDArray[np.int64]], Matrix]]:
    """Layers of all batches, next to the seeds first: what was drawn per batch, and A_l."""
    dst, layers = list(seeds), []
    for size in sizes:
        p = layer_probabilities(adj, rows_of_ones(dst, adj.shape[0]), method, norm)
        drawn = its_sample(p, size, rng)
        layers.append((drawn, extract_layer(adj, dst, drawn)))
        dst = [
            np.concatenate([ids, np.setdiff1d(new, ids)])
            for ids, new in zip(dst, drawn, strict=True)
        ]
    return layers
