"""Reading files that others wrote: whatever is wrong with them comes out as one DatasetError.

A damaged file makes parsers raise nearly anything (zlib, struct, pickle, yaml, arrow), so the guard
here catches every `Exception` of the reading code it wraps, and nothing outside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.npy import map_npy


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn any failure of the wrapped reading code into a DatasetError about `path`.

    Args:
        path: the file being read; named in the message.
        what: what was expected there ("a NumPy .npz archive").
    """
    try:
        yield
    except DatasetError:
        raise
    except FileNotFoundError:
        raise DatasetError(f"{path}: expected {what}, found no such file") from None
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise DatasetError(
            f"{path}: expected {what}, found a file that cannot be read ({one_line(error)}); "
            "write or download it again"
        ) from error


def one_line(error: BaseException) -> str:
    """The first line of an error's text, shortened, with its type where it has no text."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def map_array(path: Path) -> NDArray[Any]:
    """Memory-map a .npy file read-only as a plain array.

    Raises:
        DatasetError: missing, truncated, or not a .npy file of plain values.
    """
    with reading(path, "a .npy array"):
        return map_npy(path)
