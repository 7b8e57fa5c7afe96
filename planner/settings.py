"""What the user may ask of the planner; each knob is documented where it is declared.

Which numbers a planning request may hold: the one table for command line, REST and Python.

What no training can use is refused here, before anything is probed or profiled. Plans that were
written before are read without these checks.
"""

import functools
import math
import numbers
import typing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planner.errors import SettingsError
from planner.placement.policies.registry import PLACEMENT_POLICIES
from runtime.plan.schema import Workload
from runtime.sampling.parameters import LAYERWISE

MOST_FANOUT = 1_000_000
"""Neighbours per hop; -1 takes all, however many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Numbers that a setting may have."""

    least: float
    most: float
    whole: bool = True
    above_least: bool = False
    """Whether the least is not one of them."""
    below_most: bool = False
    """Whether the largest is not one of them."""

    def has(self, value: Any) -> bool:
        """Whether a value is a number of this range; NaN is none."""
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            return False
        number: Any = value
        low = number > self.least if self.above_least else number >= self.least
        return bool(low and (number < self.most if self.below_most else number <= self.most))

    def __str__(self) -> str:
        number = "a whole number" if self.whole else "a number"
        low = "above" if self.above_least else "of at least"
        high = "below" if self.below_most else "at most"
        return f"{number} {low} {self.least:,} and {high} {self.most:,}"


_SHARE = Range(least=0, most=1, whole=False, below_most=True)
WORKLOAD = {
    "num_layers": Range(least=1, most=16),
    "hidden": Range(least=1, most=65_536),
    "heads": Range(least=1, most=1024),
    "dropout": _SHARE,
    "batch_size": Range(least=1, most=2**31 - 1),
    "learning_rate": Range(least=0, most=1000, whole=False, above_least=True),
    "weight_decay": Range(least=0, most=1000, whole=False),
    "seed": Range(least=0, most=2**63 - 1),
}
LINKS = {
    "num_negatives": Range(least=1, most=10_000),
    "eval_negatives": Range(least=1, most=100_000),
}
LIMITS = {
    "devices": Range(least=1, most=4096),
    "hosts": Range(least=1, most=4096),
    "device_memory_bytes": Range(least=1, most=2**60),
    "host_memory_bytes": Range(least=1, most=2**60),
}
"""Of `PlanSettings` itself; None is none."""
OPTIONS = {
    "num_layers": "layers",
    "device_memory_bytes": "device-memory",
    "host_memory_bytes": "host-memory",
}
"""Options of the command line that are named otherwise than their setting."""


def option_of(name: str) -> str:
    """The option of the command line that sets it.

    >>> option_of("weight_decay"), option_of("num_layers")
    ('--weight-decay', '--layers')
    """
    return f"--{OPTIONS.get(name, name).replace('_', '-')}"


def check_numbers(owner: object, ranges: dict[str, Range]) -> None:
    """Refuse a number outside its range.

    Args:
        owner: settings with those attributes; None is let through.
        ranges: by attribute.

    Raises:
        SettingsError: one line with what was expected, found, and which option says it.
    """
    for name, wanted in ranges.items():
        found = getattr(owner, name)
        if found is not None and not wanted.has(found):
            raise SettingsError(
                f"{name.replace('_', ' ')}: expected {wanted}, found {found!r}; correct "
                f"{option_of(name)}"
            )


def check_choices(owner: object) -> None:
    """Refuse a word that is none of those its field is declared with.

    Raises:
        SettingsError: as `check_numbers`.
    """
    for name, words in _choices(type(owner)).items():
        found = getattr(owner, name)
        if found not in words:
            raise SettingsError(
                f"{name.replace('_', ' ')}: expected one of {', '.join(words)}, found {found!r}; "
                f"correct {option_of(name)}"
            )


@functools.cache
def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    """Fields of a dataclass that are one of a few words."""
    hints = typing.get_type_hints(kind)
    return {n: typing.get_args(h) for n, h in hints.items() if typing.get_origin(h) is Literal}


def check_workload(work: Workload) -> None:
    """Refuse a workload that no training can run.

    Raises:
        SettingsError: one line with what was expected, what was found and what to do.
    """
    check_numbers(work, WORKLOAD)
    check_numbers(work.links, LINKS)
    check_choices(work)
    check_choices(work.links)
    if work.model == "gat" and work.num_layers > 1 and work.hidden % work.heads:
        raise SettingsError(
            f"model gat: expected hidden ({work.hidden}) divisible by heads ({work.heads}); change "
            "--hidden or --heads"
        )
    if len(work.fanouts) != work.num_layers:
        raise SettingsError(
            f"expected {work.num_layers} fan-outs (one per layer), found {len(work.fanouts)}: "
            f"{','.join(map(str, work.fanouts))}; give --layers {len(work.fanouts)} or other "
            "fan-outs"
        )
    _check_fanouts(work.fanouts, "--fanouts")
    for name, fanouts in work.type_fanouts.items():
        if len(fanouts) != len(work.fanouts):
            raise SettingsError(
                f"edge type {name}: expected {len(work.fanouts)} fan-outs (one per layer), found "
                f"{len(fanouts)}: {','.join(map(str, fanouts))}; correct --type-fanouts"
            )
        _check_fanouts(fanouts, "--type-fanouts")


def _check_fanouts(fanouts: list[int], option: str) -> None:
    wanted = Range(least=-1, most=MOST_FANOUT)
    if any(fanout == 0 or not wanted.has(fanout) for fanout in fanouts):
        raise SettingsError(
            f"expected fan-outs of at least 1 and at most {MOST_FANOUT:,} (or -1 for all), found "
            f"{fanouts}; correct {option}"
        )


POLICIES = ("auto", *(policy.name for policy in PLACEMENT_POLICIES))
"""Placements that can be asked for by name."""

MODELS = ("sage", "gcn", "gat", "rgcn")
"""Models that come with the runtime; others are given as module:factory."""


AUTO_SAMPLER = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerChoice:
    """A sampler that the planner may choose."""

    name: str
    """Of runtime.sampling.parameters.PARAMETERS."""
    parameters: dict[str, float | str] = field(default_factory=dict[str, float | str])
    """What differs from its defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """One planning request."""

    workload: Workload = field(default_factory=Workload)
    """What is to be trained; the planner never changes it."""
    devices: int | None = None
    """Number of ranks; None lets the planner choose from 1 to the cores (or GPUs)."""
    hosts: int | None = None
    """Number of hosts that ranks are spread over; None: whatever is fastest."""
    device_memory_bytes: int | None = None
    """Bytes each device may use for its own copies of rows and everything else; None: measured."""
    host_memory_bytes: int | None = None
    """Bytes of host memory that may be used; None: measured."""
    mode: Literal["auto", "minibatch", "full-graph"] = "auto"
    """Full-graph takes one step per epoch; auto keeps the user's mini-batches, since the two are
    not comparable by epoch time."""
    sampler: str = "neighbor"
    """A name of runtime.sampling.parameters.PARAMETERS, or auto: neighbor and maybe labor."""
    sampler_parameters: dict[str, float | str] = field(default_factory=dict[str, float | str])
    """What differs from that sampler's defaults."""
    other_samplers: list[SamplerChoice] = field(default_factory=list[SamplerChoice])
    """Planned beside `sampler`, in the same sitting; the fastest is kept. The statistics of each
    must be allowed."""
    dialect: Literal["first_seen", "every_hop"] = "first_seen"
    batching: Literal["auto", "independent"] = "auto"
    """Independent leaves out batches that ranks make together: `PlannedLoader(blocks=False)`, hence
    a model with forward(x, edge_index), needs each rank's own subgraph."""
    policy: str = "auto"
    """Placement policy; auto scores all and keeps the best."""
    shared_host: bool = True
    """False: the host's shared mapping of features is not used (rows live in ranks or on disk)."""
    oversubscribe: bool = False
    """True: ranks x threads may exceed the cores (slower and less predictable)."""

    def __post_init__(self) -> None:
        check_workload(self.workload)
        check_numbers(self, LIMITS)
        check_choices(self)
        model = self.workload.model
        if model not in MODELS and ":" not in model:
            raise SettingsError(
                f"expected a model among {', '.join(MODELS)} or module:factory, found {model!r}"
            )
        if self.policy not in POLICIES:
            raise SettingsError(
                f"expected a policy among {', '.join(POLICIES)}, found {self.policy!r}"
            )
        if self.mode == "full-graph" and self.other_samplers:
            raise SettingsError(
                f"mode full-graph: expected one sampler, found {1 + len(self.other_samplers)} "
                "(it draws no neighbours); drop all but one --sampler"
            )

    def by_sampler(self) -> "list[PlanSettings]":
        """One request for each sampler, the user's first one first.

        >>> choice = SamplerChoice(name="ladies", parameters={"sizes": "512,512"})
        >>> both = PlanSettings(workload=Workload(fanouts=[5, 5]), other_samplers=[choice])
        >>> [(each.sampler, each.dialect) for each in both.by_sampler()]
        [('neighbor', 'first_seen'), ('ladies', 'every_hop')]
        """
        others = [
            replace(
                self,
                sampler=each.name,
                sampler_parameters=each.parameters,
                dialect="every_hop" if each.name in LAYERWISE else self.dialect,
                other_samplers=[],
            )
            for each in self.other_samplers
        ]
        return [replace(self, other_samplers=[]), *others]
