"""Datasets under the graph roots."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from gnnplan.api.errors import ForbiddenError, NotFoundError
from gnnplan.api.fingerprints import graph_fingerprint
from gnnplan.api.security import OutsideRootsError, dataset_folder
from gnnplan.api.service.context import Service
from gnnplan.planner.client.resources import GraphDetail, GraphSummary
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.format import META_FILE, GraphMeta, read_meta

DEPTH = 3
"""Folders below a root that are looked into."""
MOST_FOLDERS = 5000


def graph_folder(service: Service, name: str) -> Path:
    """The folder of a dataset that a request names.

    Raises:
        ForbiddenError: it leads out of the graph roots.
        InputError: there is none.
    """
    try:
        return dataset_folder(service.graph_roots, name)
    except OutsideRootsError as error:
        raise ForbiddenError(str(error), kind="outside-roots") from None


def list_graphs(service: Service) -> list[GraphSummary]:
    """Datasets at most three folders below the roots, by name."""
    found: dict[str, GraphSummary] = {}
    for root in service.graph_roots:
        for folder in _datasets(root):
            name = str(folder.relative_to(root))
            try:
                if name not in found:
                    dataset_folder([root], name)
                    found[name] = _summary(name, read_meta(folder))
            except InputError:
                continue  # damaged, or a way out of the root: whoever names it is told why
    return [found[name] for name in sorted(found)]


def get_graph(service: Service, name: str) -> GraphDetail:
    """One dataset.

    Raises:
        NotFoundError: there is none of that name.
        ForbiddenError: the name leads out of the roots.
        DatasetError: it is damaged.
    """
    try:
        folder = graph_folder(service, name)
    except InputError:
        raise NotFoundError(f"no graph {name}") from None
    if not (folder / META_FILE).is_file():
        raise NotFoundError(f"no graph {name}")
    meta = read_meta(folder)
    return GraphDetail(
        **asdict(_summary(name, meta)),
        fingerprint=graph_fingerprint(folder),
        feature_dtype=meta.feature_dtype,
        node_types=meta.node_types,
        edge_types=meta.edge_types,
        notes=meta.notes,
    )


def _summary(name: str, meta: GraphMeta) -> GraphSummary:
    return GraphSummary(
        id=name,
        name=meta.name,
        num_nodes=meta.num_nodes,
        num_edges=meta.num_edges,
        feature_dim=meta.feature_dim,
        num_classes=meta.num_classes,
        task=str(meta.task),
    )


def _datasets(root: Path) -> Iterator[Path]:
    """Folders with a graph.json, links not followed."""
    for seen, (place, folders, files) in enumerate(os.walk(root)):
        here = Path(place)
        if META_FILE in files:
            yield here
        depth = len(here.relative_to(root).parts)
        if META_FILE in files or depth >= DEPTH or seen > MOST_FOLDERS:
            folders.clear()
        folders[:] = sorted(f for f in folders if not f.startswith("."))
