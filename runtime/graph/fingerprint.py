"""Content hash of a dataset: sampled blocks plus sizes, so that a huge file costs milliseconds.

Files up to `BLOCKS * BLOCK_BYTES` are hashed whole; of larger ones the size and `BLOCKS` evenly
spaced blocks (the first and the last among them). A change that falls between the blocks of a large
file and keeps its size is not seen: the hash guards against mixing up datasets and against
regenerated ones, not against an adversary.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

BLOCKS = 64
BLOCK_BYTES = 16384


def fingerprint_files(paths: Iterable[Path], facts: str = "") -> str:
    """Hex digest (32 characters) over the files' names, sizes and sampled content.

    Args:
        paths: files; the order does not matter, the names (without folder) do.
        facts: further text that belongs to the identity.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(facts.encode())
    for path in sorted(paths, key=lambda p: p.name):
        size = path.stat().st_size
        digest.update(f"\n{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for offset in block_offsets(size):
                file.seek(offset)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:32]


def block_offsets(size_bytes: int) -> list[int]:
    """Offsets of the blocks that are hashed of a file of this size."""
    if size_bytes <= BLOCKS * BLOCK_BYTES:
        return list(range(0, size_bytes, BLOCK_BYTES))
    last = size_bytes - BLOCK_BYTES
    return [last * i // (BLOCKS - 1) for i in range(BLOCKS)]
