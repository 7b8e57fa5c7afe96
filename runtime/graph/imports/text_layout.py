"""How a text table is written: its delimiter, the names of its columns, which are numbers.

All is told by the first lines. Names may also stand in a comment above the rows, where NumPy's
savetxt writes them.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.format import refuse_unreadable
from gnnplan.runtime.graph.imports.inventory import (
    DST,
    HEADER_PAIRS,
    MISSING,
    NODE_ID,
    ROW_NAMES,
    SRC,
    column_named,
    looks_like,
    names_column,
    plain_name,
)

SAMPLE_LINES = 50
LINE_BYTES = 1 << 24
"""Most bytes of a line."""
BOM = b"\xef\xbb\xbf"
SEPARATOR = re.compile(rb"(?i)\A\"?sep=([^\w\r\n\"])\"?[ \t]*\r?\n")
"""First line by which Excel is told the delimiter."""
_TAKEN = {
    True: "the names of columns; if it is a row, write a line src,dst above it",
    False: "a row; if it names the columns, rename them to usual ones (src,dst or id,label)",
}
_NAME = re.compile(r"\w[\w .\-]*")
_MATRIX_MARKET = "%%matrixmarket"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLayout:
    """How a text table is written."""

    delimiter: str
    """Comma, tab, semicolon, what a first line sep=... says, or a blank for any run of blanks and
    tabs."""
    columns: list[str]
    """Names from the header or the comment above the rows, or c0, c1 ..."""
    has_header: bool
    numbers: list[bool]
    """Whether the first rows of each column are numbers alone."""
    doubt: str = ""
    """What the first line or the comment above it was taken for, where that cannot be known."""


def sniff(path: Path, header: bool | None = None) -> TextLayout | None:
    """Find out from its first lines how a text table is written; None where it has no rows."""
    lines, remark = _sample_lines(path)
    told = SEPARATOR.match(f"{lines[0]}\n".encode()) if lines else None
    lines = lines[1:] if told else lines
    if not lines:
        return None
    with refuse_unreadable(path, "a text table"):
        delimiter = told[1].decode() if told else _find_delimiter(lines)
        rows = [_split_cells(line, delimiter) for line in lines]
    first = rows[0]
    named, sure = _looks_named(first, rows[1:]) if header is None else (header, True)
    above = _names_above(remark, delimiter, len(first)) if header is None and not named else []
    names = above or (first if named else [f"c{i}" for i in range(len(first))])
    refuse_repeated(path, names)
    data = rows[1:] if named else rows
    doubt = ""
    if above:
        doubt = (
            f"the comment above its rows ({', '.join(above)!s:.80}) is taken for the names of "
            "columns; if it is none, remove it"
        )
    elif not sure:
        doubt = f"its first line ({', '.join(first)!s:.80}) is taken for {_TAKEN[named]}"
    return TextLayout(
        delimiter=delimiter,
        columns=names,
        has_header=named,
        numbers=[
            all(i >= len(row) or not row[i] or _is_number(row[i]) for row in data)
            for i in range(len(names))
        ],
        doubt=doubt,
    )


def refuse_repeated(path: Path, names: list[str]) -> None:
    """Refuse a table two of whose columns have one name, with a DatasetError."""
    repeated = [name for i, name in enumerate(names) if name in names[:i]]
    if repeated:
        raise DatasetError(
            f"{path}: expected different column names, found several {repeated[0]!r:.60} among "
            f"{names!s:.120}; rename them"
        )


def open_bytes(path: Path) -> Any:
    """Open a file, unpacked if its name ends in .gz, as a stream of bytes."""
    import pyarrow as pa

    packed = path.name.lower().endswith(".gz")
    return pa.input_stream(str(path), compression="gzip" if packed else None)


def _sample_lines(path: Path) -> tuple[list[str], str]:
    """Read the first lines that are neither empty nor comments, and the comment above them."""
    with refuse_unreadable(path, "a text table"), open_bytes(path) as stream:
        head = bytes(stream.read(2))
        if head in (b"\xff\xfe", b"\xfe\xff"):
            raise DatasetError(f"{path}: expected text in UTF-8, found UTF-16; save it as UTF-8")
        lines: list[str] = []
        remark = ""
        ended = False
        block = head
        while not ended and len(lines) <= SAMPLE_LINES:
            read = bytes(stream.read(1 << 16))
            ended = not read
            block += read
            if b"\0" in read:
                raise DatasetError(f"{path}: expected text in UTF-8, found zero bytes; save it so")
            whole, newline, block = (block, b"", b"") if ended else block.rpartition(b"\n")
            if len(block) > LINE_BYTES:
                raise DatasetError(
                    f"{path}: expected lines of at most {LINE_BYTES >> 20} MiB, found a longer one"
                )
            for line in (whole + newline).removeprefix(BOM).decode("utf-8").split("\n"):
                mark = line.strip()[:1]
                if mark and mark not in "#%":
                    lines.append(line.rstrip("\r"))
                elif mark and not lines:
                    remark = line.strip()
                    _refuse_matrix_market(path, remark)
        return lines[:SAMPLE_LINES], remark


def _refuse_matrix_market(path: Path, remark: str) -> None:
    """Refuse a matrix, whose first row would be taken for an edge and whose symmetry for none."""
    if remark.lower().startswith(_MATRIX_MARKET):
        raise DatasetError(
            f"{path}: expected a table of edges, found a matrix of MatrixMarket; load it with "
            "scipy.io.mmread and save it with scipy.sparse.save_npz, which is read"
        )


def _names_above(remark: str, delimiter: str, num_columns: int) -> list[str]:
    """Return the names of columns that a comment above the rows gives; empty where it gives none.

    There must be one for each column and, for blanks are in any sentence, two that are usual.
    """
    cells = _split_cells(remark.lstrip("#% \t"), delimiter)
    usual = sum(names_column(cell) or looks_like(cell) is not None for cell in cells)
    fits = len(set(cells)) == len(cells) == num_columns and all(map(_NAME.fullmatch, cells))
    return cells if fits and usual >= min(2 if delimiter == " " else 1, num_columns) else []


def _find_delimiter(lines: list[str]) -> str:
    found = [d for d in (",", "\t", ";") if d in lines[0]]
    if len(found) > 1:  # one is within cells: names with commas, decimal commas
        found.sort(key=lambda d: _fits(lines, d), reverse=True)
    if found[:1] == ["\t"]:
        by_tab = [_split_cells(line, "\t") for line in lines]
        by_blank = [line.split() for line in lines]
        uneven = len({len(row) for row in by_tab}) > 1 or any("" in row for row in by_tab)
        numbers = all(_is_number(cell) for row in by_blank[1:] or by_blank for cell in row)
        if uneven and numbers and len({len(row) for row in by_blank}) == 1:
            return " "
    return found[0] if found else " "


def _fits(lines: list[str], delimiter: str) -> tuple[bool, bool, bool]:
    """Return whether lines have equally many cells, begin with two numbers, and have tabs."""
    rows = [_split_cells(line, delimiter) for line in lines]
    data = rows[1:] or rows
    numbers = all(_is_number(cell) for row in data for cell in row[:2])
    return len({len(row) for row in rows}) == 1, numbers, delimiter == "\t"


def _split_cells(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        parts = line.split()
    elif '"' in line:
        parts = next(csv.reader([line.strip(" ")], delimiter=delimiter, skipinitialspace=True))
    else:
        parts = line.strip(" ").split(delimiter)
    return [cell.strip().strip('"').strip() for cell in parts]


def _looks_named(first: list[str], rows: list[list[str]]) -> tuple[bool, bool]:
    """Return whether the first line names the columns, and whether that is sure.

    What separates names from a row: a word over numbers, usual names of columns, and that a name
    of a column is none of its values. Words over words of which none is usual may be either.
    """
    columns = [[row[i] for row in rows if i < len(row)] for i in range(len(first))]
    numeric = [_are_mostly_numbers(cells) for cells in columns]
    known = [names_column(cell) for cell in first]
    if _number_columns(first, columns):
        return True, True
    if any(_is_number(cell) for cell in first):
        named = any(k and n for k, n in zip(known, numeric, strict=True))
        return named, named or not (any(known) or _count_up(first))
    plain = {plain_name(cell) for cell in first}
    ends = column_named(first, SRC) is not None and column_named(first, DST) is not None
    over = [number for number, cell in zip(numeric, first, strict=True) if cell] + numeric[:1]
    if ends or any(over) or any(plain >= set(pair) for pair in HEADER_PAIRS):
        return True, True
    if any(cell in cells for cell, cells in zip(first, columns, strict=True) if cell):
        return False, True
    if any(known):
        return True, sum(known) >= min(2, len(first))
    return False, any(cell in row for row in rows for cell in first if cell)


def _number_columns(first: list[str], columns: list[list[str]]) -> bool:
    """Return whether a first line has numbers for names, as saved data frames without names have.

    Before them may stand a name of ids or the empty one of row names; without, rows of fractions
    tell that it is none of them.
    """
    if first and plain_name(first[0]) in (*NODE_ID, *ROW_NAMES):
        return len(first) > 1 and first[1:] == [str(i) for i in range(len(first) - 1)]
    return _count_up(first) and any(
        _is_number(cell) and not cell.isdecimal() for cells in columns for cell in cells
    )


def _count_up(cells: list[str]) -> bool:
    """Return whether cells count from 0, so many of them that an edge is none."""
    return len(cells) >= 4 and cells == [str(i) for i in range(len(cells))]


def _are_mostly_numbers(cells: list[str]) -> bool:
    filled = [cell for cell in cells if cell.lower() not in MISSING]
    return 2 * sum(map(_is_number, filled)) > len(filled)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
