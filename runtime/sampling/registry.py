"""List every sampler that a plan may name: a sampler is one entry.

Planner, loader, service and command line read it. Functions stand as "module:function" and are
imported when they are called, so that the table loads neither torch nor numba.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar

from gnnplan.runtime.errors import SamplerError, did_you_mean
from gnnplan.runtime.plan.schema import Sampler

Value = int | float | str
Values = Mapping[str, Value]
E = TypeVar("E", bound=StrEnum)

DEFAULT_SAMPLER = Sampler().name
"""Sampler of users who ask for none."""

Ability = Literal["stacks", "captured", "grid", "links", "types"]
"""stacks: a GPU draws several batches at once; captured: a GPU draws a batch by one CUDA graph;
grid: ranks of a process grid draw it from parts of the graph, on GPUs (cores plan it for uniform
neighbours alone); links, types: a GPU draws batches of links, without the step's own, and of typed
graphs, by edge type."""


class Estimator(StrEnum):
    """How the edges that were drawn stand for those that were not."""

    PLAIN = "plain"
    """The layer's own aggregation over the drawn edges (plain mean, attention, GCN's weights)."""
    HORVITZ_THOMPSON = "horvitz-thompson"
    """Edge weight A / pi, pi the probability that the edge is drawn (k q for k draws of law q)."""
    HAJEK = "hajek"
    """Horvitz-Thompson weights divided by their sum over the row."""


class Draws(StrEnum):
    """How the edges of a row, or the vertices of a layer, are drawn."""

    WITHOUT_REPLACEMENT = "without-replacement"
    """A fixed number of different ones."""
    REPLACEMENT = "replacement"
    """A fixed number of independent draws; one may come twice."""
    POISSON = "poisson"
    """Each with its own probability; the number varies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingLaw:
    """How a sampler with its parameters draws, and how it weights what is drawn."""

    draws: Draws
    estimator: Estimator = Estimator.PLAIN
    unequal: bool = False
    """Whether chances within a row differ."""


class DrawBytes(NamedTuple):
    """Most bytes in which a batch is drawn, beside relabelling and what every sampler writes."""

    neighbour: int = 0
    """Bytes per neighbour in the lists that hops expand; 0: no whole lists are laid out."""
    edge: int = 0
    """Bytes per edge drawn."""
    source: int = 0
    """Bytes per distinct neighbour in those lists."""
    node: int = 0
    """Bytes per node of the graph."""
    by_rows: bool = True
    """Whether cores expand rows in a workspace, of which layers take the table alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSpec:
    """One sampler: its name, parameters, statistics, forms and abilities."""

    name: str
    """Name that `--sampler` takes."""
    cpu: str
    """Function from a `SamplerRequest` (`runtime.sampling.build`) to its form on cores."""
    gpu: str = ""
    """Function from a `SamplerRequest` to its form on a GPU; empty: cores draw for GPUs."""
    parameters: dict[str, Value] = field(default_factory=dict[str, Value])
    """Defaults of its parameters. Those that several samplers have:

    draws        without-replacement | replacement | poisson (`Draws`)
    estimator    plain | horvitz-thompson | hajek (`Estimator`)
    weights      none | graph: draw by the graph's edge_weight
    kappa        length of a run of dependent batches, or "inf"; dependence: smooth | frozen;
                 layer_dependent 1: all hops draw alike
    """

    # Statistics.
    draws: Draws = Draws.WITHOUT_REPLACEMENT
    """How it draws where its parameters do not say."""
    unequal: bool
    """Whether chances within a row differ whatever its parameters are, or are 0 for some."""
    law: Callable[[SamplingLaw, Values], SamplingLaw] | None = None
    """Function that lets its own parameters change the law of draws, estimator and weights."""
    takes_all: bool = False
    """Whether it takes all neighbours."""
    is_baseline: bool = False
    """Whether it is the sampling that exact statistics are held against."""
    exact_weights: bool = False
    """Whether its weights stay exact for unlike chances without replacement (see `neighbor`)."""

    # What it can.
    layerwise: bool = False
    """Whether it draws layers for all vertices so far, hence in expansion every_hop alone."""
    abilities: frozenset[Ability] = frozenset()
    """Abilities with any parameters."""
    default_abilities: frozenset[Ability] = frozenset()
    """Abilities with its default parameters alone."""
    why_not_shared: Callable[[Values], str] = lambda _: "its entry does not say that ranks can"
    """Why ranks cannot draw one batch together, from its parameters; empty: they can."""
    local_form: str = ""
    """Name of the sampler that draws as this one and prefers a rank's own rows."""

    # What prices and counts know of it.
    reads_chosen: bool = False
    """Whether it reads the chosen neighbours of a list and no others."""
    is_expected: bool = False
    """Whether first answers know its batches by law (`planner/profile/analytic.py`); else they wait
    for a profile."""
    is_probed: bool = False
    """Whether the probe measures this sampler's rates."""
    launches: Literal["", "hops", "local", "layers", "types"] = ""
    """Count of a GPU's kernels that holds for it; empty: that of hops is borrowed."""
    one_draw_per_vertex: bool = False
    """Whether a vertex is drawn, or not, for all lists that hold it."""
    node_bytes: int = 0
    """Most bytes per node of the graph that a rank keeps for it beside lists and weights."""
    draw_bytes: Callable[[Values, bool], DrawBytes] = lambda _, on_gpu: DrawBytes()
    """Bytes in which it draws from its parameters, on a GPU or in a thread on cores."""
    auto_parameters: tuple[dict[str, float | str], ...] = ()
    """Parameters that sampler auto tries, the preferred ones first; empty: not tried."""

    @property
    def prefers_local(self) -> bool:
        """Tell whether it prefers a rank's own rows by a factor."""
        return self.local_form == self.name

    @property
    def dependent(self) -> bool:
        """Tell whether successive batches can share draws."""
        return "kappa" in self.parameters


def _labor_law(law: SamplingLaw, values: Values) -> SamplingLaw:
    poisson = values["form"] == "poisson"
    return SamplingLaw(
        draws=Draws.POISSON if poisson else Draws.WITHOUT_REPLACEMENT,
        estimator=law.estimator,
        unequal=law.unequal or values["variant"] != 0,
    )


def _why_labor_is_not_shared(values: Values) -> str:
    if values["variant"] != "star" and number("labor", values, "variant") == 0:
        return ""
    return "LABOR-i takes a maximum over all rows of the batch that may draw a vertex"


_CHANCES, _WEIGHTS = 10, 8
"""Bytes per edge of a thread on cores: of chances, with spare room, and of weights being joined."""


def _neighbor_bytes(values: Values, on_gpu: bool) -> DrawBytes:
    plain = values["weights"] == "none" and values["draws"] == "without-replacement"
    if plain:
        return DrawBytes()
    if not on_gpu:
        return DrawBytes(edge=_CHANCES + _WEIGHTS)
    replaced = values["weights"] == "none" and values["draws"] == "replacement"
    return DrawBytes(neighbour=20) if replaced else DrawBytes(neighbour=60, edge=290)


def _labor_bytes(values: Values, on_gpu: bool) -> DrawBytes:
    dependent = number("labor", values, "kappa") > 1
    plain = values["variant"] == 0 and values["weights"] == "none" and not dependent
    if not on_gpu:  # candidates of a hop have a table and numbers of their own
        solved = DrawBytes(neighbour=20, edge=_CHANCES + _WEIGHTS, source=50, node=4)
        return DrawBytes(edge=_WEIGHTS) if plain else solved
    if plain:
        return DrawBytes(neighbour=0 if values["form"] == "poisson" else 60)
    return DrawBytes(neighbour=220 if dependent else 140)


def _las_bytes(values: Values, on_gpu: bool) -> DrawBytes:
    if values["over"] == "ladies":
        return _layer_bytes(values, on_gpu)
    return DrawBytes(neighbour=80) if on_gpu else DrawBytes(edge=_CHANCES + _WEIGHTS)


def _neighbor_law(law: SamplingLaw, values: Values) -> SamplingLaw:
    del values
    if law.draws is Draws.WITHOUT_REPLACEMENT and not law.unequal:
        return SamplingLaw(draws=law.draws)  # all weights are 1 / k, and the sampler gives none
    return law


def _las_law(law: SamplingLaw, values: Values) -> SamplingLaw:
    from gnnplan.runtime.sampling.locality import Correction

    draws, estimator = choice("las", values, Correction, "correction").way
    return SamplingLaw(draws=draws, estimator=estimator, unequal=law.unequal)


_KAPPA: dict[str, Value] = {"kappa": 1, "dependence": "smooth", "layer_dependent": 0}


def _layer_bytes(values: Values, on_gpu: bool) -> DrawBytes:
    if not on_gpu:
        return DrawBytes(neighbour=8, source=36, by_rows=False)
    dependent = "kappa" in values and number("ladies", values, "kappa") > 1
    return DrawBytes(neighbour=205 if dependent else 145)


def _fastgcn_bytes(values: Values, on_gpu: bool) -> DrawBytes:
    layers = _layer_bytes(values, on_gpu)
    # On cores it makes no law for each batch, and notes for each node when a dart first hit it.
    return layers if on_gpu else layers._replace(source=0, node=8)


def _layerwise(
    name: str,
    draws: Draws,
    parameters: dict[str, Value],
    *,
    node_bytes: int = 0,
    draw_bytes: Callable[[Values, bool], DrawBytes] = _layer_bytes,
) -> SamplerSpec:
    """Make the entry of a sampler by layers.

    sizes        vertices per layer, next to the seeds first, as in "512,256"; empty: the fan-outs
    norm         fro | count2
    """
    return SamplerSpec(
        name=name,
        cpu="gnnplan.runtime.sampling.build:make_layerwise",
        gpu="gnnplan.runtime.sampling.build:make_layerwise",
        parameters={
            "sizes": "", "draws": str(draws), "estimator": "horvitz-thompson", "weights": "none",
            **parameters,
        },
        draws=draws,
        unequal=True,
        layerwise=True,
        is_expected=True,
        abilities=frozenset(["stacks", "grid"]),
        why_not_shared=lambda _: "a layer's probabilities are sums over the whole batch",
        launches="layers",
        node_bytes=node_bytes,
        draw_bytes=draw_bytes,
    )  # fmt: skip


SAMPLERS: dict[str, SamplerSpec] = {spec.name: spec for spec in (
    SamplerSpec(
        name="full",
        cpu="gnnplan.runtime.sampling.build:make_full",
        gpu="gnnplan.runtime.sampling.build:make_full",
        unequal=False,
        takes_all=True,
        is_expected=True,
        abilities=frozenset(["stacks", "grid"]),
        why_not_shared=lambda _: "",
        reads_chosen=True,
        is_probed=True,
        launches="hops",
    ),
    SamplerSpec(
        name=DEFAULT_SAMPLER,
        cpu="gnnplan.runtime.sampling.build:make_neighbor",
        gpu="gnnplan.runtime.sampling.build:make_neighbor",
        parameters={"draws": "without-replacement", "estimator": "plain", "weights": "none"},
        unequal=False,
        law=_neighbor_law,
        is_baseline=True,
        is_expected=True,
        exact_weights=True,
        default_abilities=frozenset(["stacks", "captured", "grid", "links", "types"]),
        why_not_shared=lambda _: "",
        local_form="las",
        reads_chosen=True,
        is_probed=True,
        draw_bytes=_neighbor_bytes,
        launches="hops",
    ),
    # variant    0, a number of passes, or star; form: poisson | exact_k
    # tolerance  LABOR-* ends with the pass that gains less, relative to the expected new vertices
    SamplerSpec(
        name="labor",
        cpu="gnnplan.runtime.sampling.build:make_labor",
        gpu="gnnplan.runtime.sampling.build:make_labor",
        parameters={
            "variant": 0, "form": "poisson", "tolerance": 1e-4, "estimator": "hajek",
            "weights": "none", **_KAPPA,
        },
        draws=Draws.POISSON,
        unequal=False,
        law=_labor_law,
        is_expected=True,
        why_not_shared=_why_labor_is_not_shared,
        one_draw_per_vertex=True,
        draw_bytes=_labor_bytes,
        # Its estimators: the others are for stricter users and for attention.
        auto_parameters=({}, {"estimator": "horvitz-thompson"}, {"estimator": "plain"}),
    ),
    _layerwise("ladies", Draws.WITHOUT_REPLACEMENT, {"norm": "fro", **_KAPPA}),
    _layerwise("pladies", Draws.POISSON, {"norm": "fro", **_KAPPA}),
    # Its one law for all batches: each column's id, probability and prefix sum.
    _layerwise("fastgcn", Draws.REPLACEMENT, {}, node_bytes=24, draw_bytes=_fastgcn_bytes),
    # factor      preference for local vertices; over: neighbor | ladies (with sizes)
    # schedule    fixed, or measured: the factor starts there and follows the share of data movement
    #             in each epoch (`locality.FactorSchedule`)
    # correction  none | replacement | poisson | hajek; over LADIES, poisson and hajek draw as
    #             PLADIES does
    SamplerSpec(
        name="las",
        cpu="gnnplan.runtime.sampling.build:make_las",
        gpu="gnnplan.runtime.sampling.build:make_las",
        parameters={
            "factor": 1, "schedule": "fixed", "correction": "replacement", "over": "neighbor",
            "sizes": "", "weights": "none",
        },
        unequal=True,
        law=_las_law,
        exact_weights=True,
        is_expected=True,
        why_not_shared=lambda _: (
            "it prefers what a rank holds, so ranks would draw different subgraphs"
        ),
        local_form="las",
        launches="local",
        draw_bytes=_las_bytes,
        node_bytes=1,  # hops to the nearest local vertex
    ),
)}  # fmt: skip
"""All samplers by name, in the order in which names are listed."""


BY_TYPE, WITHOUT_LINKS = "neighbor by edge type", "neighbor without the step's links"
TASK_FORMS: dict[str, SamplerSpec] = {
    BY_TYPE: SamplerSpec(name=BY_TYPE, cpu="", unequal=False, reads_chosen=True, launches="types"),
    WITHOUT_LINKS: SamplerSpec(
        name=WITHOUT_LINKS, cpu="", unequal=False, reads_chosen=True, launches="hops"
    ),
}
"""What is known of neighbour sampling in typed graphs and without links, which no plan names."""


def find_sampler(name: str) -> SamplerSpec:
    """Return the entry of a sampler; an unknown name is refused.

    >>> find_sampler("ladies").layerwise
    True
    """
    if name not in SAMPLERS:
        raise SamplerError(
            f"expected a sampler among {', '.join(SAMPLERS)}, found {name!r}"
            f"{did_you_mean(name, SAMPLERS)}; choose one, or add its entry "
            "(runtime/sampling/HOWTO_add_a_sampler.md)"
        )
    return SAMPLERS[name]


def sampler_or_unknown(name: str) -> SamplerSpec:
    """Return the entry of a name; for what else draws batches, one that says nothing of it.

    >>> sampler_or_unknown("neighbor by edge type").is_probed
    False
    """
    known = SAMPLERS.get(name) or TASK_FORMS.get(name)
    return known or SamplerSpec(name=name, cpu="", unequal=False)


def is_default(name: str, parameters: Mapping[str, Any]) -> bool:
    """Tell whether it is the sampler of users who ask for none.

    >>> is_default("neighbor", {}), is_default("neighbor", {"draws": "replacement"})
    (True, False)
    """
    return name == DEFAULT_SAMPLER and not parameters


def is_layerwise(name: str) -> bool:
    """Tell whether a name is that of a sampler that draws by layers."""
    return name in SAMPLERS and SAMPLERS[name].layerwise


def is_able(name: str, parameters: Mapping[str, Any], ability: Ability) -> bool:
    """Tell whether a sampler with these parameters has an ability.

    >>> is_able("full", {}, "stacks"), is_able("neighbor", {"weights": "graph"}, "stacks")
    (True, False)
    """
    spec = find_sampler(name)
    return ability in spec.abilities or (not parameters and ability in spec.default_abilities)


def parameters_of(sampler: Sampler) -> dict[str, Value]:
    """Return a plan's parameters with the defaults of the others; unknown ones are refused."""
    known = find_sampler(sampler.name).parameters
    for key in sampler.parameters:
        if key not in known:
            raise SamplerError(
                f"sampler {sampler.name}: expected parameters among {', '.join(known) or 'none'}, "
                f"found {key!r}{did_you_mean(key, known)}; drop it"
            )
    return known | sampler.parameters


def choice(name: str, values: Values, kind: type[E], key: str) -> E:
    """Return a parameter of sampler `name` that is a member of an enumeration."""
    value = str(values[key])
    if value not in list(kind):
        raise SamplerError(
            f"sampler {name}: expected {key} to be one of {', '.join(kind)}, found {value!r}"
            f"{did_you_mean(value, kind)}; choose one"
        )
    return kind(value)


def number(name: str, values: Values, key: str) -> float:
    """Return a parameter of sampler `name` that is a number, "inf" included."""
    try:
        found = float(values[key])
    except ValueError:
        found = math.nan
    if math.isnan(found) and isinstance(values[key], str):
        raise SamplerError(
            f"sampler {name}: expected {key} to be a number, found {values[key]!r}; correct it"
        )
    return found


def layer_sizes(name: str, values: Values, fanouts: Sequence[int]) -> list[int]:
    """Return the vertices per layer of a sampler by layers; the fan-outs where it names none.

    >>> layer_sizes("ladies", {"sizes": "512,256"}, [10, 5])
    [512, 256]
    """
    text = str(values["sizes"])
    try:
        sizes = [int(part) for part in text.split(",")] if text else list(fanouts)
    except ValueError:
        raise SamplerError(
            f"sampler {name}: expected sizes as in '512,256', found {text!r}; correct them"
        ) from None
    if len(sizes) != len(fanouts):
        raise SamplerError(
            f"sampler {name}: expected {len(fanouts)} sizes (one per layer), found {text!r}; "
            "correct them"
        )
    return sizes


def law_of(sampler: Sampler) -> SamplingLaw:
    """Return the law by which a plan's sampler draws edges and weights them."""
    name, values = sampler.name, parameters_of(sampler)
    spec = SAMPLERS[name]
    law = SamplingLaw(
        draws=choice(name, values, Draws, "draws") if "draws" in values else spec.draws,
        estimator=choice(name, values, Estimator, "estimator")
        if "estimator" in values
        else Estimator.PLAIN,
        unequal=values.get("weights", "none") != "none",
    )
    return law if spec.law is None else spec.law(law, values)


def why_on_host(sampler: Sampler, *, links: bool, types: bool) -> str:
    """Return why the host draws batches that a GPU's form could; empty where the GPU draws them.

    `links` and `types` say that batches are of links, or of a typed graph.
    """
    ability: Ability | None = "links" if links else "types" if types else None
    if ability is not None and not is_able(sampler.name, sampler.parameters, ability):
        return f"{ability} are drawn by the host with sampler {sampler.name}"
    if parameters_of(sampler).get("schedule", "fixed") != "fixed":
        return "a locality factor that changes while training is the host's"
    return ""


def why_alone(sampler: Sampler) -> str:
    """Return why ranks cannot draw a batch of a plan's sampler together; empty where they can."""
    return find_sampler(sampler.name).why_not_shared(parameters_of(sampler))


def load_function(path: str) -> Callable[..., Any]:
    """Import a function or class by its "module:name"."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
