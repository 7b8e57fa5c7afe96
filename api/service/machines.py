"""Machines: presets that come with gnnplan, and probes that were uploaded."""

import re
import time
from typing import Any

from gnnplan.api.errors import NotFoundError, UnprocessableError
from gnnplan.api.resources import machine_of
from gnnplan.api.service.context import Service
from gnnplan.api.storage.database import Page
from gnnplan.api.storage.tables import MachineRow
from gnnplan.planner.client.resources import MachineSummary
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import SCHEMA_VERSION, MachineModel, check_machine, load_machine
from gnnplan.planner.probe.presets import is_preset, list_presets, load_preset
from gnnplan.runtime import codec


def list_machines(service: Service, *, cursor: str | None = None, limit: int = 50) -> Page[Any]:
    """Presets (on the first page), then uploads, newest first."""
    uploads = service.storage.catalogue.machines(cursor=cursor, limit=limit)
    items = [machine_of(row) for row in uploads.items]
    if cursor is None:
        presets = [
            MachineSummary(id=name, name=name, origin="preset", provenance="preset")
            for name in list_presets()
        ]
        items = presets + items
    return Page(items=items, next_cursor=uploads.next_cursor)


def upload_machine(service: Service, document: dict[str, Any]) -> MachineSummary:
    """Keep a machine file that `gnnplan probe` wrote; the same content again is the same machine.

    Raises:
        UnprocessableError: it is no machine file.
    """
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
        name=storable(machine.name)[:200],
        fingerprint=storable(machine.fingerprint)[:128],
        provenance=machine.provenance,
        sha256=service.storage.artefacts.put(codec.dumps(machine).encode()),
        created_seconds=time.time(),
    )
    service.storage.catalogue.add_machine(row)
    kept = service.storage.catalogue.machine(row.id)
    return machine_of(kept or row)


def storable(text: str) -> str:
    """A text that every database takes: no halves of characters, no zero bytes."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def machine_model(service: Service, name: str) -> MachineModel:
    """A machine by the name that requests use.

    Raises:
        NotFoundError: neither a preset nor an uploaded machine.
    """
    if is_preset(name):
        try:
            return load_preset(name)
        except MachineError as error:
            raise NotFoundError(str(error)) from None
    row = _uploaded(service, name)
    return load_machine(service.storage.artefacts.path(row.sha256))


def machine_reference(service: Service, name: str | None) -> dict[str, str] | None:
    """What a job is told of a machine: a preset, a file of ours, or None for this machine.

    Raises:
        UnprocessableError: neither a preset nor an uploaded machine.
    """
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
        row = service.storage.catalogue.machine(name)
    if row is None:
        known = ", ".join(list_presets())
        raise NotFoundError(f"expected a preset ({known}) or an uploaded machine, found {name!r}")
    return row
