"""Damage to files that other programs wrote, as hypothesis strategies.

Random bytes are refused at the first check. These start from a valid file and go where its format
goes: members of a zip archive and the inside of gzip are damaged and packed again with right
checksums, headers of .npy files get other shapes and types, JSON keeps its syntax.
"""

import gzip
import io
import json
import re
import warnings
import zipfile
from typing import Any

from hypothesis import strategies as st

NUMBERS = ("0", "-1", "1", "7", "4294967296", "9" * 19, "-" + "9" * 40, "1e999", "nan", "0x1f", "")
"""What a number in a text may become: outside its range, huge, no number, nothing."""
HUGE = (2**31, 2**40, 2**62)
TYPES = ("<i8", "<i4", "<u8", "<f8", "<f2", "|b1", "|O", "<U9", "<M8[s]", "<c16", "|V6", ">i4")
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2, 10**30, 10**400, -0.5, 1e308, float("nan"), "", "x", "a\nb", "y" * 3000,
    "../../../etc/hostname", "/etc/hostname", "\0", "\ud800", [], {}, [[]], [1, 2], {"error": "x"},
    {"a\nb": 1},
)  # fmt: skip
DEEP = "\x01deep\x01"
"""Stands for a list in a list in a list, which json.dumps would not write."""


class Hidden:
    """A value that hypothesis does not write down each time: whole files make that slow."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "a whole file"


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """A file's bytes after one to three acts of damage, inside its container where it is one."""
    return _damaged(Hidden(data))


@st.composite
def _damaged(draw: st.DrawFn, whole: Hidden) -> bytes:
    return damage(draw, whole.value)


def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """What `damaged` does."""
    if data[:2] == b"\x1f\x8b" and draw(st.integers(0, 4)):
        return gzip.compress(damage(draw, gzip.decompress(data)), 1, mtime=0)
    if data[:4] == b"PK\x03\x04" and draw(st.integers(0, 4)):
        return repacked(draw, data)
    if data[:6] == b"\x93NUMPY" and draw(st.booleans()):
        return reshaped(draw, data)
    for _ in range(draw(st.integers(1, 3))):
        data = draw(draw(st.sampled_from(ACTS))(data))
    return data


def repacked(draw: st.DrawFn, data: bytes) -> bytes:
    """An archive with one member damaged, gone, twice there or under another name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    number = draw(st.integers(0, len(members) - 1))
    name, content = members[number]
    act = draw(st.sampled_from(["damage"] * 6 + ["remove", "repeat", "rename"]))
    if act == "damage":
        members[number] = (name, damage(draw, content))
    elif act == "remove":
        del members[number]
    elif act == "repeat":
        members.append((name, content))
    else:
        names = ["../../outside.npy", "/outside.npy", "a\nb.npy", "x", "", *(n for n, _ in members)]
        members[number] = (draw(st.sampled_from(names)), content)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Duplicate name")
        for each, inside in members:
            archive.writestr(zipfile.ZipInfo(each), inside)
    return out.getvalue()


def reshaped(draw: st.DrawFn, data: bytes) -> bytes:
    """A .npy file whose header says another shape, type or order; the values stay."""
    body = data[10 + int.from_bytes(data[8:10], "little") :]
    found = re.search(rb"'descr': '([^']*)'.*'shape': \(([^)]*)\)", data[:200])
    descr = found[1].decode() if found else "<i8"
    shape = [int(part) for part in found[2].split(b",") if part.strip()] if found else [1]
    act = draw(st.sampled_from(["axis", "axis", "shape", "type", "text", "order"]))
    if act == "axis" and shape:
        axis = draw(st.integers(0, len(shape) - 1))
        shape[axis] = draw(st.sampled_from([0, 1, -1, shape[axis] + 1, shape[axis] // 2, *HUGE]))
    elif act == "type":
        descr = draw(st.sampled_from(TYPES))
    else:
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, *HUGE]), max_size=4))
    tail = "(" * 200 if act == "text" else f"{act == 'order'}, 'shape': {tuple(shape)}, }}"
    header = f"{{'descr': '{descr}', 'fortran_order': {tail}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def flipped(data: bytes) -> st.SearchStrategy[bytes]:
    """Some bits turned over."""

    def act(places: list[int]) -> bytes:
        out = bytearray(data)
        for place in places:
            out[place // 8] ^= 1 << place % 8
        return bytes(out)

    bits = st.integers(0, max(0, 8 * len(data) - 1))
    return st.lists(bits, min_size=1, max_size=6).map(act) if data else st.just(b"\0")


def truncated(data: bytes) -> st.SearchStrategy[bytes]:
    """The beginning alone."""
    return st.integers(0, len(data)).map(lambda end: data[:end])


def spliced(data: bytes) -> st.SearchStrategy[bytes]:
    """A stretch left out, twice there, moved, or overwritten."""
    place = st.integers(0, len(data))
    new = st.one_of(
        st.just(b""), st.binary(max_size=12), st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\n", b","])
    )
    return st.tuples(place, st.integers(0, 40), new, st.booleans()).map(
        lambda cut: data[: cut[0]] + (cut[2] or data[cut[0] // 2 :][: cut[1]]) * (1 + cut[3])
        + data[cut[0] + (cut[1] if cut[2] else 0) :]
    )  # fmt: skip


def renumbered(data: bytes) -> st.SearchStrategy[bytes]:
    """A number in a text becomes another one, or none."""
    spans = [m.span() for m in re.finditer(rb"\d+(\.\d+)?", data)][:4000]
    if not spans:
        return truncated(data)
    return st.tuples(st.sampled_from(spans), st.sampled_from(NUMBERS)).map(
        lambda cut: data[: cut[0][0]] + cut[1].encode() + data[cut[0][1] :]
    )


def relengthed(data: bytes) -> st.SearchStrategy[bytes]:
    """Four or eight bytes become a length that the file does not have."""
    sizes = [n.to_bytes(8, "little") for n in (*HUGE, 2**64 - 1)] + [b"\xff\xff\xff\x7f", b"\0" * 4]
    return st.tuples(st.integers(0, len(data)), st.sampled_from(sizes)).map(
        lambda cut: data[: cut[0]] + cut[1] + data[cut[0] + len(cut[1]) :]
    )


ACTS = [flipped, truncated, spliced, renumbered, renumbered, relengthed]


def damaged_json(document: Any) -> st.SearchStrategy[bytes]:
    """A JSON document with one to three values changed, gone, added or nested without end."""
    return _damaged_json(Hidden(document))


@st.composite
def _damaged_json(draw: st.DrawFn, whole: Hidden) -> bytes:
    plain = whole.value
    for _ in range(draw(st.integers(1, 3))):
        plain = changed(draw, plain)
    text = json.dumps(plain).replace(json.dumps(DEEP), "[" * 50_000 + "]" * 50_000)
    return text.encode(errors="surrogatepass")


def changed(draw: st.DrawFn, value: Any) -> Any:
    """A value of JSON with something different in it."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 7)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(keys))
        out = value.copy()
        act = draw(st.sampled_from(["inside"] * 5 + ["gone", "more"]))
        if act == "inside":
            out[key] = changed(draw, value[key])
        elif act == "gone":
            del out[key]
        elif isinstance(out, list):
            out += [out[key]] * draw(st.sampled_from([1, 30]))
        else:
            out[draw(st.sampled_from(["", "new", "a\nb", "z" * 500]))] = out[key]
        return out
    if isinstance(value, bool) or not isinstance(value, int | float):
        return draw(st.sampled_from([*VALUES, DEEP]))
    if -1e9 < value < 1e9 and draw(st.booleans()):
        return draw(st.sampled_from([-value, value * 2, value + 1, value // 3, value * 10**6]))
    return draw(st.sampled_from([*VALUES, DEEP]))
