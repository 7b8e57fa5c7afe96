"""View a mini-batch as PyG's NeighborLoader would have given it, for users' own training loops.

A view may be padded: each hop's nodes, and its edges, then begin at the same place in every batch.
What a hop leaves free are rows without a node and edges that join such rows, so that no layer of
messages adds anything to a node's row.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gnnplan.runtime.errors import InputError, SamplerError
from gnnplan.runtime.graph.dataset import Graph, GraphTypes, rows_within_types
from gnnplan.runtime.sampling.memory import HopShapes
from gnnplan.runtime.sampling.minibatch import IGNORED, Dialect, MiniBatch

if TYPE_CHECKING:
    from torch import Tensor
    from torch_geometric.data import Data, HeteroData

    from gnnplan.runtime.sampling.gpu.hops import DeviceBatch


def to_pyg(
    batch: "MiniBatch | DeviceBatch", x: Any = None, y: Any = None, *, notes: Sequence[str] = ()
) -> "Data":
    """View a first_seen batch as `torch_geometric.data.Data`.

    What a device drew stays there.

    Fields: x, y, edge_index (source, destination), n_id with the seeds first, e_id (places in the
    graph's `indices`) where the sampler kept edge ids, input_id, batch_size, num_sampled_nodes and
    num_sampled_edges (lists); where the sampler weights, edge_weight, and weights_of_sampler is
    True; for links src_index, dst_pos_index and dst_neg_index as LinkLoader gives them for
    triplets: dst_neg_index is [num_links, num_negatives], or [num_links] with one negative each.

    Args:
        batch: In the first_seen dialect.
        x: Feature rows of `batch.n_id`, a tensor or array [num_input, ...], or None.
        y: Labels of `batch.n_id` (all nodes, not only the seeds), likewise; handed out where the
            rows of x lie.
        notes: Lines of the dataset's import, which explain fields that the batch lacks.
    """
    import torch

    from gnnplan.runtime.sampling.pyg_data import LoadedData, tell

    if batch.dialect is not Dialect.FIRST_SEEN:
        raise SamplerError(
            f"expected a first_seen batch for a PyG Data, found {batch.dialect.value}: a vertex "
            "draws anew at each hop; wrap the model with runtime.models.planned instead"
        )
    outer = batch.blocks[0]
    data = LoadedData(
        edge_index=_edge_index(outer),
        n_id=_tensor(batch.n_id),
        input_id=torch.from_numpy(batch.input_id),
        batch_size=len(batch.seeds),
        num_sampled_nodes=list(batch.num_sampled_nodes),
        num_sampled_edges=list(batch.num_sampled_edges),
    )
    tell(data, notes)
    data.num_nodes = len(batch.n_id)
    for name, rows in (("x", x), ("y", y)):
        if rows is not None:
            data[name] = torch.as_tensor(_one_row_per_node(name, rows, len(batch.n_id)))
    if x is not None and y is not None:
        data["y"] = data["y"].to(data["x"].device)
    if batch.links is not None:
        links = _tensor(batch.links)
        data.src_index, data.dst_pos_index = links[:, 0], links[:, 1]
        data.dst_neg_index = links[:, 2:].squeeze(1)
    if outer.e_id is not None:
        data.e_id = _tensor(outer.e_id)
    if outer.weight is not None:
        data.edge_weight, data.weights_of_sampler = _tensor(outer.weight), True
    return data


def _tensor(values: Any) -> "Tensor":
    import torch

    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def _edge_index(block: Any) -> "Tensor":
    import torch

    if not isinstance(block.indices, torch.Tensor):
        ends = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
        return torch.stack([_tensor(block.indices.astype(np.int64)), _tensor(ends)])
    rows = torch.arange(block.num_dst, device=block.indices.device)
    count = block.indices.shape[0]
    ends = torch.repeat_interleave(rows, block.indptr.diff(), output_size=count)
    return torch.stack([block.indices.long(), ends])


def pad_pyg(
    data: "Data", shapes: HopShapes, labels: Any, of_nodes: Iterable[str], of_edges: Iterable[str]
) -> "Data":
    """Return a batch padded to fixed shapes, or as it is where it does not fit.

    Either has node_mask, edge_mask, seed_mask and, of links, link_mask (bool), true where there is
    no padding, and `padded` says which it is. y is `IGNORED` in all rows but the seeds'; links of
    padding join a row of padding.

    Args:
        data: Of `to_pyg`, with further fields.
        shapes: Sizes of padded batches.
        labels: Labels of the seeds, [batch_size] or [batch_size, C]; None: none.
        of_nodes: Fields with a row per node; of padding 0.
        of_edges: Fields with a row per edge, likewise.
    """
    import torch

    nodes, edges, num_seeds = data.num_sampled_nodes, data.num_sampled_edges, data.batch_size
    data.padded = shapes.fits(nodes, edges)
    of_links = ("src_index", "dst_pos_index", "dst_neg_index") if shapes.links else ()
    links = len(data.input_id)
    if not data.padded:
        shapes = HopShapes(num_seeds, tuple(nodes), tuple(edges), links if of_links else 0)
    ends: Tensor = data["edge_index"]
    device = ends.device
    data.edge_index = _pad_edges(ends, nodes, edges, shapes)
    for names, counts, rooms in ((of_nodes, nodes, shapes.nodes), (of_edges, edges, shapes.edges)):
        for name in names:
            data[name] = _pad(data[name], counts, rooms)
    for name, counts, rooms in (
        ("node_mask", nodes, shapes.nodes),
        ("edge_mask", edges, shapes.edges),
        ("seed_mask", [num_seeds], [shapes.batch_size]),
        *([("link_mask", [links], [shapes.links])] if of_links else []),
    ):
        data[name] = _pad(torch.ones(sum(counts), dtype=torch.bool, device=device), counts, rooms)
    for name in of_links:
        data[name] = _pad(data[name], [links], [shapes.links], num_seeds)
    most = shapes.links if of_links else shapes.batch_size
    data.input_id = _pad(data.input_id, [links], [most])
    if labels is not None:
        rest = IGNORED if labels.dtype.is_signed else 0
        data.y = _pad(labels, [num_seeds], [sum(shapes.nodes)], rest)
    data.num_nodes, data.batch_size = sum(shapes.nodes), shapes.batch_size
    data.num_sampled_nodes, data.num_sampled_edges = list(shapes.nodes), list(shapes.edges)
    return data


def _pad(values: "Tensor", counts: Sequence[int], rooms: Sequence[int], rest: int = 0) -> "Tensor":
    """Copy stretches of rows to where their rooms begin, and fill what the rooms leave free."""
    if list(counts) == list(rooms):
        return values
    out = values.new_empty((sum(rooms), *values.shape[1:]))
    begin = place = 0
    for count, room in zip(counts, rooms, strict=True):
        out[place : place + count] = values[begin : begin + count]
        out[place + count : place + room] = rest
        begin, place = begin + count, place + room
    return out


def _pad_edges(
    ends: "Tensor", nodes: Sequence[int], edges: Sequence[int], shapes: HopShapes
) -> "Tensor":
    """Renumber the ends of edges; padding joins each free row of the destinations' hop to itself.

    Edges stay in the order of their destinations.
    """
    import torch

    ids = torch.arange(sum(nodes), device=ends.device)
    starts = [0, *itertools.accumulate(shapes.nodes)]
    places = torch.cat(
        [part - part[:1] + start for part, start in zip(ids.split(nodes), starts, strict=False)]
    )
    parts: list[Tensor] = []
    for hop, part in enumerate(places[ends].split(edges, dim=1)):
        more = shapes.edges[hop] - edges[hop]
        free = shapes.nodes[hop] - nodes[hop]
        rest = torch.arange(more, device=ends.device) * free // max(more, 1)
        parts += [part, (rest + starts[hop] + nodes[hop]).expand(2, more)]
    return torch.cat(parts, dim=1)


def _one_row_per_node(name: str, rows: Any, num_nodes: int) -> Any:
    if len(rows) != num_nodes:
        raise SamplerError(
            f"expected {name} with one row per node of the batch ({num_nodes}), found {len(rows)}; "
            f"pass {name}[batch.n_id]"
        )
    return rows


class HeteroView:
    """Turns batches of one typed graph into HeteroData.

    Edge types have to be named `source__relation__destination`, of the graph's node types.
    """

    def __init__(self, graph: Graph, types: GraphTypes) -> None:
        self._keys = [_triple(name, types.node_types) for name in types.edge_types]
        self._types, self._notes = types, graph.meta.notes
        self._y = graph.y
        node_type = graph.node_type
        if node_type is None or not graph.x_by_type:
            node_type = np.zeros(graph.num_nodes, np.int32)
        self._node_type = np.ascontiguousarray(node_type)
        # Of a batch without seeds, whose number a script asks for all the same.
        self._seeds_type = int(next(iter(self._node_type[graph.train_idx[:1]]), 0))
        self._row_of = rows_within_types(self._node_type, len(types.node_types))

    def __call__(self, batch: MiniBatch, x: Any = None) -> "HeteroData":
        """View a first_seen batch of a `TypedSampler`, with seeds of one type.

        Per node type: n_id (rows of the type's own table), x (its own columns of [num_input, widest
        type]), y beside it, and num_sampled_nodes by hop; per edge type: edge_index,
        num_sampled_edges by hop, and e_id (positions in the dataset's `indices`) where the sampler
        kept edge ids. The seeds' type has batch_size and input_id, its seeds first; without any it
        is that of the graph's first training node.
        """
        import torch

        from gnnplan.runtime.sampling.pyg_data import LoadedHeteroData, tell

        outer = batch.blocks[0]
        if batch.dialect is not Dialect.FIRST_SEEN or outer.relation_ptr is None:
            raise SamplerError(
                "expected a first_seen batch of a TypedSampler for a HeteroData, found "
                f"{batch.dialect.value}{'' if outer.relation_ptr is not None else ', not typed'}"
            )
        node_type = self._node_type[batch.n_id]
        if len(np.unique(node_type[: batch.num_seeds])) > 1:
            raise SamplerError("expected seeds of one node type for a HeteroData, found several")
        data = LoadedHeteroData()
        tell(data, self._notes)
        hop_of_node = np.repeat(np.arange(len(batch.num_sampled_nodes)), batch.num_sampled_nodes)
        local = rows_within_types(node_type, len(self._types.node_types))
        for number, name in enumerate(self._types.node_types):
            own = np.flatnonzero(node_type == number)
            store = data[name]
            store.num_nodes = len(own)
            store.n_id = torch.from_numpy(self._row_of[batch.n_id[own]])
            store.num_sampled_nodes = _counts(hop_of_node[own], len(batch.num_sampled_nodes))
            if x is not None:
                store.x = x[torch.from_numpy(own), : self._types.widths[number]]
            if self._y is not None:
                labels = torch.from_numpy(np.ascontiguousarray(self._y[batch.n_id[own]]))
                store.y = labels if x is None else labels.to(x.device)
        self._add_edges(data, batch, local, hop_of_node)
        seeds_type = int(node_type[0]) if batch.num_seeds else self._seeds_type
        seeds = data[self._types.node_types[seeds_type]]
        seeds.batch_size, seeds.input_id = batch.num_seeds, torch.from_numpy(batch.input_id)
        return data

    def _add_edges(self, data: "HeteroData", batch: MiniBatch, local: Any, hop_of: Any) -> None:
        import torch

        outer = batch.blocks[0]
        assert outer.relation_ptr is not None
        sizes = np.diff(outer.relation_ptr)
        relation = np.repeat(np.arange(len(sizes)) % len(self._keys), sizes)
        destination = np.repeat(np.arange(len(sizes)) // len(self._keys), sizes)
        for number, key in enumerate(self._keys):
            own = np.flatnonzero(relation == number)
            to = destination[own]
            store = data[key]
            store.edge_index = torch.from_numpy(np.stack([local[outer.indices[own]], local[to]]))
            store.num_sampled_edges = _counts(hop_of[to], len(batch.blocks))
            if outer.e_id is not None:
                store.e_id = torch.from_numpy(outer.e_id[own])


def _counts(hops: Any, num_hops: int) -> list[int]:
    return np.bincount(hops, minlength=num_hops).tolist()


def _triple(name: str, node_types: list[str]) -> tuple[str, str, str]:
    parts = name.split("__")
    if len(parts) != 3 or parts[0] not in node_types or parts[2] not in node_types:
        raise SamplerError(
            "expected edge types named source__relation__destination, with node types among "
            f"{', '.join(node_types)}, found {name!r}; iterate blocks, or rename it in graph.json"
        )
    return parts[0], parts[1], parts[2]


NO_EDGE = np.iinfo(np.int64).min
"""`e_id` of a self-loop that import added, which is no edge of the source.

It is an error as an index, where -1 would take the last edge's row.
"""


def columns_of(
    what: str, given: Mapping[Any, Any] | None, sizes: Mapping[str, int] | int | None
) -> dict[str, Any]:
    """Return columns after a look at their numbers of rows; by type where sizes are."""
    import torch

    found: dict[str, Any] = {}
    for name, rows in (given or {}).items():
        if isinstance(sizes, Mapping):
            if name not in sizes or not isinstance(rows, Mapping):
                raise InputError(
                    f"{what}: expected columns by node type among {', '.join(sizes)}, found "
                    f"{name!r:.60}"
                )
            found[name] = columns_of(f"{what}[{name!r}]", rows, sizes[name])
            continue
        column = rows if isinstance(rows, torch.Tensor) else np.asarray(rows)
        if sizes is not None and (column.ndim == 0 or len(column) != sizes):
            raise InputError(
                f"{what}: expected {name} with one row for each of {sizes} nodes, found shape "
                f"{list(column.shape)}"
            )
        found[name] = column
    return found


def take_rows(rows: Any, ids: "Tensor") -> "Tensor":
    """Return rows of a tensor, or of an array that may be mapped from a file."""
    import torch

    host = ids.cpu()
    found = rows[host] if isinstance(rows, torch.Tensor) else torch.from_numpy(rows[host.numpy()])
    return found.to(ids.device)


def take_edge_rows(name: str, rows: Any, e_id: "Tensor") -> "Tensor":
    """Return the rows of a batch's edges, by their places in the source."""
    if e_id.numel() and not 0 <= int(e_id.min()) <= int(e_id.max()) < len(rows):
        if int(e_id.min()) == NO_EDGE:
            raise InputError(
                f"edge_data: expected a row of {name} for each edge, found self-loops that import "
                "added, which have none; import without --self-loops add"
            )
        raise InputError(
            f"edge_data: expected {name} with a row per edge of the source, found {len(rows)} rows "
            f"and an edge {int(e_id.max())}"
        )
    return take_rows(rows, e_id)


def label_links(data: Any) -> None:
    """Put links in PyG's binary form: `edge_label_index` and `edge_label`, negatives last."""
    import torch

    source, negative = data.src_index, data.dst_neg_index
    count = 1 if negative.dim() == 1 else negative.shape[1]
    positives = torch.stack([source, data.dst_pos_index])
    negatives = torch.stack([source.repeat_interleave(count), negative.reshape(-1)])
    data.edge_label_index = torch.cat([positives, negatives], dim=1)
    data.edge_label = torch.cat([torch.ones(len(source)), torch.zeros(negatives.shape[1])])
    if "link_mask" in data:
        data.edge_label = data.edge_label.to(source.device)
        data.edge_label_mask = torch.cat([data.link_mask, data.link_mask.repeat_interleave(count)])
    for name in ("src_index", "dst_pos_index", "dst_neg_index"):
        del data[name]
