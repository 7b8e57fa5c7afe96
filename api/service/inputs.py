"""What plans are made of: datasets under the graph roots, presets, uploaded machines."""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gnnplan.api.errors import ForbiddenError, NotFoundError, UnprocessableError
from gnnplan.api.requests import graph_fingerprint
from gnnplan.api.resources import machine_of
from gnnplan.api.security import OutsideRootsError, dataset_folder
from gnnplan.api.service.context import Service
from gnnplan.api.storage.database import Page, make_storable
from gnnplan.api.storage.tables import MachineRow
from gnnplan.planner.client.resources import GraphDetail, GraphSummary, MachineSummary
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import SCHEMA_VERSION, MachineModel, check_machine, load_machine
from gnnplan.planner.probe.presets import is_preset, list_presets, load_preset
from gnnplan.planner.queries.estimate import Estimates, EstimateSettings, estimate
from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.format import META_FILE, GraphMeta, read_meta

DEPTH = 3
"""Levels of folders below a root that are searched."""
MOST_FOLDERS = 5000


def graph_folder(service: Service, name: str) -> Path:
    """Return the folder of a dataset; refuse one outside the graph roots, or raise InputError."""
    try:
        return dataset_folder(service.settings.graph_roots, name)
    except OutsideRootsError as error:
        raise ForbiddenError(str(error), kind="outside-roots") from None


def list_graphs(service: Service) -> list[GraphSummary]:
    """List the datasets below the roots by name."""
    found: dict[str, GraphSummary] = {}
    for root in service.settings.graph_roots:
        for folder in _datasets(root):
            name = str(folder.relative_to(root))
            try:
                if name not in found and name == make_storable(name):  # else none could ask for it
                    dataset_folder([root], name)
                    found[name] = _summary(name, read_meta(folder))
            except InputError:
                continue  # damaged, or a way out of the root: whoever names it is told why
    return [found[name] for name in sorted(found)]


def get_graph(service: Service, name: str) -> GraphDetail:
    """Describe a dataset, named by its folder below a graph root, or raise NotFoundError."""
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
        name=make_storable(meta.name),
        num_nodes=meta.num_nodes,
        num_edges=meta.num_edges,
        feature_dim=meta.feature_dim,
        num_classes=meta.num_classes,
        task=str(meta.task),
    )


def _datasets(root: Path) -> Iterator[Path]:
    """Yield folders that hold a graph.json; links are not followed."""
    for seen, (place, folders, files) in enumerate(os.walk(root)):
        here = Path(place)
        if META_FILE in files:
            yield here
        depth = len(here.relative_to(root).parts)
        if META_FILE in files or depth >= DEPTH or seen > MOST_FOLDERS:
            folders.clear()
        folders[:] = sorted(f for f in folders if not f.startswith("."))


def list_machines(
    service: Service, *, cursor: str | None = None, limit: int = 50
) -> Page[MachineSummary]:
    """List presets (on the first page), then uploaded machines, newest first."""
    uploads = service.storage.database.page(MachineRow, cursor=cursor, limit=limit)
    items = [machine_of(row) for row in uploads.items]
    if cursor is None:
        presets = [
            MachineSummary(id=name, name=name, origin="preset", provenance="preset")
            for name in list_presets()
        ]
        items = presets + items
    return Page(items=items, next_cursor=uploads.next_cursor)


def upload_machine(service: Service, document: dict[str, Any]) -> MachineSummary:
    """Store a machine file that `gnnplan probe` wrote; equal contents are one machine."""
    try:
        machine = codec.decode(MachineModel, document)
        check_machine(machine)
    except (ValueError, MachineError) as error:
        raise UnprocessableError(f"expected a machine file of gnnplan probe: {error}") from None
    if machine.schema_version != SCHEMA_VERSION:
        raise UnprocessableError(
            f"expected schema_version {SCHEMA_VERSION}, found {machine.schema_version}"
        )
    row = MachineRow(
        id=codec.content_hash(machine)[:32],
        name=make_storable(machine.name)[:200],
        fingerprint=make_storable(machine.fingerprint)[:128],
        provenance=machine.provenance,
        sha256=service.storage.artefacts.put(codec.dumps(machine).encode()),
        created_seconds=time.time(),
    )
    service.storage.catalogue.add_machine(row)
    kept = service.storage.database.get(MachineRow, row.id)
    return machine_of(kept or row)


def machine_model(service: Service, name: str) -> MachineModel:
    """Return a machine by the name that requests use."""
    if is_preset(name):
        try:
            return load_preset(name)
        except MachineError as error:
            raise NotFoundError(str(error)) from None
    row = _uploaded(service, name)
    return load_machine(service.storage.artefacts.path(row.sha256))


def machine_reference(service: Service, name: str | None) -> dict[str, str] | None:
    """Name a machine for a job: a preset, a file, or None for this machine."""
    if name is None:
        return None
    try:
        if is_preset(name):
            load_preset(name)
            return {"preset": name}
        row = _uploaded(service, name)
    except (MachineError, NotFoundError) as error:
        raise UnprocessableError(str(error), kind="unknown-machine") from None
    return {"file": str(service.storage.artefacts.path(row.sha256).resolve())}


def _uploaded(service: Service, name: str) -> MachineRow:
    row = None
    if re.fullmatch(r"[0-9a-f]{32}", name):
        row = service.storage.database.get(MachineRow, name)
    if row is None:
        known = ", ".join(list_presets())
        raise NotFoundError(f"expected a preset ({known}) or an uploaded machine, found {name!r}")
    return row


def estimates_of(
    service: Service, settings: EstimateSettings, graph: str | None = None
) -> Estimates:
    """Estimate a training on presets; `graph` names a dataset whose sizes are taken."""
    uploads = [n for n in (settings.machine or "").split(",") if n and not is_preset(n.strip())]
    if uploads:
        known = ", ".join(list_presets())
        raise UnprocessableError(
            f"machine: expected presets ({known}), found {uploads[0][:60]!r}",
            kind="unknown-machine",
        )
    return estimate(settings, None if graph is None else graph_folder(service, graph))
