"""Adding weighted rows into rows that hold something already."""

from typing import Any, no_type_check

import numba
import numpy as np

from runtime.sampling.intrinsics import prefetch_read

_jit: Any = numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
_AHEAD = 16
"""Edges between the row being added and the row being prefetched, as in `models.kernels`."""
_LINE = 16


@_jit
@no_type_check
def add_rows(indptr, indices, weight, x, out):
    """out[i, :d] += sum_e w_e x[indices[e]]; the columns of out beyond d stay."""
    width = x.shape[1]
    last_edge = indices.shape[0]
    for i in range(indptr.shape[0] - 1):
        row = out[i]
        for e in range(indptr[i], indptr[i + 1]):
            ahead = e + _AHEAD
            if ahead < last_edge and width > 0:
                start = np.int64(indices[ahead]) * width
                for c in range(0, width, _LINE):
                    prefetch_read(x, start + c)
                prefetch_read(x, start + width - 1)
            w, source = weight[e], x[indices[e]]
            for c in range(width):
                row[c] += w * source[c]
