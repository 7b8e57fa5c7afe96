"""What the user may ask of the planner; each knob is documented where it is declared."""

from dataclasses import dataclass, field, replace
from typing import Literal

from planner.errors import SettingsError
from planner.settings_check import LIMITS, check_choices, check_numbers, check_workload
from runtime.plan import Workload
from runtime.sampling.parameters import LAYERWISE

POLICIES = (
    "auto",
    "none",
    "naive",
    "random",
    "metis",
    "degree",
    "gnnlab",
    "quiver",
    "pagraph",
    "pagraph-plus",
    "song-jiang",
    "legion",
    "joint",
    "lru",
    "clock",
)
"""Named placements that can be planned today."""

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
