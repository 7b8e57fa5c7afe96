"""What a training would take on machines nobody has here: sizes, prices, fit, and monotone."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.graph_presets import KnownGraph, know_graph
from gnnplan.planner.machine.model import MachineModel, save_machine
from gnnplan.planner.pipeline import first_answer
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.order import HeatGroups, split_rows
from gnnplan.planner.placement.policies.song_jiang import best_of
from gnnplan.planner.probe.presets import list_presets, load_preset
from gnnplan.planner.profile.analytic import expand, lognormal_classes
from gnnplan.planner.profile.estimated import SPREAD, TypedGraph, typed_batch
from gnnplan.planner.queries.estimate import (
    HOST_BOUND,
    Estimates,
    EstimateSettings,
    estimate,
    render,
)
from gnnplan.planner.queries.price_ways import PricedWay, best_way, list_ways
from gnnplan.planner.search.dimensions.ranks import LINKS, faster_link, machine_of_ranks
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_rmat

SMALL = EstimateSettings(
    nodes=2e6, edges=6e7, features=100, train=0.1, machine="dgx-a100,dgx-v100", batch_size=4096
)


@pytest.fixture(scope="module")
def found() -> Estimates:
    return estimate(SMALL)


def test_each_machine_says_what_an_epoch_takes_with_its_interval(found: Estimates):
    assert {each.machine for each in found.estimates} == {"dgx-a100", "dgx-v100"}
    assert found.steps_per_epoch == math.ceil(200_000 / 4096)
    for each in found.estimates:
        step, epoch = each.step_seconds, each.epoch_seconds
        assert each.fits
        assert step is not None
        assert epoch is not None
        assert step.low < step.value < step.high
        assert step.value * step.value == pytest.approx(step.low * step.high)
        assert epoch.value == pytest.approx(step.value * 200_000 / 4096, rel=0.05)
        assert sum(each.row_shares.values()) == pytest.approx(1.0)
    text = " ".join(render(found)[2])
    assert "estimated" in text
    assert "measured" in text
    assert "predicted" not in text
    bound = {each.bottleneck for each in found.estimates}
    assert (HOST_BOUND in render(found)[2]) == ("host" in bound)


def test_answers_are_sorted_by_time_or_by_cost():
    times = [x.epoch_seconds.value for x in estimate(SMALL).estimates if x.epoch_seconds]
    assert times == sorted(times)


def test_prices_of_a_file_are_multiplied_out(tmp_path: Path):
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "dgx-a100: {dollars_per_hour: 1000, date: 2026-01-31, source: dear}\n"
        "dgx-v100: {dollars_per_hour: 0.5, date: 2026-01-31, source: cheap}\n"
    )
    by_cost = estimate(replace(SMALL, sort="cost"), prices=prices).estimates
    assert [each.machine for each in by_cost] == ["dgx-v100", "dgx-a100"]
    for each in by_cost:
        assert each.dollars_per_epoch is not None
        assert each.epoch_seconds is not None
        assert each.dollars_per_hour is not None
        hours = each.epoch_seconds.value / 3600
        assert each.dollars_per_epoch.value == pytest.approx(hours * each.dollars_per_hour)
        assert each.price.endswith("2026-01-31")
    two = estimate(replace(SMALL, machine="perlmutter", hosts=2), prices=prices).estimates[0]
    assert two.dollars_per_epoch is None


def test_what_does_not_fit_says_which_memory_lacks_how_much():
    huge = replace(SMALL, nodes=2e9, edges=1.2e11, features=1024, machine="dgx-v100")
    (told,) = estimate(huge).estimates
    assert not told.fits
    assert told.step_seconds is None
    assert told.memory == "host0"  # lists of 400 GB beside 512 GB at most
    host = next(m for m in load_preset("dgx-v100").memories if m.name == "host0")
    assert told.short_bytes > 4 * 1.2e11 - host.capacity_bytes
    assert "topology" in told.missing


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "1e6"], "no --edges and --features"),
        (["--like", "paper100m"], "did you mean papers100m"),
        (["--like", "auto"], "igb-large, arxiv, mag, found 'auto'"),
        (["--like", "reddit", "--machine", "auto"], "auto: expected a preset's name"),
        (["--like", "reddit", "--machine", "dgx-a10"], "did you mean dgx-a100"),
        (["--like", "reddit", "--nodes", "many"], "--nodes: expected a number or auto"),
        (["--like", "reddit", "--sort", "tme"], "did you mean time"),
        (["--like", "reddit", "--machine", "dgx-a100", "--devices", "9"], "at most 8 devices"),
        (["--like", "reddit", "--machine", "siton", "--hosts", "2"], "expected one host"),
        (["--like", "reddit", "--machine", "hgx-h100", "--hosts", "65"], "at most 64 hosts"),
        (["--like", "reddit", "--machine", "gb200-nvl72", "--hosts", "64"], "at most 18 hosts"),
        (["--like", "reddit", "--hosts", "500"], "--hosts: expected at most 64, found 500"),
        (["--like", "reddit", "--machine", "hgx-h100:4", "--hosts", "2"], "expected 4, as --mach"),
        (["--like", "reddit", "--machine", ""], "separated by commas, found ''"),
        (["--like", "reddit", "--machine", " ,"], "separated by commas, found ' ,'"),
        (["--like", "citation2"], "with nodes to predict, found links"),
        (["--like", "papers100m", "--nodes", "1e4"], "at most 100,000,000 edges"),
        (["--like", "reddit", "--model", "rgat"], "--types FILE"),
        (["--like", "reddit", "--fanouts", "0"], "fan-outs of at least 1"),
        (["nowhere"], "expected a graph dataset folder"),
        (["nowhere", "--like", "reddit"], "drop one"),
    ],
)
def test_wrong_input_is_a_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["estimate", *words]) == 2
    told = capsys.readouterr().err.strip()
    assert said in told
    assert "\n" not in told


def test_the_command_prints_json_and_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("COLUMNS", raising=False)  # as wide as it likes where no terminal is
    words = ["estimate", "--nodes", "2e6", "--edges", "6e7", "--features", "100"]
    words += ["--machine", "dgx-a100", "--train", "0.1", "--batch-size", "4096"]
    assert main([*words, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    (one,) = estimate(replace(SMALL, machine="dgx-a100")).estimates
    assert one.step_seconds is not None
    assert plain["estimates"][0]["step_seconds"]["value"] == one.step_seconds.value
    assert main([*words, "--all"]) == 0
    table = capsys.readouterr().out
    assert table.count("NVIDIA A100") == 4  # one, two, four and eight GPUs


def best_seconds(machine: MachineModel, asked: EstimateSettings, known: KnownGraph) -> float:
    """Seconds of the fastest way that fits; infinite where none does."""
    best = best_way(list_ways(machine, PlanSettings(workload=asked.workload()), known))
    return math.inf if best is None else best.step.seconds


def with_more(machine: MachineModel, what: str, factor: float) -> MachineModel:
    """The machine with more of one thing: a sort of links, a memory, or arithmetic."""
    if what in LINKS:
        links = [faster_link(x, factor) if LINKS[what](x) else x for x in machine.links]
        return replace(machine, links=links)
    if what == "arithmetic":
        flops = machine.table("gpu_flops")
        more = replace(flops, values=[value * factor for value in flops.values])
        return machine.with_tables({"gpu_flops": more})
    memories = [
        replace(m, capacity_bytes=int(m.capacity_bytes * factor)) if m.kind == what else m
        for m in machine.memories
    ]
    return replace(machine, memories=memories)


def check_monotone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    machine = load_preset(str(rng.choice([n for n in list_presets() if n != "cpu-2core"])))
    asked = draw_request(rng)
    known = know_graph(asked)
    before = best_seconds(machine, asked, known)
    for what in (*(name for name in LINKS if name != "disk"), "arithmetic", "device", "host"):
        more = with_more(machine, what, float(rng.uniform(1.05, 4)))
        after = best_seconds(more, asked, known)
        assert after <= before * (1 + 1e-9), (machine.name, what, after / before)


def draw_request(rng: np.random.Generator) -> EstimateSettings:
    return EstimateSettings(
        nodes=float(10 ** rng.uniform(5, 8.5)),
        edges=float(10 ** rng.uniform(7, 9.5)),
        features=int(rng.choice([16, 100, 128, 602, 1024])),
        train=float(rng.uniform(0.01, 1)),
        model=str(rng.choice(["sage", "gcn", "gat"])),  # pyright: ignore[reportArgumentType]
        hidden=int(rng.choice([32, 128, 256])),
        fanouts=[int(k) for k in rng.integers(2, 20, int(rng.integers(1, 4)))],
        batch_size=int(2 ** rng.integers(7, 15)),
    )


@pytest.mark.parametrize("seed", range(2))
def test_more_bandwidth_arithmetic_or_memory_is_never_slower(seed: int):
    check_monotone(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 120))
def test_more_is_never_slower_on_many_machines(seed: int):
    check_monotone(seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_way_is_found_as_if_every_way_were_priced(seed: int):
    rng = np.random.default_rng(seed)
    machine, asked = load_preset(["g5.12xlarge", "dgx-a100", "g6.4xlarge"][seed]), draw_request(rng)
    ways = list_ways(machine, PlanSettings(workload=asked.workload()), know_graph(asked))
    every = list[PricedWay]()
    for way in ways:
        steady = way.place().price_if_it_fits()
        if steady is not None:
            assert steady.step.seconds >= steady.least_seconds >= way.least_seconds * (1 - 1e-12)
            whole = steady.resize() if steady.memory_binds else steady
            every.append(whole.placed.price(varied=True))
    best = best_way(ways)
    assert best is not None
    assert best.step.seconds == min(each.step.seconds for each in every)


@pytest.mark.parametrize("members", [1, 2, 4])
def test_rows_are_split_as_well_as_any_split_and_as_song_and_jiang_do(members: int):
    rng = np.random.default_rng(members)
    chance = np.sort(rng.random(60) ** 3)[::-1]
    costs = RowCosts(local=0.1, peer=0.4, host=1.0)
    heat = HeatGroups(
        nodes=np.full(60, 10.0), chance=chance, reads=np.zeros(60), lengths=np.zeros(60)
    )
    rows, seconds = split_rows(heat, costs, members=members, own_rows=120.0, host_rows=600.0)
    assert sum(rows.values()) == pytest.approx(10 * chance.sum())
    every = [
        split_rows_by_hand(np.repeat(chance, 10), costs, members, 120, copied)
        for copied in range(121)
    ]
    # Between whole rows it may be a little less.
    assert min(every) * (1 - 1e-3) <= seconds <= min(every) * (1 + 1e-9)
    placed = best_of(np.repeat(chance, 10), costs, members, 120)
    assert seconds == pytest.approx(placed.variants[0].mean_seconds, rel=0.01)


def split_rows_by_hand(
    p: np.ndarray, costs: RowCosts, members: int, capacity: int, copied: int
) -> float:
    held = min(p.size, copied + members * (capacity - copied))
    hot, warm, all_of = p[:copied].sum(), p[copied:held].sum(), p.sum()
    own = hot + warm / members
    return float(
        own * costs.local + (hot + warm - own) * costs.peer + (all_of - hot - warm) * costs.host
    )


def test_a_typed_graph_of_one_type_is_a_plain_one():
    nodes, edges = 100_000, 2_000_000
    typed = TypedGraph(seeds="a", nodes={"a": nodes}, edges=[("a", "a", edges)])
    found = typed_batch(typed, 500, [10, 5], every_hop=True)
    classes = lognormal_classes(nodes, edges, SPREAD)
    plain = expand(classes, classes.nodes * (500 / nodes), [10, 5], "neighbor")
    assert [each["a"] for each in found.vertices] == pytest.approx(
        [plain.count(hop) for hop in range(3)]
    )
    assert [each[0] for each in found.edges] == pytest.approx(plain.edges)


TYPES = (
    "seeds: paper\nnodes: {paper: 1000000, author: 2000000}\n"
    "edges: [[paper, paper, 9000000], [author, paper, 4000000], [paper, author, 4000000]]\n"
)
TYPED = EstimateSettings(
    features=128, model="rgat", machine="dgx-a100", fanouts=[9, 9], batch_size=1 << 16
)


@pytest.fixture
def types(tmp_path: Path) -> Path:
    """A file of a typed graph, a third of whose nodes are of the seeds' type."""
    place = tmp_path / "types.yaml"
    place.write_text(TYPES)
    return place


def test_typed_graphs_are_estimated_with_models_of_the_cost_file(types: Path):
    (one,) = estimate(TYPED, types=types).estimates
    (wider,) = estimate(replace(TYPED, hidden=1024), types=types).estimates
    assert one.step_seconds is not None
    assert wider.step_seconds is not None
    assert one.stages["forward_backward"] < wider.stages["forward_backward"]


def test_an_update_is_in_float32_whatever_the_products_are_in(types: Path):
    wide = replace(TYPED, hidden=4096)
    single, half = (
        estimate(replace(wide, precision=each), types=types).estimates[0].stages
        for each in ("float32", "bfloat16")
    )
    assert half["forward_backward"] < single["forward_backward"]
    assert half["optimizer"] == single["optimizer"]


def test_of_a_typed_graph_nodes_of_the_seeds_type_alone_are_trained_on(types: Path):
    found = estimate(TYPED, types=types)
    assert (found.nodes, found.num_train) == (3_000_000, 100_000)
    assert found.steps_per_epoch == math.ceil(100_000 / TYPED.batch_size)
    assert "clustered" not in found.sizes
    assert estimate(replace(TYPED, train=0.25), types=types).num_train == 750_000
    assert estimate(replace(TYPED, train=0.334), types=types).num_train == 1_000_000  # rounded


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seeds: papers\nnodes: {paper: 10}\nedges: [[paper, paper, 9]]\n", "papers"),
        ("seeds: a\nnodes: {a: 9, b: 9}\nedges: [[a, b, 9]]\n", "whose targets are of a"),
    ],
)
def test_types_that_cannot_be_are_refused(types: Path, text: str, said: str):
    types.write_text(text)
    with pytest.raises(InputError, match=said):
        estimate(TYPED, types=types)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"nodes": 1000}, "--nodes: expected 3,000,000, the sum over --types, found 1,000"),
        ({"edges": 2e7}, "--edges: expected 17,000,000"),
        ({"train": 0.5}, "--train: expected at most 0.3333 of all nodes"),
    ],
)
def test_sizes_that_contradict_those_by_type_are_refused(
    types: Path, beside: dict[str, float], said: str
):
    with pytest.raises(SettingsError, match=said) as refused:
        estimate(replace(TYPED, **beside), types=types)
    assert "\n" not in str(refused.value)


def test_rounded_sizes_beside_those_by_type_are_the_same(types: Path):
    rounded = replace(TYPED, nodes=3.01e6, edges=1.7e7)
    assert estimate(rounded, types=types) == estimate(TYPED, types=types)


@pytest.mark.parametrize(
    ("machine", "least", "most"), [("dgx-v100", 0.9, 1.0), ("dgx-a100", 0.4, 0.55)]
)
def test_half_precision_makes_products_faster_where_the_gpu_has_it(
    types: Path, machine: str, least: float, most: float
):
    asked = replace(TYPED, machine=machine, devices=1, batch_size=1 << 13)
    asked = replace(asked, features=1024, hidden=1024)
    seconds = [
        one.stages["forward_backward"]
        for precision in ("bfloat16", "tf32")
        for one in estimate(replace(asked, precision=precision), types=types).estimates
    ]
    assert least < seconds[0] / seconds[1] < most


def test_several_hosts_share_the_batch_and_sum_over_their_cards():
    wide = replace(SMALL, machine="hgx-h100", batch_size=1 << 18, hidden=1024, devices=8, train=0.5)
    (one,), (eight,) = (estimate(each).estimates for each in (wide, replace(wide, hosts=8)))
    assert (one.gpus, eight.gpus) == (8, 64)
    assert one.step_seconds is not None
    assert eight.step_seconds is not None
    assert one.step_seconds.value / 8 < eight.step_seconds.value < one.step_seconds.value
    (alone,) = estimate(replace(wide, batch_size=1 << 15)).estimates
    assert eight.stages["forward_backward"] == alone.stages["forward_backward"]
    assert eight.stages["all_reduce"] > alone.stages["all_reduce"]
    for hosts in (None, 8):
        assert estimate(replace(wide, machine="hgx-h100:8", hosts=hosts)).estimates == [eight]


def test_a_batch_has_no_more_seeds_than_there_are_nodes_to_train_on():
    few = replace(SMALL, machine="dgx-a100", devices=8, train=0.001)
    (whole,) = estimate(replace(few, batch_size=2000)).estimates
    (more,) = estimate(replace(few, batch_size=1 << 16)).estimates
    assert more == whole


def test_shares_of_rows_are_those_of_all_ranks():
    asked = replace(SMALL, nodes=5e7, edges=1e9, features=512, machine="siton", devices=5)
    settings = PlanSettings(workload=asked.workload(), devices=5)
    machine = machine_of_ranks(load_preset("siton"), settings)
    best = best_way(list_ways(machine, settings, know_graph(asked)))
    assert best is not None
    every = [rank.shares for rank in best.placed.rows.ranks]
    assert any(each != every[0] for each in every)  # a bridged pair, and cards without their other
    (told,) = estimate(asked).estimates
    assert told.row_shares["host"] == pytest.approx(np.mean([each["host"] for each in every]))


def test_where_sizes_and_rates_are_from_is_said_and_no_more(tmp_path: Path):
    place = tmp_path / "box.json"
    save_machine(replace(load_preset("dgx-a100"), name="box", provenance="measured"), place)
    mixed = estimate(replace(SMALL, machine=f"{place},dgx-v100")).rates
    measured, preset = (estimate(replace(SMALL, machine=x)).rates for x in (str(place), "dgx-v100"))
    assert "rates of presets" in preset
    assert "rates of presets" not in measured
    assert f"rates of {place}, measured as far as a probe did" in measured
    assert "rates of presets" in mixed
    assert str(place) in mixed
    for each in (mixed, measured, preset):
        assert "meant to hold 90%, which no run has verified" in each
    changed = estimate(replace(SMALL, nodes=None, like="reddit", dtype="float16"))
    assert changed.sizes == "sizes like reddit but for --edges, --features, --dtype, --train"


def test_a_data_set_whose_clustering_nobody_counted_is_as_uncertain_as_sizes_alone():
    plain, fitted, assumed = (
        know_graph(asked)
        for asked in (SMALL, EstimateSettings(like="reddit"), EstimateSettings(like="protein"))
    )
    assert fitted.error < plain.error == assumed.error
    assert assumed.words == "sizes like protein, clustered as usual"


@pytest.fixture(scope="module")
def rmat(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    place = tmp_path_factory.mktemp("estimate") / "rmat"
    return generate_rmat(place, num_nodes=20_000, degree=12, feature_dim=64, seed=3)


def test_of_a_dataset_an_estimate_is_near_the_first_answer_of_a_plan(
    rmat: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    asked = EstimateSettings(machine="dgx-a100", devices=4, batch_size=1024, hidden=64)
    (told,) = estimate(asked, rmat.path).estimates
    made = first_answer(
        rmat.path,
        PlanSettings(workload=asked.workload(), devices=4),
        machine=load_preset("dgx-a100"),
        out=tmp_path / "plan",
    )
    assert told.step_seconds is not None
    assert told.step_seconds.value == pytest.approx(made.prediction.step_seconds.value, rel=0.05)


def test_of_a_dataset_no_row_and_no_edge_is_read(rmat: Graph, tmp_path: Path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(rmat.path, other)
    for name in ("indices", "x"):
        np.save(other / f"{name}.npy", np.zeros_like(np.load(other / f"{name}.npy")))
    asked = EstimateSettings(machine="dgx-a100")
    first, second = (estimate(asked, folder) for folder in (rmat.path, other))
    assert first.estimates == second.estimates
