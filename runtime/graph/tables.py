"""CSV and Parquet tables in chunks of columns, with bounded memory.

CSV is read by pyarrow where it is installed and by NumPy otherwise (slower, numbers only); Parquet
needs pyarrow.
"""

import gzip
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.reading import reading
from runtime.graph.staging import ArrayWriter
from runtime.graph.validate import check_range

Chunk = dict[str, NDArray[Any]]
BLOCK_BYTES = 1 << 24
ROWS_PER_CHUNK = 1 << 18
_END_WORDS = "src dst source target from to u v src_id dst_id source_id target_id destination"
_VALUE_WORDS = "weight edge_weight type edge_type id node node_id label y class split"
HEADER_WORDS = frozenset(f"{_END_WORDS} {_VALUE_WORDS}".split())
"""Column names that make a first line of text a header even over rows of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvLayout:
    """How a text table is written."""

    delimiter: str
    skip_lines: int
    """Comment and header lines before the first row."""
    columns: list[str]
    """Names from the header, or c0, c1 ..."""
    has_header: bool


def table_chunks(path: Path, *, header: bool | None = None) -> Iterator[Chunk]:
    """Chunks of the columns of a table, in file order.

    Args:
        path: .parquet, or text (csv, tsv, space separated; may be gzipped). Lines that start with
            `#` or `%` at the top are comments.
        header: whether the first line names the columns; found out by looking if None.

    Raises:
        DatasetError: damaged, ragged, or Parquet without pyarrow.
    """
    if path.name.endswith(".parquet"):
        yield from _parquet_chunks(path)
        return
    layout = sniff(path, header)
    if layout is None:
        return
    chunks = _arrow_csv(path, layout) if _has_arrow() else _numpy_csv(path, layout)
    iterator = iter(chunks)
    while True:
        with reading(path, f"a table of {len(layout.columns)} columns"):
            chunk = next(iterator, None)
        if chunk is None:
            return
        yield chunk


def sniff(path: Path, header: bool | None = None) -> CsvLayout | None:
    """Look at the first lines of a text table; None where it has no rows."""
    with reading(path, "a text table"), _open_text(path) as file:
        skipped = 0
        for line in file:
            if line.strip() and line[0] not in "#%":
                break
            skipped += 1
        else:
            return None
        delimiter = next((d for d in (",", "\t", ";") if d in line), " ")
        cells = [c.strip().strip('"') for c in line.strip().split(delimiter)]
        second = next(file, "").strip().split(delimiter)
        named = _looks_named(cells, second) if header is None else header
        names = cells if named else [f"c{i}" for i in range(len(cells))]
        if len(set(names)) != len(names):
            raise DatasetError(f"{path}: expected different column names, found {names!s:.120}")
    return CsvLayout(
        delimiter=delimiter, skip_lines=skipped + named, columns=names, has_header=named
    )


def number_table(path: Path, target: Path, dtype: Any) -> NDArray[Any]:
    """Stream a headerless table of numbers into a .npy file and map it: [rows, columns].

    Integer types take whole numbers only; empty and `nan` cells become NaN of float types.

    Raises:
        DatasetError: damaged, ragged, or cells that are no such numbers.
    """
    layout = sniff(path, header=False)
    if layout is None:
        return np.empty((0, 0), dtype)
    with ArrayWriter(target, dtype, (len(layout.columns),)) as writer:
        for chunk in table_chunks(path, header=False):
            columns = [as_numbers(path, values, dtype) for values in chunk.values()]
            writer.append(np.stack(columns, axis=1))
    return np.asarray(np.load(target, mmap_mode="r"))


def as_numbers(path: Path, values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """A column as numbers of a type, refusing what would be changed silently."""
    wanted = np.dtype(dtype)
    if values.dtype.kind not in "fiub":
        raise DatasetError(f"{path}: expected numbers, found {values[:1]!s:.80}")
    if wanted.kind in "iu":
        if values.dtype.kind == "f" and not (np.isfinite(values) & (values % 1 == 0)).all():
            raise DatasetError(f"{path}: expected whole numbers, found others")
        limits = np.iinfo(wanted)
        check_range(path, values, limits.min, limits.max + 1, "integers")
    with np.errstate(over="ignore"):
        return values.astype(wanted)


def _looks_named(first: list[str], second: list[str]) -> bool:
    """Whether the first line names columns: all text, and either known words or over numbers."""
    if any(_is_number(cell) for cell in first):
        return False
    known = any(cell.lower() in HEADER_WORDS for cell in first)
    return known or any(_is_number(cell.strip().strip('"')) for cell in second)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _has_arrow() -> bool:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _open_text(path: Path) -> io.TextIOWrapper:
    if path.name.endswith(".gz"):
        return io.TextIOWrapper(gzip.GzipFile(path), encoding="utf-8")
    return io.TextIOWrapper(path.open("rb"), encoding="utf-8")


def _arrow_csv(path: Path, layout: CsvLayout) -> Iterator[Chunk]:
    import pyarrow.csv as pc

    read = pc.ReadOptions(
        use_threads=False,
        block_size=BLOCK_BYTES,
        skip_rows=layout.skip_lines,
        column_names=layout.columns,
    )
    parse = pc.ParseOptions(delimiter=layout.delimiter)
    with pc.open_csv(path, read_options=read, parse_options=parse) as reader:
        for batch in reader:
            yield {name: _plain(batch.column(name)) for name in layout.columns}


def _numpy_csv(path: Path, layout: CsvLayout) -> Iterator[Chunk]:
    with _open_text(path) as file:
        lines = itertools.islice(file, layout.skip_lines, None)
        while rows := list(itertools.islice(lines, ROWS_PER_CHUNK)):
            delimiter = None if layout.delimiter == " " else layout.delimiter
            width = len(layout.columns)
            try:
                table = np.loadtxt(rows, np.int64, delimiter=delimiter, ndmin=2)
            except ValueError:
                table = np.loadtxt(rows, np.float64, delimiter=delimiter, ndmin=2)
            if table.shape[1] != width:
                raise DatasetError(
                    f"{path}: expected {width} columns, found {table.shape[1]}; tables with text "
                    "need pyarrow (pip install 'gnnplan[parquet]')"
                )
            yield {name: table[:, i] for i, name in enumerate(layout.columns)}


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
    if not _has_arrow():
        raise DatasetError(
            f"{path}: reading Parquet needs pyarrow; install it with pip install 'gnnplan[parquet]'"
        )
    import pyarrow.parquet as pq

    with reading(path, "a Parquet table"):
        file = pq.ParquetFile(path)
    with file:
        batches = file.iter_batches(ROWS_PER_CHUNK, use_threads=False)
        while True:
            with reading(path, "a Parquet table"):
                batch = next(batches, None)
                if batch is None:
                    return
                names = batch.schema.names
                chunk = {name: _plain(batch.column(i)) for i, name in enumerate(names)}
            yield chunk


def _plain(column: Any) -> NDArray[Any]:
    """An arrow column as numbers (empty cells become NaN) or as fixed-width text."""
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind != "O":
        return values
    if not any(value is not None for value in values[:1]) and column.null_count == len(column):
        return np.full(len(column), np.nan)
    return np.array(["" if v is None else str(v) for v in values.tolist()], dtype=np.str_)
