"""The streaming conversion equals an in-memory reference, whatever the number of buckets."""

import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings, strategies as st

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph import csc
from gnnplan.runtime.graph.csc import (
    BUCKET_BYTES_PER_EDGE,
    EdgeOptions,
    array_edges,
    bucket_bounds,
    build_csc,
    csc_edges,
    estimate_need,
    number_edges,
)
from gnnplan.runtime.graph.staging import Staging


def convert(folder: Path, source, num_nodes: int, options=None, limit_edges: int = 1 << 20):
    with Staging(folder / "target") as staging:
        total = build_csc(
            source,
            num_nodes,
            staging,
            options=options,
            memory_limit_bytes=limit_edges * BUCKET_BYTES_PER_EDGE,
        )
        assert not list(staging.folder.glob("*.tmp"))
        out = {path.stem: np.load(path) for path in staging.folder.glob("*.npy")}
    assert len(out["indices"]) == total
    return out


def reference(src, dst, num_nodes, options: EdgeOptions):
    """The same by scipy, in memory: entry (v, u) of A counts the edges u -> v."""
    if options.self_loops == "remove":
        src, dst = src[src != dst], dst[src != dst]
    A = sp.coo_matrix((np.ones(len(src)), (dst, src)), shape=(num_nodes, num_nodes)).tocsr()
    A.sum_duplicates()
    if options.symmetrise:
        A = A + A.T - sp.diags(A.diagonal())
    if options.self_loops == "add":
        A = A + sp.diags((A.diagonal() == 0).astype(float))
    A = A.tocsr()
    A.eliminate_zeros()
    A.sort_indices()
    if options.deduplicate:
        A.data[:] = 1
    counts = A.data.round().astype(int)
    indptr = np.concatenate([[0], np.cumsum(counts)])[A.indptr]
    return indptr, np.repeat(A.indices, counts)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_streaming_equals_the_in_memory_reference(tmp_path: Path, data):
    num_nodes = data.draw(st.integers(1, 30))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    src, dst = rng.integers(0, num_nodes, (2, data.draw(st.integers(0, 120))))
    options = EdgeOptions(
        symmetrise=data.draw(st.booleans()),
        self_loops=data.draw(st.sampled_from(["keep", "add", "remove"])),
        deduplicate=data.draw(st.booleans()),
    )
    got = convert(
        tmp_path, array_edges(src, dst), num_nodes, options, data.draw(st.integers(1, 60))
    )
    indptr, indices = reference(src, dst, num_nodes, options)
    np.testing.assert_array_equal(got["indptr"], indptr)
    np.testing.assert_array_equal(got["indices"], indices)


@pytest.mark.parametrize("limit_edges", [100, 1 << 20])
def test_attributes_stay_with_their_edges_in_the_order_of_the_source(
    tmp_path: Path, limit_edges: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(csc, "CHUNK_EDGES", 64)
    rng = np.random.default_rng(5)
    src, dst = rng.integers(0, 20, (2, 1000))
    number = np.arange(1000, dtype=np.int32)
    edges = array_edges(src, dst, edge_type=number)
    got = convert(tmp_path, edges, 20, limit_edges=limit_edges)
    order = np.lexsort([number, src, dst])
    np.testing.assert_array_equal(got["edge_type"], order)
    np.testing.assert_array_equal(got["indices"], src[order])
    first = convert(tmp_path, edges, 20, EdgeOptions(deduplicate=True), limit_edges)
    keys = dst.astype(np.int64) * 20 + src
    np.testing.assert_array_equal(first["edge_type"], np.unique(keys, return_index=True)[1])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_each_stored_edge_names_the_edge_of_the_source_that_it_is(tmp_path: Path, data):
    num_nodes = data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    src, dst = rng.integers(0, num_nodes, (2, data.draw(st.integers(1, 80))))
    options = EdgeOptions(
        symmetrise=data.draw(st.booleans()),
        self_loops=data.draw(st.sampled_from(["keep", "add", "remove"])),
        deduplicate=data.draw(st.booleans()),
    )
    source, limit = number_edges(array_edges(src, dst)), data.draw(st.integers(1, 60))
    got = convert(tmp_path, source, num_nodes, options, limit)
    stored_dst = np.repeat(np.arange(num_nodes), np.diff(got["indptr"]))
    ids = got.get("edge_id", np.arange(len(stored_dst)))
    assert ids.dtype == np.int64
    for u, v, k in zip(got["indices"].tolist(), stored_dst.tolist(), ids.tolist(), strict=True):
        if k == -1:
            assert (u, options.self_loops) == (v, "add")
            assert not ((src == v) & (dst == v)).any()
            continue
        same = (u, v) == (src[k], dst[k])
        assert same or (options.symmetrise and (v, u) == (src[k], dst[k]))
        if options.deduplicate:
            # Source order is kept: given edges before mirrored ones within what was read at once.
            equal = np.flatnonzero((src == u) & (dst == v))
            assert k == (equal[0] if len(equal) else np.flatnonzero((src == v) & (dst == u))[0])
    if not options.deduplicate:
        times = 2 if options.symmetrise else 1
        given_ids = np.arange(len(src))[(src != dst) | (options.self_loops != "remove")]
        counts = np.bincount(ids[ids >= 0], minlength=len(src))
        loops = (src == dst)[given_ids]
        np.testing.assert_array_equal(counts[given_ids], np.where(loops, 1, times))


def test_no_numbers_are_kept_where_the_order_is_the_sources(tmp_path: Path):
    indptr, indices = np.array([0, 2, 2, 5]), np.array([0, 2, 0, 1, 1], np.int32)
    assert "edge_id" not in convert(tmp_path, number_edges(csc_edges(indptr, indices)), 3)
    unsorted = number_edges(csc_edges(indptr, indices[[1, 0, 2, 3, 4]]))
    assert convert(tmp_path, unsorted, 3)["edge_id"].tolist() == [1, 0, 2, 3, 4]
    assert "edge_id" not in convert(tmp_path, csc_edges(indptr, indices[[1, 0, 2, 3, 4]]), 3)


def test_added_self_loops_weigh_one(tmp_path: Path):
    weights = np.array([0.5, 0.25], np.float32)
    edges = array_edges(np.array([0, 1]), np.array([1, 1]), edge_weight=weights)
    got = convert(tmp_path, edges, 3, EdgeOptions(self_loops="add"))
    assert got["indices"].tolist() == [0, 0, 1, 2]
    assert got["edge_weight"].tolist() == [1.0, 0.5, 0.25, 1.0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
def test_a_csc_source_round_trips(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(csc, "CHUNK_EDGES", chunk)
    indptr = np.array([0, 0, 3, 3, 4, 4, 6, 6])
    indices = np.array([1, 4, 6, 0, 2, 2], np.int32)
    got = convert(tmp_path, csc_edges(indptr, indices), 7, limit_edges=2)
    np.testing.assert_array_equal(got["indptr"], indptr)
    np.testing.assert_array_equal(got["indices"], indices)


def test_buckets_overrun_the_aim_by_less_than_the_in_edges_of_their_first_node():
    rng = np.random.default_rng(0)
    counts = np.minimum(rng.zipf(1.5, 500), 2000)
    for aim in (1, 7, 40, 10**6):
        bounds = bucket_bounds(counts, aim)
        assert (bounds[0], bounds[-1]) == (0, 500)
        size = max(aim, -(-int(counts.sum()) // csc.MAX_BUCKETS))
        for low, high in itertools.pairwise(bounds.tolist()):
            assert counts[low:high].sum() < size + counts[low]


def test_the_need_is_told_before_any_edge_is_read(tmp_path: Path):
    events: list[str] = []

    def chunks():
        events.append("read")
        yield {"src": np.array([0]), "dst": np.array([1])}

    source = csc.EdgeSource(num_edges=1, chunks=chunks)
    with Staging(tmp_path / "t") as staging:
        build_csc(source, 2, staging, report=events.append)
    assert "COO to CSC needs about" in events[0]
    assert events[1:] == ["read", "read"]


def test_the_need_in_bytes_follows_the_sizes():
    # By hand: 1000 edges symmetrised are 2000 of 8 bytes; 500 fit, so 4 buckets of 500.
    need = estimate_need(
        100,
        1000,
        options=EdgeOptions(symmetrise=True),
        memory_limit_bytes=500 * BUCKET_BYTES_PER_EDGE,
    )
    assert need.num_buckets == 4
    assert need.scratch_disk_bytes == 16_000
    assert need.output_disk_bytes == 8 * 101 + 4 * 2000


def test_the_result_takes_no_more_disk_than_was_said(tmp_path: Path):
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 100, (2, 1_000_000))
    edges = number_edges(array_edges(src, dst, edge_weight=np.ones(1_000_000, np.float32)))
    said: list[str] = []
    with Staging(tmp_path / "t") as staging:
        build_csc(edges, 100, staging, report=said.append)
        written = sum(np.load(path).nbytes for path in staging.folder.glob("*.npy"))
    assert written == 8 * 101 + (4 + 8 + 4) * 1_000_000
    need = estimate_need(100, 1_000_000, options=EdgeOptions(), record_bytes=16, stored_bytes=16)
    assert need.output_disk_bytes == written
    assert said == [str(need)]


def test_memory_stays_within_the_estimate(tmp_path: Path):
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 50_000, (2, 3_000_000)).astype(np.int32)
    limit = 16 << 20
    edges = number_edges(array_edges(src, dst, edge_weight=np.ones(len(src), np.float32)))
    need = estimate_need(50_000, len(src), options=EdgeOptions(), memory_limit_bytes=limit)
    tracemalloc.start()
    try:
        with Staging(tmp_path / "t") as staging:
            build_csc(edges, 50_000, staging, memory_limit_bytes=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= need.memory_bytes
    assert need.memory_bytes < BUCKET_BYTES_PER_EDGE * len(src)


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_edge_out_of_range_is_refused(tmp_path: Path, bad: int):
    with pytest.raises(DatasetError, match=f"from 0 to 4, found {bad}"):
        convert(tmp_path, array_edges(np.array([0, bad]), np.array([1, 2])), 5)
    assert list(tmp_path.iterdir()) == []
