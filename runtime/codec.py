"""Checked JSON for frozen dataclasses: canonical text out, and any fault's path on the way in.

It covers what our files hold: dataclasses, str, int, float, bool, None, enums, lists, tuples,
string keyed dicts and unions with None. There is no third-party library: the runtime must import
anywhere.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import secrets
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
UNLESS_SET = {"unless_set": True}
"""Metadata of a field that is written only where it differs from its default: documents without it
keep their bytes, and their hashes."""


class CodecError(ValueError):
    """A value lacks the declared type; the text names its path inside the document."""


def to_plain(value: Any) -> Any:
    """Turn dataclasses, enums, tuples and numpy scalars into plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if not _left_out(f, value)]
        return {f.name: to_plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    item = getattr(value, "item", None)
    return value if item is None else item()


def _left_out(field: "dataclasses.Field[Any]", value: Any) -> bool:
    if not field.metadata.get("unless_set"):
        return False
    made = field.default_factory
    default = field.default if made is dataclasses.MISSING else made()
    return getattr(value, field.name) == default


def dumps(value: Any) -> str:
    """Write canonical JSON text: sorted keys, no NaN, one newline at the end."""
    return json.dumps(to_plain(value), sort_keys=True, indent=1, allow_nan=False) + "\n"


def content_hash(value: Any) -> str:
    """Hash the canonical JSON of a value, hex sha256."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()


def parse(text: str | bytes) -> Any:
    """Read JSON text as plain values, or raise CodecError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise CodecError("expected JSON, found values nested too deeply") from None
    except ValueError as error:
        raise CodecError(f"expected JSON, found {_shortened(str(error))}") from None


def decode(cls: type[T], value: Any, path: str = "$") -> T:
    """Build `cls` from plain JSON values, or raise CodecError for any field that does not fit."""
    return _decode(cls, value, path)


def _decode(kind: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, value, path)
    if origin is typing.Literal:
        if value in args:
            return value
        names = ", ".join(map(repr, args))
        raise CodecError(f"{path}: expected one of {names}, found {_shown(value)}")
    if origin in (list, tuple):
        return _decode_sequence(origin, args, value, path)
    if origin is dict:
        _expect(value, dict, "an object", path)
        return {k: _decode(args[1], v, f"{path}.{_key(k)}") for k, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(str(m.value) for m in kind)
            raise CodecError(f"{path}: expected one of {names}, found {_shown(value)}") from None
    return _decode_scalar(kind, value, path)


def _decode_union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    errors: list[CodecError] = []
    for choice in choices:
        try:
            return _decode(choice, value, path)
        except CodecError as error:
            errors.append(error)
    raise errors[0]


def _decode_sequence(origin: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
    _expect(value, list, "a list", path)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if len(value) != len(args):
            raise CodecError(f"{path}: expected {len(args)} items, found {len(value)}")
        return tuple(
            _decode(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True))
        )
    return origin(_decode(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))


def _decode_dataclass(kind: Any, value: Any, path: str) -> Any:
    _expect(value, dict, f"an object ({kind.__name__})", path)
    hints, fields = _declared(kind)
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise CodecError(f"{path}: unknown field {_shown(unknown[0])} in {kind.__name__}")
    out: dict[str, Any] = {}
    for name, spec in fields.items():
        if name in value:
            out[name] = _decode(hints[name], value[name], f"{path}.{name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise CodecError(f"{path}: field {name!r} of {kind.__name__} is missing")
    try:
        return kind(**out)
    except ValueError as error:
        raise CodecError(f"{path}: {_shortened(str(error))}") from None


@functools.cache
def _declared(kind: type) -> "tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]":
    """Return the types and the fields of a dataclass, by name."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)
    return typing.get_type_hints(kind), {f.name: f for f in fields}


def _decode_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 1023 else math.inf
    if kind is int and isinstance(value, bool):
        raise CodecError(f"{path}: expected int, found {value!r}")
    if not isinstance(value, kind):
        raise CodecError(f"{path}: expected {kind.__name__}, found {_shown(value)}")
    if kind is float and not math.isfinite(value):
        raise CodecError(f"{path}: expected a finite number, found {value!r}")
    return value


def _shown(value: Any) -> str:
    """Shorten a value of any size for one line of an error."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value[:80] if isinstance(value, str) else value)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def _key(key: str) -> str:
    """Write a key inside a path, quoted where it is no plain name."""
    return key if len(key) <= 80 and key.isprintable() else repr(key[:80])


def _expect(value: Any, kind: type, words: str, path: str) -> None:
    if not isinstance(value, kind):
        raise CodecError(f"{path}: expected {words}, found {type(value).__name__}")


def write_text_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never half.

    The umask reduces `mode`. On a full disk it raises OSError, and nothing is left behind.
    """
    write_bytes_atomically(path, text.encode(), mode=mode)


def write_bytes_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write bytes like `write_text_atomically`."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
