"""Seconds of a GPU's batch, stage by stage: what rates (gpu_derived) and a loop (gpu_timed) say."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuStages:
    """Stages of one batch but what ranks do together, seconds."""

    seeds: float = 0.0
    sample: float
    gather: float
    copy: float
    batch: float
    forward_backward: float
    optimizer: float
    between: float = 0.0
    """Of a step, in no stage."""
    near: float
    """Of sampling and gathering: in which the GPU's own memory is busy."""
    on_links: float
    """Likewise, the links to other memories."""
    on_host: float
    """Of a step: in which the host is busy, or waits for its own threads."""
    computing: float | None = None
    """Of forward, backward and update: in which the GPU works; None: all of it."""
    spreads: dict[str, float]
    """Relative half-width (90%) of each stage that was measured or has a preset's."""
    provenance: dict[str, str]
    """Of each stage: where its seconds come from."""

    @property
    def loader(self) -> float:
        """Seconds of making the batch."""
        return self.seeds + self.sample + self.gather + self.copy + self.batch
