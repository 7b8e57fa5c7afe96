"""Declare what a user may ask of the planner, and check it.

What no training can use is refused before anything is probed or profiled. Plans that were written
earlier are read without these checks.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.placement.policies.registry import PLACEMENT_POLICIES
from gnnplan.runtime.errors import did_you_mean
from gnnplan.runtime.plan.schema import MOST_FANOUT, Workload
from gnnplan.runtime.plan.setting import Range, Setting, find_fault, setting_fields
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER, SAMPLERS, is_layerwise
from gnnplan.runtime.stages import refuse_captured_model

Settings = TypeVar("Settings", bound="PlanSettings")


def check_values(owner: object) -> None:
    """Refuse a value of another type than its field's, outside its range, or not among its choices.

    Raises:
        SettingsError: a value cannot be; the line names it, and its flag.
    """
    if fault := find_fault(owner):
        raise SettingsError(fault)


def check_workload(work: Workload) -> None:
    """Refuse a workload that no training can run.

    Raises:
        SettingsError: a value cannot be, or values contradict each other.
    """
    check_values(work)
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
"""Models of the runtime; others are given as module:factory."""


AUTO_SAMPLER = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerChoice:
    """Sampler that the planner may choose."""

    name: str
    """Name in runtime.sampling.registry.SAMPLERS."""
    parameters: dict[str, float | str] = field(default_factory=dict[str, float | str])
    """Parameters that differ from the sampler's defaults."""


_COUNT, _BYTES = Range(least=1, most=4096), Range(least=1, most=2**60)


FULL_GRAPH = ("keep", "drop", "draws", "rounding", "exchange", "first_layer")
"""Settings of full-graph training alone."""
NO_FULL_GRAPH = {
    ("policy", "topology", "replication", "shared_host"): "where each rank holds its own part",
    ("dialect", "batching", "owner", "type_fanouts"): "which draws no batches",
    ("negatives", "num_negatives", "exclude", "eval_negatives"): "which trains no links",
    ("precision",): "which computes in float32",
    ("gcn_norm",): "whose degrees are the graph's",
}
"""Settings that full-graph training does not use, and why."""


def refuse_changed(settings: object, names: Collection[str], expected: str) -> None:
    """Refuse a setting among `names` that is not at its default, which nothing would use.

    Raises:
        SettingsError: the line names its flag and what was expected.
    """
    for each in setting_fields(type(settings)):
        found = getattr(functools.reduce(getattr, each.path, settings), each.name)
        if each.name in names and found != each.default:
            flag = each.flag.replace("--", "--no-") if each.default is True else each.flag
            raise SettingsError(f"{flag}: expected {expected}, found {found}; drop {flag}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Planning request of a user."""

    devices: Annotated[
        int | None,
        Setting(
            help="Number of ranks.",
            profiled=False,
            unset="the fastest, from 1 to the cores or GPUs",
            range=_COUNT,
            label="Ranks",
        ),
    ] = None
    cores: Annotated[
        bool,
        Setting(
            help="Plan on cores, also where the machine has GPUs.",
            label="On cores",
        ),
    ] = False
    hosts: Annotated[
        int | None,
        Setting(
            help="Hosts to spread the ranks over, equally many on each.",
            unset="the fastest number",
            more="A preset of one host is planned on that many, joined by its network.",
            range=_COUNT,
        ),
    ] = None
    device_memory_bytes: Annotated[
        int | None,
        Setting(
            help="Memory each device may use, for its copies of rows and all else.",
            profiled=False,
            how="such as 8GiB",
            unset="measured",
            range=_BYTES,
            label="Memory of each device",
        ),
    ] = None
    host_memory_bytes: Annotated[
        int | None,
        Setting(
            help="Memory of a host that may be used.",
            profiled=False,
            how="such as 64GiB",
            unset="measured",
            range=_BYTES,
            label="Memory of the host",
        ),
    ] = None
    workload: Workload = field(default_factory=Workload)
    """What is to be trained; the planner never changes it."""
    mode: Annotated[
        Literal["auto", "minibatch", "full-graph"],
        Setting(
            help="Kind of training; full-graph takes one step per epoch over all nodes. auto: "
            "minibatch, since the two train differently.",
            more="See [BNS-GCN](papers.md#bns-gcn-mlsys-2022).",
            label="Training",
        ),
    ] = "auto"
    sampler: Annotated[
        str,
        Setting(
            help="A sampler's name, or auto: neighbor and, where statistics may be unbiased, "
            "labor.",
            how=f"names are {', '.join(SAMPLERS)}; parameters follow as in "
            "labor:variant=star,kappa=16; repeat it to have the fastest of several",
            more="[Parameters](../runtime/sampling/registry.py) of each. Several are profiled in "
            "one sitting, which takes as many times as long.",
            default=AUTO_SAMPLER,
        ),
    ] = DEFAULT_SAMPLER
    sampler_parameters: Annotated[
        dict[str, float | str],
        Setting(help="What differs from that sampler's defaults.", surface="service"),
    ] = field(default_factory=dict[str, float | str])
    other_samplers: Annotated[
        list[SamplerChoice],
        Setting(
            help="Planned beside `sampler`, in the same sitting; the fastest is kept. The "
            "statistics of each must be allowed.",
            surface="service",
        ),
    ] = field(default_factory=list[SamplerChoice])
    dialect: Annotated[
        Literal["first_seen", "every_hop"],
        Setting(
            help="Which nodes a hop expands: those met first (as PyG), or every one again (as DGL)."
        ),
    ] = "first_seen"
    batching: Annotated[
        Literal["auto", "independent", "cooperative"],
        Setting(
            help="independent: ranks never share a batch, as PlannedLoader(blocks=False) and "
            "models with forward(x, edge_index) need; cooperative: they always do.",
            label="Batches",
        ),
    ] = "auto"
    owner: Annotated[
        Literal["hash", "partition", "auto"],
        Setting(
            help="Which rank owns a node of cooperative batches: by a hash, or by parts of the "
            "graph with few edges between them; auto prices both.",
            more="Parts exchange less and are less even. They are cut when the plan is made.",
            label="Owners of a shared batch",
        ),
    ] = "hash"
    replication: Annotated[
        int | None,
        Setting(
            help="Copies of a topology that the ranks hold in parts and sample from together; "
            "their number must be a multiple.",
            unset="the search decides, also whether ranks hold it in parts",
            range=_COUNT,
            label="Copies of the topology",
            more="Ranks form a grid of (ranks / copies) x copies. "
            "See [matrix-based sampling](papers.md#matrix-based-sampling-mlsys-2024).",
        ),
    ] = None
    step: Annotated[
        Literal["eager", "captured", "auto"],
        Setting(
            help="How GPUs run a training step: eager starts its kernels one by one, captured "
            "replays them as one graph over padded shapes; auto takes what is predicted faster.",
            more="A batch that does not fit the shapes is trained kernel by kernel; the report "
            "counts them. For sage, gcn, gat and rgcn, nodes and links.",
            label="Training step",
        ),
    ] = "eager"
    policy: Annotated[
        str,
        Setting(
            help="Placement policy; auto prices several and keeps the best.",
            profiled=False,
            how=f"names are {', '.join(POLICIES)}",
            more="none reads all from the host; joint is a linear programme over features and "
            "topology; lru and clock are caches that fill themselves.",
            label="Rows placed by",
        ),
    ] = "auto"
    topology: Annotated[
        Literal["auto", "host", "replicated", "cached", "clique"],
        Setting(
            help="Where GPUs read adjacency lists: on the host, in copies of all of them, or in "
            "copies of the hot ones, each GPU's own (cached) or dealt over its clique.",
            more="auto tries copies of the hot ones where a GPU has no room for all. With policy "
            "legion each GPU then also draws the seeds of its own part of the graph.",
            label="Adjacency lists",
        ),
    ] = "auto"
    keep: Annotated[
        float | None,
        Setting(
            help="Share p of what full-graph training draws from, by --drop, that is kept.",
            unset="of boundary nodes, what compute hides or accuracy needs",
            more="Below 1 it changes training statistics: see --allow.",
            range=Range(least=0, most=1, whole=False),
            label="Kept share p",
        ),
    ] = None
    drop: Annotated[
        Literal["nodes", "edges", "boundary-edges"],
        Setting(
            help="What full-graph training drops: boundary nodes (BNS), any edges (DropEdge) or "
            "edges over the boundary (BES). Edges need --keep.",
        ),
    ] = "nodes"
    draws: Annotated[
        Literal["auto", "layer", "shared"],
        Setting(help="Draws of full-graph training: anew for each layer, or one for all of them."),
    ] = "auto"
    rounding: Annotated[
        Literal["auto", "stochastic", "bernoulli"],
        Setting(
            help="Boundary nodes kept of each pair of parts: p of them, rounded at random, or each "
            "by itself."
        ),
    ] = "auto"
    exchange: Annotated[
        Literal["boundary", "broadcast"],
        Setting(
            help="What ranks send each other in full-graph training: rows that others need, or "
            "whole slices (CAGNET 1D).",
            label="Rows sent",
        ),
    ] = "boundary"
    first_layer: Annotated[
        Literal["auto", "once", "each-epoch"],
        Setting(help="When full-graph training sums the first layer's inputs, which never change."),
    ] = "auto"
    shared_host: Annotated[
        bool, Setting(help="Use the host's shared mapping of features; else ranks or the disk.")
    ] = True
    oversubscribe: Annotated[
        bool, Setting(help="Allow more threads than cores (slower, less predictable).")
    ] = False
    quick: Annotated[
        bool,
        Setting(
            help="Time nothing: plan from what is known at once, marked estimated.",
            label="Estimate alone",
        ),
    ] = False
    thorough: Annotated[
        bool,
        Setting(
            help="Measure as long as it takes, however short the training is.",
            label="Measure all",
        ),
    ] = False
    epochs: Annotated[
        int | None,
        Setting(
            help="Epochs of the training that is planned; measuring may take a tenth of it.",
            profiled=False,
            unset="50",
            range=Range(least=1, most=1_000_000),
            label="Epochs to come",
            plan_field="epochs",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_values(self)
        check_workload(self.workload)
        model = self.workload.model
        if model not in MODELS and ":" not in model:
            raise SettingsError(
                f"expected a model among {', '.join(MODELS)} or module:factory, found {model!r}"
                f"{did_you_mean(model, MODELS)}"
            )
        if self.policy not in POLICIES:
            raise SettingsError(
                f"expected a policy among {', '.join(POLICIES)}, found {self.policy!r}"
                f"{did_you_mean(self.policy, POLICIES)}"
            )
        if self.mode != "full-graph":
            refuse_changed(self, FULL_GRAPH, "--mode full-graph, whose choice it is")
        if self.owner != "hash" and self.batching == "independent":
            raise SettingsError(
                f"--owner {self.owner}: expected batches that ranks share, found --batching "
                "independent; drop one of the two"
            )
        if self.step == "captured" and (why := self._refuse_captured()):
            raise SettingsError(f"--step captured: {why}; drop it, or give --step auto")
        if self.quick and self.thorough:
            raise SettingsError(
                "expected --quick (time nothing) or --thorough (measure all), found both; drop one"
            )
        if self.mode == "full-graph" and self.other_samplers:
            raise SettingsError(
                f"mode full-graph: expected one sampler, found {1 + len(self.other_samplers)} "
                "(it draws no neighbours); drop all but one --sampler"
            )

    def _refuse_captured(self) -> str:
        """Return why no plan of this request has a captured step; empty where one may."""
        if self.cores:
            return "a step is captured on GPUs alone, and --cores asks for none"
        if self.mode == "full-graph":
            return "steps over the whole graph are not built as one graph of kernels"
        if self.batching == "cooperative":
            return "ranks that share a batch exchange rows whose number the host must know"
        return refuse_captured_model(self.workload)

    def by_sampler(self) -> list[Self]:
        """Return one request for each sampler, the user's first one first.

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
                dialect="every_hop" if is_layerwise(each.name) else self.dialect,
                other_samplers=[],
            )
            for each in self.other_samplers
        ]
        return [replace(self, other_samplers=[]), *others]


def change_settings(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return a request with some fields changed by name, those of its workload among them.

    Fan-outs without `num_layers` set one layer for each.

    Raises:
        SettingsError: a name is unknown, or a value cannot be.
    """
    known = _field_names(settings)
    for name in values:
        if name not in known:
            expected = ", ".join(sorted(known - {"workload"}))
            guess = did_you_mean(name, known)
            raise SettingsError(f"expected settings among {expected}, found {name!r}{guess}")
    fanouts = values.get("fanouts")
    layers = {"num_layers": len(cast("list[Any]", fanouts))} if isinstance(fanouts, list) else {}
    return _changed(settings, layers | dict(values))


def change_mode(settings: PlanSettings, mode: str) -> PlanSettings:
    """Return a request for another mode: what that mode does not use is at its default.

    A whole graph is trained over all neighbours, so its fan-outs are -1.
    """
    whole = mode == "full-graph"
    if whole == (settings.mode == "full-graph"):
        return replace(settings, mode=mode)
    names = FULL_GRAPH
    if whole:
        names = ("step", *(name for group in NO_FULL_GRAPH for name in group))
    values = {each.name: each.default for each in setting_fields(PlanSettings)}
    values = {name: values[name] for name in names} | {"mode": mode}
    if whole:
        values |= {"sampler": DEFAULT_SAMPLER, "sampler_parameters": {}, "other_samplers": []}
        values["fanouts"] = [-1] * settings.workload.num_layers
    return change_settings(settings, values)


def _field_names(owner: Any) -> set[str]:
    names = {each.name for each in fields(owner)}
    nested = [getattr(owner, name) for name in names if is_dataclass(getattr(owner, name))]
    return names.union(*map(_field_names, nested))


def _changed(owner: Any, values: Mapping[str, Any]) -> Any:
    """Replace fields by name, in nested dataclasses too."""
    found = {each.name: values.get(each.name, getattr(owner, each.name)) for each in fields(owner)}
    inner = {name: _changed(v, values) for name, v in found.items() if _is_object(v)}
    return replace(owner, **found | inner)


def _is_object(value: object) -> bool:
    """Return whether a value is a dataclass's object, not the class itself."""
    return is_dataclass(value) and not isinstance(value, type)
