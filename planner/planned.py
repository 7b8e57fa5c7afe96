"""A written plan's choices as the candidate that it was."""

from planner.candidate import Candidate
from planner.settings import PlanSettings
from runtime.plan import Plan


def candidate_of(plan: Plan, settings: PlanSettings) -> Candidate:
    """The candidate that `assemble` made a plan of.

    Args:
        plan: of mini-batches.
        settings: the request; what it fixes of the sampler is no choice of the candidate.
    """
    strategy = plan.strategy
    gpus = strategy.devices[0].kind == "cuda"
    hosts = 1 if gpus else len({d.host for d in strategy.devices})
    cliques: dict[int, list[int]] = {}
    for device in strategy.devices:
        cliques.setdefault(device.clique, []).append(device.rank)
    sampler, asked = strategy.sampler, settings.sampler_parameters
    kappa, factor = sampler.parameters.get("kappa"), sampler.parameters.get("factor")
    local = sampler.name == "las" and (settings.sampler != "las" or "factor" not in asked)
    return Candidate(
        num_ranks=plan.num_ranks,
        threads=strategy.threads,
        prefetch_depth=strategy.prefetch_depth,
        policy=strategy.features.policy,
        # A memory `gpu0.memory` is that of gpu0.
        gpus=tuple(d.memory.removesuffix(".memory") for d in strategy.devices) if gpus else (),
        cliques=tuple(map(tuple, cliques.values())) if gpus or hosts > 1 else (),
        topology="partitioned" if strategy.topology.policy == "partitioned" else
        "replicated" if strategy.topology.policy == "replicated" else "host",
        replication=strategy.topology.replication,
        bulk=strategy.bulk_batches,
        bulk_bytes=strategy.bulk_bytes,
        kappa=None if kappa is None or "kappa" in asked else int(kappa),
        las=float(factor) if local and factor is not None else None,
        batching=strategy.batching,
        hosts=hosts,
    )  # fmt: skip
