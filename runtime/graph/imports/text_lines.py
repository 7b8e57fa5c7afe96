"""Text tables as their writers leave them, made plain: what lies between a file and its cells.

Handled are a byte order mark, comment lines, lines that begin or end with blanks, columns padded by
runs of blanks, and blanks among tabs. Files that have none of it pass through untouched.
"""

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.inventory import DST, HEADER_WORDS, SRC, column_named, plain_name
from gnnplan.runtime.graph.reading import reading

BLOCK_BYTES = 1 << 24
SAMPLE_LINES = 50
"""Lines that are looked at to find out how a table is written."""
_BOM = b"\xef\xbb\xbf"
_COMMENT = re.compile(rb"(?m)^[ \t]*[#%][^\n]*(?:\n|\Z)")
_TOP = re.compile(rb"\A(?:[ \t]*(?:[#%][^\n]*)?\r?\n)+")
_EMPTY = re.compile(rb"(?m)^[ \t]+\r?(?:\n|\Z)")
_REMARK = re.compile(rb"(?m)^[ \t]*[#%][ \t]")
_NO_TAB = re.compile(rb"(?m)^[^\t\n]+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLayout:
    """How a text table is written."""

    delimiter: str
    """Comma, tab, semicolon, or a blank for any run of blanks and tabs."""
    columns: list[str]
    """Names from the header, or c0, c1 ..."""
    has_header: bool
    numbers: list[bool]
    """By column, whether the first rows hold nothing but numbers there."""


def sniff(path: Path, header: bool | None = None) -> TextLayout | None:
    """Look at the first lines of a text table; None where it has no rows.

    Args:
        path: the table, perhaps gzipped.
        header: whether the first line names the columns; found out by looking if None.

    Raises:
        DatasetError: unreadable, or two columns of one name.
    """
    lines = _sample(path)
    if not lines:
        return None
    delimiter = _delimiter(lines)
    rows = [_cells(line, delimiter) for line in lines]
    first = rows[0]
    named = _looks_named(first, rows[1] if len(rows) > 1 else []) if header is None else header
    names = first if named else [f"c{i}" for i in range(len(first))]
    if len(set(names)) != len(names):
        raise DatasetError(f"{path}: expected different column names, found {names!s:.120}")
    data = rows[1:] if named else rows
    return TextLayout(
        delimiter=delimiter,
        columns=names,
        has_header=named,
        numbers=[
            all(i >= len(row) or not row[i] or _is_number(row[i]) for row in data)
            for i in range(len(names))
        ],
    )


class PlainLines(io.RawIOBase):
    """The bytes of a text table without what a parser of cells stumbles over."""

    def __init__(self, path: Path, layout: TextLayout) -> None:
        super().__init__()
        self.comments = 0
        """Comment lines left out so far."""
        self._path = path
        self._blank = layout.delimiter == " "
        self._tab = layout.delimiter == "\t"
        self._numeric = all(layout.numbers[:2])
        self._stream = open_bytes(path)
        self._rest = b""
        self._ready = memoryview(b"")
        self._first = True
        self._ended = False

    def readable(self) -> bool:
        """True: a stream to read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as one block goes; 0 at the end."""
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
        """Whole lines."""
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
            block = block.removeprefix(_BOM)
            top = _TOP.match(block)
            if top:
                self.comments += len(_COMMENT.findall(top[0]))
                block = block[top.end() :]
        if b"#" in block or b"%" in block:
            block = self._without_comments(block)
        if self._blank:
            return _collapsed(block)
        if self._tab and self._numeric and b" " in block:
            block = re.sub(rb" *\t *", b"\t", block)
            block = re.sub(rb"(?m)^ +| +(?=\r?$)", b"", block)
            block = _NO_TAB.sub(lambda line: re.sub(rb" +", b"\t", line[0]), block)
        if b" \n" in block or b"\t\n" in block or b" \r" in block:
            block = _EMPTY.sub(b"", block)
        return block

    def _without_comments(self, block: bytes) -> bytes:
        if self._numeric:
            block, count = _COMMENT.subn(b"", block)
            self.comments += count
            return block
        # Ids that are words may begin with either sign; a blank behind it makes it a remark.
        remark = _REMARK.search(block)
        if remark:
            line = block[remark.start() :].split(b"\n", 1)[0][:60].decode(errors="replace").strip()
            raise DatasetError(
                f"{self._path}: expected comments at the top of a table of words, found the line "
                f"{line!r} further down; remove it"
            )
        return block


def open_bytes(path: Path) -> Any:
    """Open a file, unpacked if its name ends in .gz, as a stream of bytes."""
    import pyarrow as pa

    return pa.input_stream(str(path), compression="gzip" if path.name.endswith(".gz") else None)


def _sample(path: Path) -> list[str]:
    """The first lines that are neither empty nor comments."""
    with reading(path, "a text table"), open_bytes(path) as stream:
        head = bytes(stream.read(2))
        if head in (b"\xff\xfe", b"\xfe\xff"):
            raise DatasetError(f"{path}: expected text in UTF-8, found UTF-16; save it as UTF-8")
        lines: list[str] = []
        ended = False
        block = head
        while not ended and len(lines) <= SAMPLE_LINES:
            read = bytes(stream.read(1 << 16))
            ended = not read
            block += read
            whole, newline, block = (block, b"", b"") if ended else block.rpartition(b"\n")
            text = (whole + newline).removeprefix(_BOM).decode("utf-8")
            lines += [t for t in text.split("\n") if t.strip() and t.strip()[0] not in "#%"]
        return [line.rstrip("\r") for line in lines[:SAMPLE_LINES]]


def _delimiter(lines: list[str]) -> str:
    found = next((d for d in (",", "\t", ";") if d in lines[0]), " ")
    if found == "\t":
        by_tab = [_cells(line, "\t") for line in lines]
        by_blank = [line.split() for line in lines]
        uneven = len({len(row) for row in by_tab}) > 1 or any("" in row for row in by_tab)
        numbers = all(_is_number(cell) for row in by_blank[1:] or by_blank for cell in row)
        if uneven and numbers and len({len(row) for row in by_blank}) == 1:
            return " "
    return found


def _cells(line: str, delimiter: str) -> list[str]:
    parts = line.split() if delimiter == " " else line.strip(" ").split(delimiter)
    return [cell.strip().strip('"').strip() for cell in parts]


def _collapsed(block: bytes) -> bytes:
    """Blank-separated lines with one blank between cells and none at the ends."""
    block = block.replace(b"\t", b" ").replace(b"\r", b"")
    while b"  " in block:
        block = block.replace(b"  ", b" ")
    return block.replace(b" \n", b"\n").replace(b"\n ", b"\n").removeprefix(b" ").removesuffix(b" ")


def _looks_named(first: list[str], second: list[str]) -> bool:
    """Whether the first line names columns: all text, and either known words or over numbers."""
    if any(_is_number(cell) for cell in first):
        return False
    ends = column_named(first, SRC) is not None and column_named(first, DST) is not None
    known = any(plain_name(cell) in HEADER_WORDS for cell in first)
    return ends or known or any(_is_number(cell) for cell in second)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
