"""CSV and Parquet tables in chunks of columns, with bounded memory.

Both are read by pyarrow, which is imported on use: the other formats do without it.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.findings import check_range, count_overflows
from gnnplan.runtime.graph.imports.text_lines import BLOCK_BYTES, PlainLines, TextLayout, sniff
from gnnplan.runtime.graph.inventory import plain_name
from gnnplan.runtime.graph.reading import reading
from gnnplan.runtime.graph.staging import ArrayWriter

Chunk = dict[str, NDArray[Any]]
"""Columns by name: numbers [rows], lists of numbers [rows, width], words as Python objects (kind O;
`as_text` makes them an array of text), and of other types a void (kind V), which nothing reads."""
ROWS_PER_CHUNK = 1 << 18


def table_chunks(
    path: Path,
    *,
    header: bool | None = None,
    floats: Sequence[str] = (),
    notes: list[str] | None = None,
) -> Iterator[Chunk]:
    """Chunks of the columns of a table, in file order.

    Args:
        path: .parquet, or text (csv, tsv, blank separated; may be gzipped). Lines that start with
            `#` or `%` are comments: at the top, and among rows of numbers.
        header: whether the first line names the columns; found out by looking if None.
        floats: plain names of columns of a text table that are fractions even where the first rows
            are whole.
        notes: gets a line where comments were left out.

    Raises:
        DatasetError: damaged or ragged.
    """
    if path.name.endswith(".parquet"):
        yield from _parquet_chunks(path)
        return
    layout = sniff(path, header)
    if layout is None:
        return
    with reading(path, "a text table"):
        lines = PlainLines(path, layout)
    with lines:
        iterator = _csv_chunks(lines, layout, floats)
        while True:
            with reading(path, f"a table of {len(layout.columns)} columns"):
                chunk = next(iterator, None)
            if chunk is None:
                break
            yield chunk
    if notes is not None and lines.comments:
        notes.append(f"{path.name}: {lines.comments} comment lines (# or %) left out")


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
        out = values.astype(wanted)
    lost = count_overflows(values, out)
    if lost:
        raise DatasetError(
            f"{path}: expected numbers that {wanted} holds, found {lost} of {len(values)} beyond "
            f"{np.finfo(wanted).max:.2g}; scale them in the source"
        )
    return out


def as_text(values: NDArray[Any]) -> NDArray[Any]:
    """Words as an array of text without blanks around them; empty cells are empty words."""
    if values.dtype.kind != "O":
        return values
    words = ["" if value is None else str(value).strip() for value in values.tolist()]
    return np.array(words, dtype=np.str_)


def _csv_chunks(lines: PlainLines, layout: TextLayout, floats: Sequence[str]) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.csv as pc

    read = pc.ReadOptions(
        use_threads=False,
        block_size=BLOCK_BYTES,
        skip_rows=int(layout.has_header),
        column_names=layout.columns,
    )
    parse = pc.ParseOptions(delimiter=layout.delimiter)
    wide = {
        name: pa.float64()
        for name, numbers in zip(layout.columns, layout.numbers, strict=True)
        if plain_name(name) in floats and numbers
    }
    convert = pc.ConvertOptions(column_types=wide)
    stream = io.BufferedReader(lines, 1 << 16)
    with pc.open_csv(
        stream, read_options=read, parse_options=parse, convert_options=convert
    ) as reader:
        for batch in reader:
            yield {name: _plain(name, batch.column(name)) for name in layout.columns}


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
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
                columns = {name: batch.column(i) for i, name in enumerate(names)}
                chunk = {name: _plain(name, column) for name, column in columns.items()}
            yield chunk


def _plain(name: str, column: Any) -> NDArray[Any]:
    """An arrow column as `Chunk` holds it; empty cells of numbers become NaN."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if pa.types.is_null(kind) or (column.null_count == len(column) and len(column)):
        return np.full(len(column), np.nan)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(name, column)
    if pa.types.is_boolean(kind) and column.null_count:
        column = column.cast(pa.int8())
    elif pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type):
        return column.to_numpy(zero_copy_only=False)
    return np.zeros(len(column), "V1")


def _lists(name: str, column: Any) -> NDArray[Any]:
    """A column of lists of numbers as a table [rows, width]; empty rows are NaN."""
    import pyarrow.compute as pc

    counted = pc.call_function("list_value_length", [column])
    lengths = counted.fill_null(-1).to_numpy(zero_copy_only=False)
    inner = column.flatten()
    values = inner.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "fiub":
        return np.zeros(len(column), "V1")
    widths = np.unique(lengths[lengths >= 0])
    if len(widths) != 1 or widths[0] < 1:
        raise DatasetError(
            f"expected lists of one length in column {name!r:.60}, found lengths "
            f"{', '.join(map(str, widths[:5].tolist()))}; leave the column out"
        )
    width = int(widths[0])
    if (lengths >= 0).all():
        return values.reshape(len(column), width)
    out = np.full((len(column), width), np.nan)
    out[lengths >= 0] = values.reshape(-1, width)
    return out
