import numpy as np

from gnnplan.runtime.models.kernels import FullNeighbourhoods, count_work, vertices_per_layer


def test_layers_need_the_neighbours_of_the_next_one(make_csc):
    indptr, indices = make_csc(80, 3, 2)
    layers = vertices_per_layer(indptr, indices, np.array([5, 3, 3]), 3)
    assert layers[2].tolist() == [3, 5]
    for inner, outer in ((layers[2], layers[1]), (layers[1], layers[0])):
        lists = [indices[indptr[v] : indptr[v + 1]] for v in inner]
        assert outer.tolist() == sorted({*inner.tolist(), *np.concatenate(lists).tolist()})


def test_work_counts_vertices_and_their_edges(make_csc):
    indptr, _ = make_csc(80, 6, 2)
    rows = np.arange(0, 80, 2)
    expected = np.cumsum([indptr[v + 1] - indptr[v] + 1 for v in rows])
    for kind in (np.int64, np.int32):
        assert count_work(rows, indptr.astype(kind)).tolist() == expected.tolist()


def test_full_blocks_hold_every_in_neighbour_and_the_destinations_first(make_csc):
    indptr, indices = make_csc(80, 6, 2, self_loops=True)
    full = FullNeighbourhoods(indptr, indices)
    for rows in (np.array([9, 2, 40]), np.array([2, 3]), np.array([], np.int64)):
        batch = full.batch(rows)
        block = batch.blocks[0]
        assert batch.n_id[: len(rows)].tolist() == rows.tolist()
        assert len(set(batch.n_id.tolist())) == block.num_src
        for i, v in enumerate(rows):
            found = batch.n_id[block.indices[block.indptr[i] : block.indptr[i + 1]]]
            assert found.tolist() == indices[indptr[v] : indptr[v + 1]].tolist()
