"""What the host starts for a step: one formula, whatever the way of making batches."""

from dataclasses import replace

import pytest

from gnnplan.planner.candidate import Candidate, RankRows
from gnnplan.planner.cost.backends.cooperative import gpu_cooperative_times
from gnnplan.planner.cost.backends.gpu import GpusBackend
from gnnplan.planner.cost.rank_times import RankTimes, RankWork
from gnnplan.planner.cost.request import Part
from gnnplan.planner.cost.stages.exchange_gpu import exchange_seconds, peer_reads
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte
from gnnplan.planner.cost.stages.host import hidden_starts, loader_starts, start_seconds
from gnnplan.planner.cost.stages.sample import unpriced_words
from gnnplan.planner.cost.step import combine_ranks
from gnnplan.planner.cost.terms import add_terms
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.plan.schema import Sampler, Threads, TopologyPlacement
from gnnplan.runtime.stages import Stage
from tests.golden_plans.timings import with_gpu
from tests.planner.cost.by_hand import work
from tests.planner.cost.test_gpu import candidate, rows
from tests.support.candidates import candidate_of_ranks

ALONE = candidate_of_ranks(
    num_ranks=1, threads=Threads(), prefetch_depth=2, policy="none", gpus=("gpu0",)
)
PART = Part(
    own=[50.0, 300.0, 900.0], edges=[500.0, 1000.0], remote=[200.0, 700.0],
    asked=[200.0, 500.0], drawn=[300.0, 900.0], expanded=[50.0, 250.0],
)  # fmt: skip
DEPENDENT = Sampler(name="labor", parameters={"kappa": 4})
WAYS = {
    "by itself": ALONE,
    "ahead": replace(ALONE, threads=Threads(sample=1)),
    "in stacks": replace(ALONE, bulk_batches=8),
    "captured": replace(ALONE, threads=Threads(capture=1)),
    "captured ahead": replace(ALONE, threads=Threads(capture=1, sample=1)),
    "lru": ALONE.with_policy("lru"),
    "clock": ALONE.with_policy("clock"),
    "dependent": replace(ALONE, sampler=DEPENDENT),
    "dependent, cached": replace(ALONE.with_policy("lru"), sampler=DEPENDENT),
}


@pytest.fixture(scope="module")
def machine() -> MachineModel:
    return load_preset("hgx-h100")


def slower(machine: MachineModel, factor: float) -> MachineModel:
    table = machine.tables["gpu_start"]
    return machine.with_tables(
        {"gpu_start": replace(table, values=[factor * each for each in table.values])}
    )


def timed(work: RankWork) -> RankTimes:
    return add_terms(work, GpusBackend().stage_times(work))


def work_of(chosen: Candidate, machine: MachineModel, read: RankRows | None = None) -> RankWork:
    return work(chosen, machine, read or rows(host=1000.0), sampler="labor", row_bytes=512)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_charged_for_the_starts_of_one_count(way: str, machine: MachineModel) -> None:
    chosen = WAYS[way]
    hops = len(work_of(chosen, machine).batch.edges)
    starts = loader_starts(chosen, hops, sampler="labor")
    found = timed(work_of(chosen, machine))
    assert found.device.host == pytest.approx(start_seconds(machine) * starts.loader)
    # Each stage takes at least its own starts, and a start that takes longer is never quicker.
    for stage, count in (("sample", starts.sample), ("gather", starts.gathering)):
        assert found.seconds(Stage(stage)) >= start_seconds(machine) * count
    steps = [
        combine_ranks(chosen, each, [timed(work_of(chosen, each))]).seconds
        for each in (machine, slower(machine, 1.5), slower(machine, 3.0))
    ]
    assert steps[0] <= steps[1] <= steps[2]
    assert chosen.threads.sample or steps[0] < steps[1] < steps[2]


def test_a_kappa_of_the_users_own_is_priced_as_one_that_is_chosen(machine: MachineModel) -> None:
    plain = work_of(ALONE, machine)
    alone = timed(plain)
    chosen = timed(work_of(replace(ALONE, sampler=DEPENDENT), machine))
    mine = timed(replace(plain, user_parameters={"kappa": 4}))
    assert mine.stages == chosen.stages != alone.stages
    assert mine.device == chosen.device
    stacked = replace(ALONE, bulk_batches=8)
    one, eight = (
        timed(replace(work_of(each, machine), user_parameters={"kappa": 4})).device.host
        - timed(work_of(each, machine)).device.host
        for each in (ALONE, stacked)
    )
    assert eight == pytest.approx(one / 8)
    frozen: list[dict[str, float | str]] = [{"kappa": "inf"}, {"kappa": 4, "dependence": "frozen"}]
    for parameters in frozen:
        assert timed(replace(plain, user_parameters=parameters)) == alone
    # A GPU that is here was timed with it.
    here = replace(plain, timing=with_gpu(plain.timing, plain.batch, captures=False))
    assert timed(replace(here, user_parameters={"kappa": 4})) == timed(here)
    assert timed(replace(here, candidate=replace(ALONE, sampler=DEPENDENT))) != timed(here)


def test_lists_that_a_preference_of_the_users_own_reads_are_counted(machine: MachineModel) -> None:
    plain = replace(work_of(ALONE, machine), sampler="las")
    listed = 50 * sum(each.mean for each in plain.batch.edges)
    mine = replace(
        plain, user_parameters={"factor": 4.0}, batch=replace(plain.batch, list_entries=listed)
    )
    chosen = replace(
        plain, candidate=replace(ALONE, sampler=Sampler(name="las", parameters={"factor": 4.0})),
        batch=replace(plain.batch, read_edges=listed),
    )  # fmt: skip
    assert timed(mine) == timed(chosen)
    assert timed(mine).device.memory > 2 * timed(plain).device.memory
    here = replace(mine, timing=with_gpu(plain.timing, plain.batch, captures=False))
    copied = replace(ALONE, topology=TopologyPlacement(policy="replicated"))
    near, known = timed(replace(here, candidate=copied)), here.timing.gpu
    assert known is not None
    loop = known.loop(captured=False, ahead=False)
    assert near.seconds(Stage.SAMPLE) == pytest.approx(loop.stages["sample"])
    assert timed(here).seconds(Stage.SAMPLE) > near.seconds(Stage.SAMPLE)


def test_parameters_that_a_gpus_sampling_is_priced_without_are_named(machine: MachineModel) -> None:
    plain = work_of(ALONE, machine)
    mine = replace(plain, user_parameters={"weights": "graph", "variant": 1})
    said = timed(mine).stages[Stage.SAMPLE].provenance
    assert said.endswith("; priced for the defaults, not for variant=1, weights=graph")
    assert "for the defaults" not in timed(plain).stages[Stage.SAMPLE].provenance


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("las", {"factor": 4.0, "correction": "poisson"}, "not for correction=poisson"),
        ("las", {"factor": 4.0, "correction": "replacement"}, ""),
        ("labor", {"estimator": "plain", "kappa": 8}, ""),
        ("added by a user", {"radius": 3}, "not for radius=3"),
    ],
)
def test_no_setting_that_is_not_priced_is_kept_silent_about(
    name: str, parameters: dict[str, float | str], words: str
) -> None:
    said = unpriced_words(name, parameters)
    assert said == (f"; priced for the defaults, {words}" if words else "")


def test_a_shared_batch_is_charged_for_the_starts_of_the_same_count(machine: MachineModel) -> None:
    chosen = replace(candidate(machine, 2), batching="cooperative")
    mine = work_of(chosen, machine)
    base = timed(mine)
    found = gpu_cooperative_times(base, mine, PART, 64)
    starts = loader_starts(chosen, 2, sampler="labor")
    more = starts.share + starts.pack + hidden_starts(1)
    assert found.device.host - base.device.host == pytest.approx(more * start_seconds(machine))
    alone = loader_starts(replace(chosen, batching="independent"), 2, sampler="labor")
    assert starts.loader - alone.loader == starts.share + starts.pack
    grown = [found.seconds(s) - base.seconds(s) for s in (Stage.SAMPLE, Stage.GATHER)]
    assert grown[0] >= starts.share * start_seconds(machine)
    assert grown[1] >= starts.pack * start_seconds(machine)


def test_rows_of_peers_that_are_exchanged_are_priced_ahead_and_in_line(
    machine: MachineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.planner.cost.stages import exchange_gpu

    real = exchange_gpu.read_seconds

    def far(*args: object) -> dict[str, list[float]]:
        found = dict(real(*args))  # pyright: ignore[reportArgumentType]
        return found | {"peer": [50 * s for s in found["peer"]]}

    read = rows(own=1000.0, peer=1e6)
    chosen = candidate(machine, 2)
    mapped = timed(work_of(chosen, machine, read))
    assert mapped.seconds(Stage.EXCHANGE_ROWS) == 0.0
    monkeypatch.setattr(exchange_gpu, "read_seconds", far)
    found = timed(work_of(chosen, machine, read))
    reads = peer_reads(machine, chosen, 0, read, 512)
    assert reads is not None
    assert reads.way == "exchange"
    assert found.seconds(Stage.EXCHANGE_ROWS) == exchange_seconds(machine, chosen, 512e6)
    assert found.device.host - mapped.device.host == pytest.approx(reads.starts * reads.start)
    # Ahead of training its way over the links lies beside compute; the GPU's part does not.
    ahead = replace(chosen, threads=Threads(sample=1))
    line, lanes = (
        combine_ranks(each, machine, [timed(work_of(each, machine, read))] * 2).seconds
        for each in (chosen, ahead)
    )
    assert lanes < line


@pytest.mark.parametrize("name", ["dgx-a100", "hgx-h100", "dgx-v100", "perlmutter:2"])
def test_an_exchange_is_never_slower_over_wider_links(name: str) -> None:
    machine = load_preset(name)
    chosen = candidate(machine, len(machine.gpus))

    def seconds(wide: str) -> float:
        links = [
            replace(x, bandwidth_bytes_per_second=2 * x.bandwidth_bytes_per_second)
            if x.name.partition(".")[0].rstrip("0123456789") == wide
            else x
            for x in machine.links
        ]
        return exchange_seconds(replace(machine, links=links), chosen, 1e8)

    usual = seconds("")
    assert max(seconds(kind) for kind in ("nvlink", "pcie", "plx", "nic", "numa")) <= usual
    assert exchange_seconds(machine, chosen, 2e8) > usual


@pytest.mark.parametrize(("name", "shared"), [("dgx-a100", 2), ("dgx-v100", 2), ("hgx-h100", 1)])
def test_gpus_below_one_switch_share_its_port_to_the_host(name: str, shared: int) -> None:
    machine = load_preset(name)
    assert sum(s.kind == "pcie" for s in machine.switches) == (4 if shared == 2 else 0)
    one, two = (max(copy_seconds_per_byte(machine, candidate(machine, n))) for n in (1, 2))
    assert two == pytest.approx(shared * one)
    assert any(f"PCIe switches: {word}" in note for note in machine.notes for word in ("NV", "nv"))
