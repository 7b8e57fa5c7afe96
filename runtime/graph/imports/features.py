"""Storing features: dense, CSR, or projected onto fewer columns.

The projection is the very sparse random projection of Li, Hastie and Church, "Very sparse random
projections" (KDD 2006): x' = x R with R of shape [source_dim, D], entries independently
+-1 / sqrt(density D) with probability density / 2 each and 0 else, density = 1 / sqrt(source_dim).
Then E[x' . y'] = x . y. R follows from the seed alone and is recorded in graph.json.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.format import (
    CHUNK_BYTES,
    Projection,
    chunks,
    convert_rows,
    count_overflows,
    row_dtype,
)
from gnnplan.runtime.graph.imports.source import (
    ImportOptions,
    RawFeatures,
    RawGraph,
    memory_bytes,
    parse_feature_choice,
)
from gnnplan.runtime.graph.staging import Staging

DEFAULT_PROJECTION = 256


def write_features(
    raw: RawGraph, staging: Staging, options: ImportOptions, ram_bytes: int | None = None
) -> dict[str, Any]:
    """Write the features in the chosen storage; return the graph.json fields that say so.

    Each decision that is not the user's adds a note to `raw`. Dense features are held against
    `ram_bytes` of memory, None for this machine's.
    """
    source = raw.features
    choice, width = parse_feature_choice(options.features)
    if raw.tables:
        return _write_tables(raw, choice, staging, options)
    if source is None and options.draws:
        return _draw(raw, staging, options, memory_bytes() if ram_bytes is None else ram_bytes)
    if source is None or choice == "none":
        return _declare(options)
    if source.num_rows != raw.num_nodes:
        raise DatasetError(
            f"features: expected one row per node ({raw.num_nodes}), found {source.num_rows}"
        )
    _check_numeric(source)
    if choice == "auto":
        ram = memory_bytes() if ram_bytes is None else ram_bytes
        choice, width = _choose_storage(raw, source, ram)
    if options.feature_dtype == "bfloat16":
        _say_rounded(raw, choice)
    if choice == "project":
        return _project(source, width, staging, options.seed)
    return _store(source, choice, staging, _stored_type(source, options))


def _draw(raw: RawGraph, staging: Staging, options: ImportOptions, ram: int) -> dict[str, Any]:
    """Draw features that mean nothing, or declare them alone where they are many."""
    width, name = options.feature_dim, _drawn_type(options)
    dtype = row_dtype(name)
    size = dtype.itemsize * raw.num_nodes * width
    if options.features == "auto" and 4 * size > ram:
        raw.notes.append(
            f"features: none in the source: {width} columns are declared, to plan with, and not "
            f"drawn: {size / 1e9:.1f} GB are more than a quarter of {ram / 1e9:.1f} GB of memory "
            "(--features dense draws them)"
        )
        return _declare(options)
    rng = np.random.default_rng([options.seed, 5])
    table = staging.create("x", dtype, (width,))
    step = max(1, CHUNK_BYTES // (4 * width))
    for start in range(0, raw.num_nodes, step):
        rows = min(step, raw.num_nodes - start)
        table.append(convert_rows(rng.standard_normal((rows, width), np.float32), dtype))
    table.close()
    rounded = "" if name == "float32" else f", rounded to {name}"
    raw.notes.append(
        f"features: none in the source: {width} columns of normal noise (seed {options.seed}"
        f"{rounded}) stand for them, to plan and to time; --features none declares the width alone"
    )
    return {"feature_dim": width, "feature_storage": "dense", "feature_dtype": name}


def _declare(options: ImportOptions) -> dict[str, Any]:
    """Return the fields of a graph without features, perhaps with the width and type of some."""
    facts: dict[str, Any] = {"feature_dim": options.feature_dim, "feature_storage": "none"}
    if options.feature_dim == 0:
        return facts
    name = _drawn_type(options)
    if name == "bfloat16":
        raise _no_bfloat16("none")
    return facts | {"feature_dtype": name}


def _drawn_type(options: ImportOptions) -> str:
    """Return the type of features that no source has."""
    return "float32" if options.feature_dtype == "keep" else options.feature_dtype


def _say_rounded(raw: RawGraph, choice: str) -> None:
    """Add a note that values are rounded to bfloat16; refuse storage that is never read so."""
    if choice != "dense":
        raise _no_bfloat16(choice)
    raw.notes.append(
        "features: rounded to bfloat16, 2 bytes a value: 8 binary digits, off by 1 part in 256 at "
        "most"
    )


def _no_bfloat16(found: str) -> DatasetError:
    return DatasetError(
        f"features: expected dense ones for type bfloat16, found {found}; import with "
        "--features dense, or in float32"
    )


def _check_numeric(source: RawFeatures) -> None:
    if source.dim < 1 or source.dtype.kind not in "fiub":
        raise DatasetError(
            f"features: expected at least one numeric column, found {source.dim} of {source.dtype}"
        )


def _write_tables(
    raw: RawGraph, choice: str, staging: Staging, options: ImportOptions
) -> dict[str, Any]:
    """Write a table of features for each node type, all of one type of number."""
    if choice not in ("auto", "dense"):
        raise DatasetError(
            f"features: expected auto or dense for a graph of several node types, found {choice}"
        )
    if options.feature_dtype == "bfloat16":
        raise DatasetError(
            "features: expected float32 or float16 for a graph of several node types, whose rows "
            "in bfloat16 are not built, found bfloat16"
        )
    for table in raw.tables.values():
        _check_numeric(table)
    dtypes = [_stored_type(table, options) for table in raw.tables.values()]
    dtype = dtypes[0] if len(set(dtypes)) == 1 else "float32"
    for name, table in raw.tables.items():
        _store(table, "dense", staging, dtype, f"x_{name}")
    return {
        "feature_dim": max(table.dim for table in raw.tables.values()),
        "feature_storage": "typed",
        "feature_dtype": dtype,
        "node_types": list(raw.tables),
        "edge_types": raw.edge_types,
    }


def _store(
    source: RawFeatures, choice: str, staging: Staging, dtype: str, name: str = "x"
) -> dict[str, Any]:
    if choice == "sparse":
        _write_sparse(source, staging, dtype)
    else:
        table = staging.create(name, row_dtype(dtype), (source.dim,))
        for rows in _row_chunks(source, source.dim):
            table.append(_cast(source, rows.toarray() if sp.issparse(rows) else rows, dtype))
        table.close()
    return {"feature_dim": source.dim, "feature_storage": choice, "feature_dtype": dtype}


def projection_matrix(source_dim: int, target_dim: int, seed: int) -> tuple[Any, Projection]:
    """Return R, a CSR matrix of float32 [source_dim, target_dim], and the record of its making."""
    density = 1 / math.sqrt(source_dim)
    rng = np.random.default_rng([seed, source_dim, target_dim])
    scale = np.float32(1 / math.sqrt(density * target_dim))
    rows_per_chunk = max(1, (1 << 22) // target_dim)
    parts: list[Any] = []
    for start in range(0, source_dim, rows_per_chunk):
        shape = (min(rows_per_chunk, source_dim - start), target_dim)
        draws = rng.random(shape, dtype=np.float32)
        signs = np.where(draws < density / 2, scale, np.float32(0))
        signs[(draws >= density / 2) & (draws < density)] = -scale
        parts.append(sp.csr_matrix(signs))
    record = Projection(source_dim=source_dim, target_dim=target_dim, seed=seed, density=density)
    return sp.vstack(parts, format="csr"), record


def _row_chunks(source: RawFeatures, width: int) -> Iterator[Any]:
    """Yield the source's rows, dense or as CSR matrices, as many as fit `width` columns."""
    step = max(1, CHUNK_BYTES // (4 * width))
    for start in range(0, source.num_rows, step):
        if source.dense is not None:
            yield source.dense[start : start + step]
        else:
            yield _csr_rows(source, start, start + step)


def _choose_storage(raw: RawGraph, source: RawFeatures, ram: int) -> tuple[Any, int]:
    dense = 4 * source.num_rows * source.dim
    if 4 * dense <= ram or source.dim <= DEFAULT_PROJECTION:
        return "dense", 0
    raw.notes.append(
        f"features: {source.dim} dense columns would take {dense / 1e9:.1f} GB, more than a "
        f"quarter of {ram / 1e9:.1f} GB of memory: projected to {DEFAULT_PROJECTION} columns "
        "(--features dense or sparse keeps all)"
    )
    return "project", DEFAULT_PROJECTION


def _stored_type(source: RawFeatures, options: ImportOptions) -> str:
    if options.feature_dtype == "keep":
        return "float16" if source.dtype == np.float16 else "float32"
    return options.feature_dtype


def _cast(source: RawFeatures, values: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        first = "float32" if dtype == "bfloat16" else dtype
        out = values.astype(first, copy=False)
    if dtype == "float16" and not np.array_equal(
        out.astype(np.float64), values.astype(np.float64), equal_nan=True
    ):
        raise DatasetError(
            "features: expected values that float16 holds exactly, found others; "
            "import with feature type float32"
        )
    if first == "float32" and count_overflows(values, out):
        raise _beyond_float32(source)
    return convert_rows(out, row_dtype(dtype))


def _beyond_float32(source: RawFeatures) -> DatasetError:
    most = float(np.finfo(np.float32).max)
    table = np.asarray(source.dense if source.csr is None else source.csr.data)
    count = sum(int(((abs(p) > most) & np.isfinite(p)).sum()) for p in chunks(table))
    return DatasetError(
        f"features: expected values that float32 holds, found {count} of {table.size} beyond "
        f"{most:.2g}; scale them in the source"
    )


def _csr_rows(source: RawFeatures, start: int, stop: int) -> Any:
    csr = source.csr
    if csr is None:
        raise ValueError("the source is not sparse")
    pointers = csr.indptr[start : stop + 1]
    part = slice(int(pointers[0]), int(pointers[-1]))
    data = csr.data[part]
    wide = np.float64 if data.dtype == np.float64 else np.float32
    shape = (len(pointers) - 1, source.dim)
    return sp.csr_matrix((data.astype(wide), csr.indices[part], pointers - pointers[0]), shape)


def _write_sparse(source: RawFeatures, staging: Staging, dtype: str) -> None:
    pointers = staging.create("x_indptr", np.int64)
    columns = staging.create("x_indices", np.int32)
    values = staging.create("x_data", dtype)
    pointers.append(np.zeros(1, np.int64))
    total = 0
    for rows in _row_chunks(source, source.dim):
        if not sp.issparse(rows):
            rows = sp.csr_matrix(_cast(source, rows, dtype))
        pointers.append(total + rows.indptr[1:].astype(np.int64))
        columns.append(rows.indices)
        values.append(_cast(source, rows.data, dtype))
        total += int(rows.indptr[-1])
    for writer in (pointers, columns, values):
        writer.close()


def _project(source: RawFeatures, width: int, staging: Staging, seed: int) -> dict[str, Any]:
    R, record = projection_matrix(source.dim, width, seed)
    table = staging.create("x", np.float32, (width,))
    for rows in _row_chunks(source, max(width, source.dim if source.csr is None else width)):
        if sp.issparse(rows):
            rows.data = _cast(source, rows.data, "float32")
            out = (rows @ R).toarray()
        else:
            rows = np.ascontiguousarray(_cast(source, rows, "float32"))
            out = (R.T @ rows.T).T
        _refuse_sums(rows, out)
        table.append(out)
    table.close()
    return {"feature_dim": width, "feature_storage": "dense", "projection": record}


def _refuse_sums(rows: Any, projected: NDArray[np.float32]) -> None:
    lost = ~np.isfinite(projected).all(axis=1)
    if not lost.any():
        return
    own = np.asarray(
        abs(rows[lost]).max(axis=1).todense() if sp.issparse(rows) else abs(rows[lost])
    )
    lost = np.isfinite(own).all(axis=1)
    if lost.any():
        raise DatasetError(
            f"features: expected projections that float32 holds, found {int(lost.sum())} rows "
            "with sums beyond it; scale them in the source or import with --features dense"
        )
