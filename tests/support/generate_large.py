"""R-MAT topology too large for memory: edges are spilled by node range, then each range is sorted.

Edge i is a pure function of (seed, i). Memory is one range's lists and one chunk of edges; the disk
holds the spilled edges (8 bytes each way) until their range is done. What is finished stays in
`<folder>.parts` until the dataset is whole: a run that was broken off goes on from there.
"""

import json
import shutil
import typing
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.graph.dataset import Graph, commit_dataset
from gnnplan.runtime.graph.generate_draws import GRAPH500, check_sizes, split_nodes
from gnnplan.runtime.graph.staging import Staging, refuse_occupied, refuse_unwritable

BLOCK_BYTES = 1 << 30
"""Bytes of one range's lists, about."""
CHUNK_EDGES = 1 << 23
"""Edges drawn, sorted by range and spilled at once."""
_BITS = 16
_PER_WORD = 64 // _BITS
Progress = Callable[[str, float], None]


def generate_rmat_topology(
    folder: Path,
    *,
    num_nodes: int,
    degree: float | int,
    feature_dim: int,
    num_classes: int = 1,
    seed: int = 0,
    train_fraction: float = 0.1,
    val_fraction: float = 0.01,
    test_fraction: float = 0.01,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Graph:
    """Write a symmetric R-MAT graph without features, in bounded memory.

    Parameters of the Graph500 benchmark rounded to 1/256; no self-loops. Repeated edges are
    stored once, so the graph has a few per cent fewer edges than `num_nodes * degree`. Features are
    declared, not written; there are no labels. Disk: 8 bytes per edge beside the 4 of the result.

    Args:
        folder: dataset folder to write; `<folder>.parts` beside it holds what is done so far.
        overwrite: let an earlier dataset step aside, to `<folder>.previous`.
        num_nodes: nodes, at most 2^31 - 1.
        degree: mean stored in-degree before repeated edges are dropped.
        feature_dim: declared columns.
        num_classes: declared classes.
        seed: equal seeds give equal datasets.
        train_fraction: share of the nodes with an edge in the training split.
        val_fraction: share in the validation split.
        test_fraction: share in the test split.
        block_bytes: bytes of the lists held at once; decides time, not the result.
        progress: told what is going on and the share done.

    Raises:
        DatasetError: impossible sizes, a dataset is there, or the folder cannot be written.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_nodes, degree, feature_dim, num_classes, in_memory=False)
    parts = Path(f"{folder}.parts")
    num_pairs = max(1, round(num_nodes * degree / 2))
    blocks = max(1, -(-8 * num_pairs // block_bytes))
    size = -(-num_nodes // blocks)
    blocks = -(-num_nodes // size)
    say = progress or _silent
    with refuse_unwritable(parts):
        _begin(parts, json.dumps([num_nodes, num_pairs, seed, size]))
        _spill(parts, num_nodes, num_pairs, seed, size, say)
        for number in range(blocks):
            say(f"range {number + 1} of {blocks}", number / blocks)
            _sort_block(parts, number, min(size, num_nodes - number * size), number * size)
    rng = np.random.default_rng([seed, 3])
    with Staging(folder, overwrite=overwrite) as staging:
        stored, connected = _assemble(staging, parts, blocks)
        fractions = (train_fraction, val_fraction, test_fraction)
        split = split_nodes(connected, fractions, rng)
        for key, ids in zip(("train_idx", "val_idx", "test_idx"), split, strict=True):
            staging.save(key, ids)
        graph = commit_dataset(
            staging,
            name=f"rmat-{num_nodes}",
            num_nodes=num_nodes,
            num_edges=stored,
            feature_dim=feature_dim,
            feature_storage="none",
            num_classes=num_classes,
            task="multiclass",
        )
    shutil.rmtree(parts)
    return graph


def _begin(parts: Path, facts: str) -> None:
    """Keep what an earlier run of the same graph has done; drop another's."""
    said = parts / "facts.json"
    if said.is_file() and said.read_text() == facts:
        return
    if said.is_file():
        shutil.rmtree(parts)
    parts.mkdir(parents=True, exist_ok=True)
    said.write_text(facts)


def _spill(
    parts: Path, num_nodes: int, num_pairs: int, seed: int, size: int, say: Progress
) -> None:
    """Every edge, both ways, appended to the file of its target's range as (target, source)."""
    blocks = -(-num_nodes // size)
    record = parts / "spilled.json"
    state = json.loads(record.read_text()) if record.is_file() else {"pairs": 0, "bytes": []}
    if state["pairs"] == num_pairs:
        return
    with ExitStack() as held:
        files = [held.enter_context((parts / f"edges-{b}.bin").open("ab")) for b in range(blocks)]
        lengths: list[int] = state["bytes"] or [0] * blocks
        for file, length in zip(files, lengths, strict=True):
            file.truncate(length)  # what a broken run wrote after its last record
            file.seek(length)
        key, quadrants = _key(seed), _quadrants()
        chunk = min(CHUNK_EDGES, num_pairs)
        drawn, sorted_ = np.empty((2 * chunk, 2), np.int32), np.empty((2 * chunk, 2), np.int32)
        for first in range(state["pairs"], num_pairs, chunk):
            say("drawing edges", first / num_pairs)
            count = min(chunk, num_pairs - first)
            ends = np.zeros(blocks + 1, np.int64)
            _draw(drawn, sorted_, ends, first, count, num_nodes, size, key, quadrants)
            for b, file in enumerate(files):
                sorted_[ends[b] : ends[b + 1]].tofile(file)
            for file in files:
                file.flush()
            done = {"pairs": first + count, "bytes": [f.tell() for f in files]}
            fresh = record.with_suffix(".fresh")
            fresh.write_text(json.dumps(done))
            fresh.rename(record)


def _sort_block(parts: Path, number: int, num_nodes: int, low: int) -> None:
    """Lists of one range's nodes, sorted, each neighbour once; its spilled edges are deleted."""
    lists, lengths = parts / f"lists-{number}.npy", parts / f"lengths-{number}.npy"
    spilled = parts / f"edges-{number}.bin"
    if not lengths.is_file():
        # A file of no bytes cannot be mapped.
        empty = spilled.stat().st_size == 0
        edges = np.zeros(0, np.int32) if empty else np.memmap(spilled, np.int32, "r")
        edges = edges.reshape(-1, 2)
        place = np.zeros(num_nodes + 1, np.int64)
        found = np.empty(len(edges), np.int32)
        length = np.zeros(num_nodes, np.int32)
        _count(edges, low, length)
        np.cumsum(length, out=place[1:])
        _fill(edges, low, place, found)
        kept = _sort_lists(found, length)
        with lists.open("wb") as file:
            np.save(file, found[:kept])
        unfinished = lengths.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            np.save(file, length)
        unfinished.rename(lengths)
    spilled.unlink(missing_ok=True)


def _assemble(staging: Staging, parts: Path, blocks: int) -> tuple[int, NDArray[np.int64]]:
    """The ranges one after the other as one CSC; the number of edges, and the nodes with one."""
    indices = staging.create("indices", np.int32)
    indptr = staging.create("indptr", np.int64)
    indptr.append(np.zeros(1, np.int64))
    total = low = 0
    connected: list[NDArray[np.int64]] = []
    for number in range(blocks):
        lists = np.load(parts / f"lists-{number}.npy", mmap_mode="r")
        for start in range(0, len(lists), 1 << 24):
            indices.append(lists[start : start + (1 << 24)])
        lengths = np.load(parts / f"lengths-{number}.npy")
        indptr.append(np.cumsum(lengths, dtype=np.int64) + total)
        connected.append(np.flatnonzero(lengths) + low)
        total += len(lists)
        low += len(lengths)
    return total, np.concatenate(connected)


def _key(seed: int) -> np.uint64:
    return np.random.SeedSequence([seed, 4]).generate_state(1, np.uint64)[0]


def _quadrants() -> NDArray[np.uint8]:
    """Two levels for each number of 16 bits: bits u1 u0 v1 v0 of the quadrants they fall into."""
    cuts = np.round(np.cumsum(GRAPH500) * (1 << (_BITS // 2))).astype(int)
    one = np.repeat([0, 1, 2, 3], np.diff([0, *cuts, 1 << (_BITS // 2)]))  # u v, one level
    high, low = one[:, None], one[None, :]
    table = (high >> 1) << 3 | (low >> 1) << 2 | (high & 1) << 1 | (low & 1)
    return table.reshape(-1).astype(np.uint8)


def _silent(words: str, share: float) -> None:
    """Progress that nobody watches."""
    del words, share


@numba.njit(cache=True, nogil=True, inline="always")
@typing.no_type_check
def _mix(z):
    """Finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit(cache=True, nogil=True, inline="always")
@typing.no_type_check
def _shuffled(v, num_nodes, mask, shift, key):
    """A permutation of 0 .. num_nodes - 1: rounds on all bits, again until the result is one."""
    x = np.uint64(v)
    while True:
        x = ((x ^ key) * np.uint64(0x9E3779B97F4A7C15)) & mask
        x ^= x >> shift
        x = (x * np.uint64(0xBF58476D1CE4E5B9)) & mask
        x ^= x >> shift
        x = (x * np.uint64(0x94D049BB133111EB)) & mask
        x ^= x >> shift
        if x < num_nodes:
            return np.int64(x)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _draw(drawn, out, ends, first, count, num_nodes, size, key, quadrants):
    """Edges first .. first + count, both ways, sorted by the range of their target."""
    levels = 1
    while (1 << levels) < num_nodes:
        levels += 1
    pairs = (levels + 1) // 2
    odd = 2 * pairs - levels
    n = np.uint64(num_nodes)
    mask = (np.uint64(1) << np.uint64(levels)) - np.uint64(1)
    shift = np.uint64((levels + 1) // 2)
    for i in range(count):
        state = key + np.uint64(first + i) * np.uint64(0x9E3779B97F4A7C15)
        while True:
            u = np.int64(0)
            v = np.int64(0)
            word = np.uint64(0)
            for p in range(pairs):
                if p % _PER_WORD == 0:
                    state = _mix(state + np.uint64(0xD1B54A32D192ED03))
                    word = state
                bits = np.int64(quadrants[word & np.uint64(0xFFFF)])
                word >>= np.uint64(_BITS)
                u = (u << 2) | (bits >> 2)
                v = (v << 2) | (bits & 3)
            u >>= odd  # the last level of an odd number is not asked for
            v >>= odd
            if u < num_nodes and v < num_nodes and u != v:
                break
        s = _shuffled(u, n, mask, shift, key)
        t = _shuffled(v, n, mask, shift, key)
        drawn[2 * i, 0] = s
        drawn[2 * i, 1] = t
        drawn[2 * i + 1, 0] = t
        drawn[2 * i + 1, 1] = s
        ends[s // size + 1] += 1
        ends[t // size + 1] += 1
    for b in range(1, ends.size):
        ends[b] += ends[b - 1]
    place = ends[:-1].copy()
    for i in range(2 * count):
        b = drawn[i, 0] // size
        out[place[b], 0] = drawn[i, 0]
        out[place[b], 1] = drawn[i, 1]
        place[b] += 1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count(edges, low, length):
    for i in range(edges.shape[0]):
        length[edges[i, 0] - low] += 1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _fill(edges, low, place, found):
    """Append each source to its target's list; `place` moves on."""
    for i in range(edges.shape[0]):
        v = edges[i, 0] - low
        found[place[v]] = edges[i, 1]
        place[v] += 1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _sort_lists(found, length):
    """Sort each list and close the gaps of repeated entries in place; entries that are left."""
    begin = 0
    kept = 0
    for v in range(length.size):
        mine = np.sort(found[begin : begin + length[v]])
        begin += length[v]
        start = kept
        for k in range(mine.size):
            if k == 0 or mine[k] != mine[k - 1]:
                found[kept] = mine[k]
                kept += 1
        length[v] = kept - start
    return kept
