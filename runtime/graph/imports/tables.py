"""Text and Parquet tables in chunks of columns, with bounded memory.

Text is read as its writers leave it: perhaps gzipped, with a byte order mark, comment lines, lines
that begin or end with blanks, columns padded by runs of blanks, and blanks among tabs. Files that
have none of it pass through untouched. pyarrow is imported on use.
"""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.format import check_range, count_overflows, refuse_unreadable
from gnnplan.runtime.graph.imports.inventory import plain_name
from gnnplan.runtime.graph.imports.text_layout import (
    BOM,
    LINE_BYTES,
    SEPARATOR,
    TextLayout,
    open_bytes,
    refuse_repeated,
    sniff,
)
from gnnplan.runtime.graph.staging import ArrayWriter
from gnnplan.runtime.npy import map_npy

Chunk = dict[str, NDArray[Any]]
"""Columns by name: numbers [rows], lists of numbers [rows, width], words (kind O, see `as_text`),
and for other types a void (kind V) that nothing reads."""
ROWS_PER_CHUNK = 1 << 18
BLOCK_BYTES = 1 << 24
PARSER_BLOCK_BYTES = LINE_BYTES
_COMMENT = re.compile(rb"(?m)^[ \t]*[#%][^\n]*(?:\n|\Z)")
_TOP = re.compile(rb"\A(?:[ \t]*(?:[#%][^\n]*)?\r?\n)+")
_REMARK = re.compile(rb"(?m)^[ \t]*[#%][ \t]")
_NO_TAB = re.compile(rb"(?m)^[^\t\n]+$")
_PADDED_QUOTE = re.compile(rb"(?m)(^|[,;\t]) +(?=\")")
_GAP = re.compile(rb"\n[ \t\r]*\n")


class PlainLines(io.RawIOBase):
    """The bytes of a text table without comments and stray blanks."""

    def __init__(self, path: Path, layout: TextLayout) -> None:
        super().__init__()
        self.comments = 0
        self._path = path
        self._blank = layout.delimiter == " "
        self._tab = layout.delimiter == "\t"
        self._numeric = all(layout.numbers[:2])
        width = len(layout.columns)
        self._single = width == 1
        # Of three columns or more, a line of so many tabs is a row of empty cells.
        row = rb"(?!\t{%d}\r?$)" % (width - 1) if self._tab and width > 2 else b""
        self._empty = re.compile(rb"(?m)^" + row + rb"[ \t]+\r?(?:\n|\Z)")
        self._stream = open_bytes(path)
        self._rest = b""
        self._ready = memoryview(b"")
        self._first = True
        self._ended = False
        self._begun = self._gap = False

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as one block goes."""
        while not self._ready and not self._ended:
            self._ready = memoryview(self._clean(self._block()))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()

    def _block(self) -> bytes:
        read = self._stream.read(BLOCK_BYTES)
        if not read:
            self._ended = True
            block, self._rest = self._rest, b""
            return block
        head, newline, tail = (self._rest + read).rpartition(b"\n")
        self._rest = tail
        return head + newline

    def _clean(self, block: bytes) -> bytes:
        if self._first and block:
            self._first = False
            block = SEPARATOR.sub(b"", block.removeprefix(BOM))
            top = _TOP.match(block)
            if top:
                self.comments += len(_COMMENT.findall(top[0]))
                block = SEPARATOR.sub(b"", block[top.end() :])
        if b"#" in block or b"%" in block:
            block = self._without_comments(block)
        if self._single:
            self._refuse_gap(block)
        if self._blank:
            return _collapse_blanks(block)
        if self._tab and self._numeric and b" " in block:
            block = re.sub(rb" *\t *", b"\t", block)
            block = re.sub(rb"(?m)^ +| +(?=\r?$)", b"", block)
            block = _NO_TAB.sub(lambda line: re.sub(rb" +", b"\t", line[0]), block)
        if b' "' in block:
            block = _PADDED_QUOTE.sub(rb"\1", block)
        if b" \n" in block or b"\t\n" in block or b" \r" in block or b"\t\r" in block:
            block = self._empty.sub(b"", block)
        return block

    def _refuse_gap(self, block: bytes) -> None:
        """Refuse an empty line between rows of one cell, for it may be a row or none."""
        rows = block.strip()
        if not rows:
            self._gap = self._gap or (self._begun and b"\n" in block)
            return
        at = block.index(rows)
        above, below = block[:at], block[at + len(rows) :]
        if self._gap or (self._begun and b"\n" in above) or _GAP.search(rows):
            raise DatasetError(
                f"{self._path}: expected a value in each row of its one column, found an empty "
                "line between rows; write nan where a value is missing, else remove the line"
            )
        self._begun, self._gap = True, below.count(b"\n") > 1

    def _without_comments(self, block: bytes) -> bytes:
        if self._numeric:
            block, count = _COMMENT.subn(b"", block)
            self.comments += count
            return block
        # Ids that are words may begin with # or %; with a blank behind it, it is a comment.
        remark = _REMARK.search(block)
        if remark:
            line = block[remark.start() :].split(b"\n", 1)[0][:60].decode(errors="replace").strip()
            raise DatasetError(
                f"{self._path}: expected comments at the top of a table of words, found the line "
                f"{line!r} further down; remove it"
            )
        return block


def _collapse_blanks(block: bytes) -> bytes:
    """Leave one blank between cells and none at the ends of lines."""
    block = block.replace(b"\t", b" ").replace(b"\r", b"")
    while b"  " in block:
        block = block.replace(b"  ", b" ")
    return block.replace(b" \n", b"\n").replace(b"\n ", b"\n").removeprefix(b" ").removesuffix(b" ")


def table_chunks(
    path: Path,
    *,
    header: bool | None = None,
    floats: Sequence[str] = (),
    notes: list[str] | None = None,
) -> Iterator[Chunk]:
    """Yield chunks of a table's columns, in file order.

    Args:
        path: .parquet, or text (csv, tsv, blank separated; may be gzipped). Lines that start with
            `#` or `%` are comments: at the top, and among rows of numbers.
        header: whether the first line names the columns; None finds out by its cells.
        floats: plain names of text columns that are fractions, even where the first are whole.
        notes: gets a line where comments were left out, and where the first line may be names or a
            row.
    """
    if path.name.lower().endswith(".parquet"):
        yield from _parquet_chunks(path)
        return
    layout = sniff(path, header)
    if layout is None:
        return
    with refuse_unreadable(path, "a text table"):
        lines = PlainLines(path, layout)
    with lines:
        iterator = _csv_chunks(lines, layout, floats)
        while True:
            with refuse_unreadable(path, f"a table of {len(layout.columns)} columns"):
                chunk = next(iterator, None)
            if chunk is None:
                break
            yield chunk
    if notes is not None and layout.doubt:
        notes.append(f"{path.name}: {layout.doubt}")
    if notes is not None and lines.comments:
        notes.append(f"{path.name}: {lines.comments} comment lines (# or %) left out")


def number_table(path: Path, target: Path, dtype: Any) -> NDArray[Any]:
    """Stream a headerless table of numbers into a .npy file and map it: [rows, columns].

    Integer types take whole numbers only; empty and `nan` cells become NaN of float types.
    """
    layout = sniff(path, header=False)
    if layout is None:
        return np.empty((0, 0), dtype)
    with ArrayWriter(target, dtype, (len(layout.columns),)) as writer:
        for chunk in table_chunks(path, header=False):
            columns = [as_numbers(path, values, dtype) for values in chunk.values()]
            writer.append(np.stack(columns, axis=1))
    return map_npy(target)


def as_numbers(
    path: Path, values: NDArray[Any], dtype: Any, *, weights: bool = False
) -> NDArray[Any]:
    """Return a column as numbers of a type; refuse values that the type would change.

    Fractions may be rounded, but `weights` not to 0, which no sampler draws.
    """
    wanted = np.dtype(dtype)
    if values.dtype.kind not in "fiub":
        raise DatasetError(f"{path}: expected numbers, found {values[:1]!s:.80}")
    if wanted.kind in "iu":
        if values.dtype.kind == "f":
            if not np.isfinite(values).all() or (values % 1 != 0).any():
                raise DatasetError(f"{path}: expected whole numbers, found others")
            inexact = mark_inexact(values)
            if inexact.any():
                raise DatasetError(
                    f"{path}: expected numbers of which no digit is lost, found "
                    f"{int(inexact.sum())} of {len(values)} too large for {values.dtype} (the "
                    f"first: {values[inexact][0]:.0f}); save them as integers or words"
                )
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
    gone = (out == 0) & (values != 0) if weights else np.zeros(0, bool)
    if gone.any():
        raise DatasetError(
            f"{path}: expected edge weights that {wanted} tells from 0, found {int(gone.sum())} of "
            f"{len(values)} that it does not (the first: {values[gone][0]}); scale them in the "
            "source"
        )
    return out


def mark_inexact(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark the fractions that are so large that one stands for several whole numbers.

    >>> mark_inexact(np.array([2.0**53 - 1, 2.0**53, np.nan])).tolist()
    [False, True, False]
    """
    return np.abs(values) >= 2.0 ** (np.finfo(values.dtype).nmant + 1)


def as_text(values: NDArray[Any]) -> NDArray[Any]:
    """Return words as an array of text without blanks around them; empty cells are empty words."""
    if values.dtype.kind != "O":
        return values
    words = ["" if value is None else str(value).strip() for value in values.tolist()]
    return np.array(words, dtype=np.str_)


def _csv_chunks(lines: PlainLines, layout: TextLayout, floats: Sequence[str]) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.csv as pc

    read = pc.ReadOptions(
        use_threads=False,
        block_size=PARSER_BLOCK_BYTES,
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
            yield {name: _read_column(name, batch.column(name)) for name in layout.columns}


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
    import pyarrow.parquet as pq

    with refuse_unreadable(path, "a Parquet table"):
        file = pq.ParquetFile(path)
        refuse_repeated(path, file.schema_arrow.names)
    with file:
        batches = file.iter_batches(ROWS_PER_CHUNK, use_threads=False)
        while True:
            with refuse_unreadable(path, "a Parquet table"):
                batch = next(batches, None)
                if batch is None:
                    return
                names = batch.schema.names
                columns = {name: batch.column(i) for i, name in enumerate(names)}
                chunk = {name: _read_column(name, column) for name, column in columns.items()}
            yield chunk


def _read_column(name: str, column: Any) -> NDArray[Any]:
    """Return an arrow column as `Chunk` holds it; empty cells of numbers become NaN."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if pa.types.is_null(kind) or (column.null_count == len(column) and len(column)):
        return np.full(len(column), np.nan)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _read_lists(name, column)
    if pa.types.is_boolean(kind) and column.null_count:
        column = column.cast(pa.int8())
    elif pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    words = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if words or (pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type)):
        return column.to_numpy(zero_copy_only=False)
    return np.zeros(len(column), "V1")


def _read_lists(name: str, column: Any) -> NDArray[Any]:
    """Return a column of lists of numbers as a table [rows, width]; empty rows are NaN.

    Lists of one number are a column of numbers.
    """
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
        out = values.reshape(len(column), width)
    else:
        out = np.full((len(column), width), np.nan)
        out[lengths >= 0] = values.reshape(-1, width)
    return out[:, 0] if width == 1 else out
