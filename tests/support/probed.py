"""A machine that counts as probed, for tests that must not wait for a probe."""

from dataclasses import replace
from pathlib import Path

from gnnplan.planner.machine.model import save_machine
from gnnplan.planner.probe.context import FULL
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.probe import VERSION
from gnnplan.runtime.device import machine_fingerprint


def keep_as_probed(cache: Path) -> None:
    """Leave a preset's numbers in a cache folder, as if a full probe had measured them here."""
    fingerprint = machine_fingerprint()
    known = replace(
        load_preset("cpu-2core"),
        fingerprint=fingerprint,
        provenance="measured",
        extent=FULL.name,
        versions={"probe": VERSION},
    )
    save_machine(known, cache / f"machine-{fingerprint}.json")
