"""Declare each field that users set once: its words, its range, its flag; `Workload` is training's.

A dataclass's field carries a `Setting` in its annotation:

    hidden: Annotated[int, Setting(help="Hidden columns.", range=Range(least=1, most=9))] = 256

Command-line flags, bodies of the service, the client, the dashboard's form and the page of commands
are made of these fields, and values are checked against them (`find_fault`).
"""

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

from gnnplan.runtime.errors import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Numbers that a setting may have."""

    least: float
    most: float
    whole: bool = True
    above_least: bool = False
    """Whether the least itself is excluded."""
    below_most: bool = False
    """Whether the largest itself is excluded."""

    def has(self, value: Any) -> bool:
        """Return whether a value is a number of this range; NaN is not."""
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        number: Any = value  # a whole one may be too large for isfinite
        if not (isinstance(value, numbers.Integral) or math.isfinite(number)):
            return False
        low = number > self.least if self.above_least else number >= self.least
        return bool(low and (number < self.most if self.below_most else number <= self.most))

    def __str__(self) -> str:
        number = "a whole number" if self.whole else "a number"
        low = "above" if self.above_least else "of at least"
        high = "below" if self.below_most else "at most"
        return f"{number} {low} {self.least:,} and {high} {self.most:,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Words and limits of one field that users set, the same everywhere."""

    help: str
    """The field in a sentence."""
    how: str = ""
    """Spelling of a flag's value, where its type does not say it."""
    more: str = ""
    """Further text on the page of commands."""
    range: Range | None = None
    """Range of the number, or of each number of the lists."""
    flag: str = ""
    """Flag without dashes; empty: made of the field's name."""
    label: str = ""
    """Name in the dashboard's form; empty: made of the flag."""
    unset: str = ""
    """What is done where the value is None."""
    default: Any = ...
    """Default of flags and requests where it differs from the field's own default; else `...`."""
    surface: Literal["all", "flag", "service"] = "all"
    """Where the field can be set: everywhere, as a flag alone, or in requests alone."""
    profiled: bool = True
    """Whether what is drawn and timed of a graph depends on it, beside the ranks that are tried."""
    plan_field: str = ""
    """Field of the plan that takes the value as it was asked, such as `strategy.prefetch_depth`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingField:
    """A field with its setting, and its place in the dataclass that was asked for."""

    name: str
    hint: Any
    default: Any
    path: tuple[str, ...]
    """Names of the fields that lead to the dataclass which declares it."""
    setting: Setting

    @property
    def flag(self) -> str:
        """Option of the command line.

        >>> [each.flag for each in setting_fields(Links)][1:3]
        ['--num-negatives', '--exclude']
        """
        name = self.setting.flag or self.name.removesuffix("_bytes").replace("_", "-")
        return f"--{name}"

    @property
    def choices(self) -> tuple[str, ...]:
        """Words of which the field takes one; empty for other types."""
        return typing.get_args(self.hint) if typing.get_origin(self.hint) is Literal else ()

    @property
    def optional(self) -> bool:
        """Whether the field may be None."""
        return isinstance(self.hint, types.UnionType) and type(None) in typing.get_args(self.hint)


@functools.cache
def setting_fields(kind: type) -> tuple[SettingField, ...]:
    """List the fields that users set, in order, with those of nested dataclasses."""
    return tuple(_fields(kind, ()))


def own_fields(kind: type) -> Iterator[SettingField]:
    """List the fields that users set and the class itself declares."""
    return (each for each in setting_fields(kind) if not each.path)


def flat_values(owner: Any) -> dict[str, Any]:
    """Return the values of the fields that users set, by name."""
    kind: type = type(owner)
    return {
        each.name: getattr(functools.reduce(getattr, each.path, owner), each.name)
        for each in setting_fields(kind)
    }


def make_from(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make an object from values by name, as of `flat_values`; missing ones have their default.

    >>> make_from(Workload, {"hidden": 8, "exclude": "none"}).links.exclude
    'none'
    """
    fields, hints = setting_fields(kind), typing.get_type_hints(kind)
    own = {each.name: values[each.name] for each in fields if not each.path and each.name in values}
    nested = {each.path[0] for each in fields if each.path}
    return kind(**own, **{name: make_from(hints[name], values) for name in nested})


def _fields(kind: type, path: tuple[str, ...]) -> Iterator[SettingField]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for spec in dataclasses.fields(kind):
        hint = hints[spec.name]
        marks = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Setting)]
        if marks:
            default: Any = spec.default
            if spec.default_factory is not dataclasses.MISSING:
                default = spec.default_factory()
            yield SettingField(
                name=spec.name,
                hint=hint.__origin__,
                default=default if marks[0].default is ... else marks[0].default,
                path=path,
                setting=marks[0],
            )
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _fields(hint, (*path, spec.name))


MOST_FANOUT = 1_000_000
"""Most neighbours per hop; -1 takes all, however many."""
FANOUTS = Range(least=-1, most=MOST_FANOUT)
"""Range of a fan-out; 0 is none, though it lies within."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Settings of link prediction (task link); other tasks ignore them."""

    negatives: Annotated[
        Literal["uniform", "in-batch"],
        Setting(
            help="Where links' negative destinations come from: all nodes, or the step's own "
            "destinations."
        ),
    ] = "uniform"
    num_negatives: Annotated[
        int, Setting(help="Negatives per link in training.", range=Range(least=1, most=10_000))
    ] = 1
    exclude: Annotated[
        Literal["none", "forward", "both"],
        Setting(
            help="Which of a step's own links are left out of sampling: none, source to "
            "destination, or also destination to source."
        ),
    ] = "both"
    eval_negatives: Annotated[
        int,
        Setting(
            help="Uniform negatives per link in validation and test.",
            range=Range(least=1, most=100_000),
        ),
    ] = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The training to be done: fixed by the user, never changed by the planner."""

    model: Annotated[
        str, Setting(help="sage, gcn, gat, rgcn (typed graphs) or module:factory.")
    ] = "sage"
    num_layers: Annotated[
        int,
        Setting(
            help="Layers; left out: one per fan-out.",
            range=Range(least=1, most=16),
            flag="layers",
            default=None,
            surface="flag",
        ),
    ] = 2
    hidden: Annotated[
        int,
        Setting(help="Hidden columns.", range=Range(least=1, most=65_536), label="Hidden columns"),
    ] = 256
    heads: Annotated[
        int, Setting(help="Attention heads (gat).", range=Range(least=1, most=1024))
    ] = 4
    dropout: Annotated[
        float,
        Setting(
            help="Dropout between layers.",
            range=Range(least=0, most=1, whole=False, below_most=True),
        ),
    ] = 0.0
    fanouts: Annotated[
        list[int],
        Setting(
            help="Neighbours per hop, the hop next to the seeds first; -1 takes all (rgcn: of each "
            "edge type).",
            range=FANOUTS,
            label="Fan-outs, first hop first",
        ),
    ] = field(default_factory=lambda: [15, 10])
    type_fanouts: Annotated[
        dict[str, list[int]],
        Setting(
            help="Other fan-outs of an edge type (rgcn).",
            how="as NAME=5,3; repeat per type",
            range=FANOUTS,
        ),
    ] = field(default_factory=dict)
    batch_size: Annotated[
        int,
        Setting(
            help="GLOBAL batch: seeds (or links) per optimiser step over all devices.",
            more="Never changed by the planner.",
            range=Range(least=1, most=2**31 - 1),
            label="Global batch",
        ),
    ] = 1024
    learning_rate: Annotated[
        float,
        Setting(
            help="Adam's learning rate.",
            profiled=False,
            range=Range(least=0, most=1000, whole=False, above_least=True),
        ),
    ] = 3e-3
    weight_decay: Annotated[
        float,
        Setting(help="L2 penalty.", profiled=False, range=Range(least=0, most=1000, whole=False)),
    ] = 0.0
    gcn_norm: Annotated[
        Literal["full", "sampled"],
        Setting(help="Degrees a GCN normalises by: of the full graph, or of the sample."),
    ] = "full"
    precision: Annotated[
        Literal["float32", "tf32", "bfloat16", "float16"],
        Setting(
            help="Of products in training; sums, parameters and gradients stay float32.",
            more="tf32 rounds the factors of float32 products on a GPU, and nothing on cores; "
            "bfloat16 and float16 are for GPUs: products in half the bytes.",
        ),
    ] = "float32"
    seed: Annotated[
        int,
        Setting(
            help="Seed of shuffling, sampling and weights.", range=Range(least=0, most=2**63 - 1)
        ),
    ] = 0
    allow: Annotated[
        Literal["exact", "unbiased", "approximate"],
        Setting(
            help="How far training statistics may change.",
            profiled=False,
            label="Statistics may be",
        ),
    ] = "exact"
    links: Links = field(default_factory=Links)


_ANY = {
    int: Range(least=-math.inf, most=math.inf),
    float: Range(least=-math.inf, most=math.inf, whole=False),
}
_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "True or False"),
    str: ("a text", "texts"),
}
"""Words for one and for several values of a type."""


def fits(hint: Any, value: Any, wanted: Range | None = None) -> bool:
    """Return whether a value is of a declared type; a number must be finite, and in its range.

    >>> fits(list[int], [5, -1]), fits(list[int], [5, True]), fits(float | None, math.nan)
    (True, False, False)
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(fits(part, value, wanted) for part in parts)
    if origin is Literal:
        return any(isinstance(value, type(part)) and value == part for part in parts)
    if origin is list:
        return isinstance(value, list) and all(fits(parts[0], each) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(parts[0], name) and fits(parts[1], each) for name, each in value.items()
        )
    if hint in _ANY:
        return (wanted or _ANY[hint]).has(value)
    return isinstance(value, hint)


def find_fault(owner: Any) -> str:
    """Say in a line which value of a dataclass is of another type than its field declares.

    A number outside its setting's range and a word that is no choice are faults too. Dataclasses
    in its fields are looked through. Empty: there is no fault.
    """
    settings = {each.name: each for each in own_fields(type(owner))}
    for name, hint in _declared_types(type(owner)).items():
        found, declared = getattr(owner, name), settings.get(name)
        wanted = None if declared is None else declared.setting.range
        if not fits(hint, found, wanted):
            line = f"{name.replace('_', ' ')}: expected {_words(hint, wanted)}, found "
            line += _shown(found)
            if declared is None:
                return line
            if isinstance(found, str):
                line += did_you_mean(found, declared.choices)
            flag = "it" if declared.setting.surface == "service" else declared.flag
            return f"{line}; correct {flag}"
        for inner in cast("list[Any]", found) if isinstance(found, list) else [found]:
            if dataclasses.is_dataclass(inner) and (fault := find_fault(inner)):
                return fault
    return ""


@functools.cache
def _declared_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def _words(hint: Any, wanted: Range | None) -> str:
    """Say what a value of a type is."""
    origin = typing.get_origin(hint)
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin is types.UnionType:
        return " or ".join(_words(part, wanted) for part in parts)
    if origin is list:
        return f"a list of {_plural(parts[0])}"
    if origin is dict:
        return f"a dict of {_plural(parts[1])} by name"
    return str(wanted) if wanted else _WORDS.get(hint, (f"a {hint.__name__}", ""))[0]


def _plural(hint: Any) -> str:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join(map(_plural, parts))
    if typing.get_origin(hint) is list:
        return f"lists of {_plural(parts[0])}"
    return _WORDS.get(hint, ("", f"{hint.__name__} objects"))[1]


def _shown(value: Any) -> str:
    """Write a value of any kind for one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a whole number of more digits than Python writes
        return "a value of too many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
