"""Choose ranks that do more together than sum gradients.

Cooperative batches: ranks sample one batch together, each its own nodes. Grids: the topology is
partitioned over a 1.5D grid of ranks, none of which has all lists: of several hosts, or of GPUs.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, columns_of, in_columns
from gnnplan.planner.cost.backends.grid import replications
from gnnplan.planner.cost.memory import gpu_stack_bytes
from gnnplan.planner.cost.request import Request, seeds_per_rank
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.placement.owned import OWNED
from gnnplan.planner.search.dimensions.dimension import (
    Dimension,
    Draws,
    Omission,
    Proposal,
    ProposalInputs,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.plan.schema import Sampler, TopologyPlacement
from gnnplan.runtime.sampling.registry import is_able, is_default, why_alone

LEGION = "legion"
"""Placement whose ranks draw the seeds of a hierarchical partition where lists are cached too."""
HIERARCHICAL = "hierarchical"
"""Partition between cliques by the least cut, and within each by a hash (formulas 2.2)."""


class CachedLists(Dimension):
    """Hot adjacency lists that GPUs keep in the memory that feature rows share (DEC-126)."""

    name = "hot lists on GPUs"
    bounded = False

    def applies(self, candidate: Candidate) -> bool:
        """Return whether GPUs keep some lists."""
        return candidate.topology.policy == "cached"

    def describe(self, candidate: Candidate) -> str:
        """Say that ranks draw seeds of their own."""
        return "seeds by partition" if candidate.partition != "none" else ""

    def family(self, candidate: Candidate) -> Hashable:
        """Tell apart lists of one GPU's own, of a clique's, and seeds by partition."""
        return candidate.topology.peers, candidate.partition

    def no_gain_reason(self, candidate: Candidate) -> str:
        """Say what seeds by partition change."""
        return "ranks draw the seeds of their parts" if candidate.partition != "none" else ""

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield own lists, lists of the clique, and Legion whole, in place of lists on the host."""
        if base is None or not base.gpus or base.topology.policy != "host":
            return
        if base.batching != "independent" or base.cache is not None:
            return
        if asked.settings.topology == "host":
            yield self.omit("topology host is asked for")
        elif asked.task == "link" or asked.settings.workload.model == "rgcn":
            yield self.omit("hot lists are not built for links and typed graphs")
        elif base.num_ranks in asked.whole_lists:
            yield self.omit("every GPU has room for the whole topology")
        else:
            for peers in (False, True) if has_peers(base) else (False,):
                yield replace(base, topology=TopologyPlacement(policy="cached", peers=peers))
            if asked.settings.policy == "auto":
                lists = TopologyPlacement(policy="cached", peers=has_peers(base))
                yield replace(base.with_policy(LEGION), topology=lists)

    def normalise(self, candidate: Candidate) -> Candidate:
        """Draw seeds by partition under Legion, and read no peers where there are none.

        Caches that fill themselves give way to lists.
        """
        if candidate.cache is not None:
            candidate = candidate.with_policy("none")
        shards = candidate.policy == LEGION and candidate.num_ranks > 1
        peers = (candidate.topology.peers or shards) and has_peers(candidate)
        return replace(
            candidate,
            topology=replace(candidate.topology, peers=peers),
            partition=HIERARCHICAL if shards else "none",
        )


def has_peers(candidate: Candidate) -> bool:
    """Return whether a GPU can read another's memory."""
    return any(len(clique) > 1 for clique in candidate.cliques)


PARTS = "kaminpar"
"""Partition that deals nodes to ranks which share a batch: few edges between parts."""
SHARED_MODELS = ("sage", "gcn", "gat")
"""Models that can stop between two layers to exchange rows."""


class SharedBatch(Dimension):
    """Batches whose work is shared among the ranks."""

    name = "cooperative batches"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the ranks share a batch."""
        return candidate.batching == "cooperative"

    def describe(self, candidate: Candidate) -> str:
        """Say that batches are cooperative, and whether parts of the graph say who owns a node."""
        return f"{self.name}, owners by parts" if candidate.owner == "partition" else self.name

    def family(self, candidate: Candidate) -> Hashable:
        """Tell apart owners by a hash and by parts."""
        return candidate.owner

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield the same ranks sharing a batch, where they keep no rows of their own."""
        if base is None or base.policy != "none" or base.topology.policy == "cached":
            return
        if asked.settings.batching == "independent":
            yield self.omit("independent batches are asked for")
        elif not shares_batches(asked.settings, asked.task, gpus=base.kind == "cuda"):
            yield self.omit("this model and sampler cannot be split over ranks")
        elif asked.profile is not None and asked.profile.shared is None:
            yield self.omit("the profile did not count what ranks would exchange")
        elif base.num_ranks > 1 and not (base.kind == "cuda" and base.threads.sample):
            # GPUs exchange ids, rows and hidden rows on the training thread (DEC-110).
            shared = replace(base, batching="cooperative")
            if asked.settings.owner != "partition":
                yield shared
            if asked.settings.owner != "hash":
                yield replace(shared, owner="partition", partition=PARTS)

    def normalise(self, candidate: Candidate) -> Candidate:
        """Make batches independent where the placement is not one for owners."""
        if candidate.policy in ("none", OWNED):
            return candidate
        return replace(candidate, batching="independent", owner="hash", partition="none")

    def adapt_request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """Return the request with what the parts of the graph deal to each rank."""
        if candidate.owner == "hash" or draws is None:
            return request
        return replace(request, owned=draws.owned(candidate.num_ranks, candidate.partition))


def keep_shared(
    found: Sequence[Candidate], left_out: Sequence[Omission], asked: ProposalInputs
) -> list[Candidate]:
    """Return the candidates whose ranks share a batch, which are asked for.

    Raises:
        SettingsError: there are none; the line says why.
    """
    shared = [each for each in found if each.batching == "cooperative"]
    if shared:
        return shared
    if "none" not in asked.policies:
        why = f"policy {asked.policies[0]}, but ranks that share a batch keep rows that they own"
    elif found and max(each.num_ranks for each in found) < 2:
        why = "one device, and a batch is shared by several"
    else:
        known = [each.why for each in left_out if each.name == SharedBatch.name]
        why = known[0] if known else "no candidate that shares a batch"
    owner = asked.settings.owner
    name, flag = (
        ("batching cooperative", "--batching") if owner == "hash" else (f"owner {owner}", "--owner")
    )
    raise SettingsError(
        f"{name}: expected ranks that can share a batch, found {why}; change that, or leave "
        f"{flag} out"
    )


def shares_batches(settings: PlanSettings, task: str, *, gpus: bool = False) -> bool:
    """Return whether ranks can share a batch of this request; mixed precision is planned on GPUs.

    >>> shares_batches(PlanSettings(), "multiclass"), shares_batches(PlanSettings(), "link")
    (True, False)
    """
    work = settings.workload
    if settings.batching == "independent" or task == "link" or work.model not in SHARED_MODELS:
        return False
    if (work.model == "gcn" and work.gcn_norm == "sampled") or not (
        gpus or work.precision in ("float32", "tf32")
    ):
        return False
    sampler = Sampler(name=settings.sampler, parameters=settings.sampler_parameters)
    try:
        return not why_alone(sampler)
    except SamplerError:
        return False


GRID_BULKS = (1, 8)
"""Batches of each rank that a grid samples at once."""


class Grids(Dimension):
    """Adjacency lists spread over hosts, or over the memories of GPUs."""

    name = "topology in parts"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the topology is partitioned."""
        return candidate.topology.policy == "partitioned"

    def describe(self, candidate: Candidate) -> str:
        """Name the number of copies of the lists, or where GPUs' own words do, the grid."""
        copies = candidate.topology.replication
        if candidate.gpus:
            places = f"grid of {candidate.num_ranks // copies} x {copies} ranks"
            within = candidate.cliques == columns_of(candidate) and candidate.policy != "none"
            return f"{places}, rows read in its columns" if within else places
        return f"{self.name}, {copies} {'copy' if copies == 1 else 'copies'}"

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield every number of copies and batches of a stack.

        Processes of one host share a mapping that holds all lists anyway.
        """
        gpus = base is not None and base.kind == "cuda"
        if base is None or (base.policy != "none" and not gpus):
            return
        if not shares_topology(asked.settings, asked.task, gpus=gpus):
            drawn = "neighbours and layers" if gpus else "uniform neighbours"
            yield self.omit(f"grids draw {drawn} of one type alone")
        elif asked.settings.topology != "auto":
            yield self.omit(f"topology {asked.settings.topology} is asked for")
        elif asked.profile is not None and not asked.profile.stacks:
            yield self.omit("the profile did not count the rows that stacks ask for")
        elif base.threads.sample == 0 if gpus else base.hosts > 1 or asked.settings.replication:
            # GPUs exchange lists on the training thread (DEC-116).
            for copies in _copies(asked.settings, base.num_ranks):
                topology = TopologyPlacement(policy="partitioned", replication=copies)
                for bulk in GRID_BULKS:
                    found = _in_stacks(asked, replace(base, topology=topology), bulk)
                    yield from (found, in_columns(found)) if base.policy != "none" else (found,)


def _copies(settings: PlanSettings, num_ranks: int) -> list[int]:
    """Return the numbers of copies to try: the user's where it divides the ranks, or all below."""
    wanted = settings.replication
    if wanted is None:
        return replications(num_ranks, num_ranks - 1)
    return [wanted] if num_ranks > 1 and num_ranks % wanted == 0 else []


def no_grids(settings: PlanSettings, starts: Iterable[Candidate], why: str) -> SettingsError:
    """Return the refusal of copies that no number of ranks is a multiple of, or for `why`."""
    counts = sorted({start.num_ranks for start in starts})
    reason = why or f"found {' or '.join(map(str, counts))} ranks"
    return SettingsError(
        f"replication {settings.replication}: expected several ranks, a multiple of it, that hold "
        f"the topology in parts; {reason}; ask for other --devices, or leave --replication out"
    )


def _in_stacks(asked: ProposalInputs, base: Candidate, bulk: int) -> Candidate:
    """Return a grid's candidate with so many batches of each rank to a stack; a GPU's have room."""
    room = 0
    if base.kind == "cuda" and bulk > 1 and asked.profile is not None:
        settings = asked.settings
        batch = asked.profile.batch(seeds_per_rank(settings.workload.batch_size, base.num_ranks))
        every_hop = settings.dialect == "every_hop"
        room = gpu_stack_bytes(batch, bulk, base.prefetch_depth, every_hop=every_hop)
    return replace(base, bulk_batches=bulk, bulk_bytes=room)


def shares_topology(settings: PlanSettings, task: str, *, gpus: bool = False) -> bool:
    """Return whether a grid can sample this request: uniform neighbours of one node type.

    GPUs sample layers too.

    >>> shares_topology(PlanSettings(), "multiclass"), shares_topology(PlanSettings(), "link")
    (True, False)
    """
    sampler, parameters = settings.sampler, settings.sampler_parameters
    named = is_able(sampler, parameters, "grid") and (gpus or is_default(sampler, parameters))
    return named and task != "link" and settings.workload.model in SHARED_MODELS
