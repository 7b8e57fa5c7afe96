"""Devices that are alike: one set of variables serves them all.

Two devices of a clique are alike if they draw from the same laws, have as many bytes and load the
objective's rows alike; cliques of one group each that are alike share variables too. Averaging a
placement over alike devices keeps every budget and lowers no row that is a maximum, so the smaller
programme has the same optimum (formulas 6.4). Where laws differ inside a clique every device stands
alone: the u/y form.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Instance
from planner.placement.network import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Alike devices."""

    devices: tuple[int, ...]
    per_clique: int
    """How many of them each clique has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CliqueClass:
    """Alike cliques and the groups in them."""

    cliques: tuple[int, ...]
    size: int
    """Devices of each."""
    groups: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """All devices, in groups and classes of cliques."""

    groups: tuple[Group, ...]
    classes: tuple[CliqueClass, ...]

    @property
    def class_of(self) -> list[int]:
        """Class of each group."""
        found = [0] * len(self.groups)
        for c, each in enumerate(self.classes):
            for g in each.groups:
                found[g] = c
        return found


def find_groups(instance: Instance, rows: Rows) -> Groups:
    """Group the devices of an instance under an objective."""
    touches: NDArray[np.bool_] = np.any(rows.weights > 0, axis=(1, 3))
    crowd = touches.sum(axis=1)

    def signature(g: int) -> tuple[object, ...]:
        row_signs = sorted(
            (int(crowd[k]), float(rows.constants[k]), rows.weights[k, :, g].tobytes())
            for k in np.flatnonzero(touches[:, g])
        )
        return (
            tuple(kind.laws[g] for kind in instance.kinds),
            instance.device_bytes[g],
            instance.network.alone[:, g].tobytes(),
            tuple(row_signs),
        )

    alike = [_alike([signature(g) for g in clique], clique) for clique in instance.cliques]
    classes: dict[object, list[int]] = defaultdict(list)
    for c, parts in enumerate(alike):
        if len(parts) == 1:
            ((sign, members),) = parts.items()
            classes[(sign, len(members))].append(c)
        else:
            classes[c].append(c)
    groups: list[Group] = []
    found: list[CliqueClass] = []
    for cliques in classes.values():
        first = alike[cliques[0]]
        names: list[int] = []
        for sign, members in first.items():
            devices = tuple(g for c in cliques for g in alike[c][sign])
            names.append(len(groups))
            groups.append(Group(devices=devices, per_clique=len(members)))
        found.append(
            CliqueClass(
                cliques=tuple(cliques),
                size=len(instance.cliques[cliques[0]]),
                groups=tuple(names),
            )
        )
    return Groups(groups=tuple(groups), classes=tuple(found))


def _alike(
    signs: list[tuple[object, ...]], clique: tuple[int, ...]
) -> dict[tuple[object, ...], tuple[int, ...]]:
    parts: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for sign, g in zip(signs, clique, strict=True):
        parts[sign].append(g)
    return {sign: tuple(members) for sign, members in parts.items()}
