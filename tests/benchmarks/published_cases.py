"""Say in our words what a row of published figures is about: machine, graph, model, framework.

A row's words lead there by rules that know no row: a word that no rule knows falls to the default
beside it, and `Case.notes` says so. What cannot be predicted at all has its `Case.reason`.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gnnplan.planner.errors import MachineError
from gnnplan.planner.graph_presets import GraphPreset, graph_preset, graph_presets
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import list_presets, load_preset
from tests.benchmarks.published_rows import SCALES, Asked, Row, asked_of, first_number, paper_of

DEFAULT_CHIP = "a100"
DEFAULT_BATCH, DEFAULT_HIDDEN, DEFAULT_LAYERS, DEFAULT_FANOUT = 1024, 256, 3, 10
PINSAGE_NEIGHBOURS = 5
"""Neighbours that PinSAGE keeps of its walks in GNNLab's comparison."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheWords:
    """What a row says of caches and of the places of lists and rows."""

    share: float | None = None
    """Share of all rows on each GPU."""
    gpu_rows: float | None = None
    gpu_bytes: float | None = None
    host_rows: float | None = None
    host_bytes: float | None = None
    policy: str = ""
    replication: float | None = None
    """Share of a part's rows that it keeps of other parts."""
    kappa: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A row in our words."""

    row: Row
    paper: str
    asked: Asked
    machine: str
    gpus: int
    hosts: int
    cores: int
    """Of a host."""
    network: float
    """Bytes per second between hosts; 0 where the row does not state it."""
    graph: str
    preset: GraphPreset
    system: str
    """Name of a framework's model."""
    sampling: str
    """Where lists are drawn from: cores, host, gpu; empty: as the framework does."""
    rows: str
    """How rows come: copied, in_place; empty: as the framework does."""
    model: str
    hidden: int
    heads: int
    fanouts: tuple[int, ...]
    """Next to the seeds first; empty where the whole graph is trained at once."""
    sampler: str
    batch: int
    """Seeds of one trainer."""
    ends: int
    """Nodes that a seed stands for: 1, or those of a link and its negatives."""
    samplers: int
    """GPUs that only sample."""
    workers: int
    """Loader processes of a trainer; -1 where the row does not say."""
    train: float
    """Training nodes of an epoch."""
    cache: CacheWords
    epoch: int
    """Which epoch is meant; 0: any after the first."""
    reason: str = ""
    notes: list[str] = field(default_factory=list[str])

    @property
    def framework(self) -> str:
        """The framework's model and, by the first word, its own name."""
        words = re.findall(r"[a-z][\w+-]*", self.row.system.lower())
        return f"{self.system}/{words[0] if words else ''}"

    @property
    def version(self) -> str:
        """The framework's version, as far as its name says."""
        text = self.row.system.lower()
        number = re.search(r"\b(\d+\.\d+)", text)
        early = re.search(r"\b(?:first|dev|early|alpha|beta|prototype)\b", text)
        return f"{number[1] if number else ''}{' ' + early[0] if early else ''}"

    @property
    def trainers(self) -> int:
        """GPUs that train; without GPUs the hosts."""
        return max(1, self.gpus - self.samplers) if self.gpus else max(1, self.hosts)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return 1 if not self.fanouts else max(1, -int(-self.train // (self.batch * self.trainers)))

    def mapped(self) -> dict[str, Any]:
        """What the row was read as, for its line."""
        caches = {k: v for k, v in _plain(self.cache).items() if v not in (None, "", 1)}
        return {
            "system": self.system, "machine": self.machine, "gpus": self.gpus, "hosts": self.hosts,
            "graph": self.graph, "model": self.model, "hidden": self.hidden,
            "fanouts": list(self.fanouts), "sampler": self.sampler, "batch": self.batch,
            "steps": self.steps, "cache": caches,
            **({"notes": self.notes} if self.notes else {}),
        }  # fmt: skip


def _plain(words: CacheWords) -> dict[str, Any]:
    return {name: getattr(words, name) for name in CacheWords.__slots__}


@functools.cache
def _known_machines() -> dict[str, MachineModel]:
    found: dict[str, MachineModel] = {}
    for name in list_presets():
        machine = load_preset(name)
        if machine.gpus:
            found[name] = machine
    return found


def _tokens(text: str) -> list[str]:
    words = re.split(r"[^a-z0-9]+", text.lower())
    return [re.sub(r"^\d{1,3}x(?=[a-z])", "", word) for word in words if word]


def _chip(machine: MachineModel) -> str:
    """The word of a GPU's model that names its chip."""
    other = re.compile(r"sxm\d*|hbm\d*\w*|\d+gb|pcie|nvl\d*|\d+g")
    words = [t for t in _tokens(machine.gpus[0].model) if re.search(r"\d", t)]
    return next((t for t in words if not other.fullmatch(t)), "")


def machine_of(row: Row, notes: list[str]) -> str:
    """Find the preset whose GPUs, size and name fit the hardware's words best."""
    words, known = _tokens(row.hardware), _known_machines()
    raw = re.split(r"[\s,:;()]+", row.hardware.lower())
    per_host = -(-max(1, row.gpus) // max(1, row.hosts))
    for name in known:  # an instance's own name
        if name in raw:
            return name
    chips = {name: _chip(machine) for name, machine in known.items()}
    chip = next((t for t in words if t in set(chips.values())), "")
    if not chip and "count" not in words:
        notes.append(f"no GPU that is known in {row.hardware!r}: {DEFAULT_CHIP} taken")
    chip = chip or DEFAULT_CHIP
    sizes = {int(n) for n in re.findall(r"(?<![\d.])(\d{1,3})\s?-?g", row.hardware.lower())}
    sizes |= {int(t) for t in words if t.isdecimal()}
    sizes = {size for size in sizes if 8 <= size <= 200}

    def fit(name: str) -> tuple[Any, ...]:
        machine = known[name]
        gigabytes = machine.memory(machine.gpus[0].memory).capacity_bytes / 2**30
        fits = any(abs(gigabytes / size - 1) < 0.1 for size in sizes)
        named = sum(t in words for t in _tokens(name) if not t.isdecimal())
        enough = len(machine.gpus) >= per_host
        return (chip not in chips[name], not fits, -named, not enough, len(machine.gpus), name)

    return min((name for name in known if chips[name] == chip), key=fit)


def cores_of(row: Row, machine: str) -> int:
    """Read the cores of a host, two threads to a core, else the preset's."""
    if found := re.search(r"(\d+)\s*(v?)(?:cores|cpus?\b)", row.hardware.lower()):
        return max(1, int(found[1]) // (2 if found[2] else 1))
    return load_preset(machine).num_cores


def hosted(machine: str, hosts: int, notes: list[str]) -> str:
    """A preset on several hosts, where it names a network; two stand for more, whose links do not
    share anything with them."""
    if hosts <= 1:
        return machine
    try:
        load_preset(f"{machine}:2")
    except MachineError:
        notes.append(f"{machine} names no network for {hosts} hosts: one of them is taken")
        return machine
    return f"{machine}:2"


def ends_of(row: Row) -> int:
    """Nodes that a batch begins with for each of its seeds."""
    text = f"{row.dataset} {row.model} {row.notes} {row.quantity}".lower()
    if not re.search(r"\blink\b|link pred|unsup", text):
        return 1
    negatives = re.search(r"(\d+) negatives", text)
    return 2 + (int(negatives[1]) if negatives else 1)


TWO_WAYS = re.compile(r"undirected|bidirect|symmetri|both directions|two-way")
ALL_TYPES = re.compile(r"homogen|all (?:node )?types")


def graph_of(row: Row, *, two_ways: bool, notes: list[str]) -> tuple[str, GraphPreset, float]:
    """Find the data set, with what the row itself states of it, and its training nodes."""
    text = re.sub(r"\bog[bn][a-z]*-(?=[a-z])", "", row.dataset.lower())
    known = graph_presets()
    first = re.split(r"[\s,(]", text.strip(), maxsplit=1)[0]
    found = first if first in known else ""
    longer = [n for n in known if len(n) >= 4 and re.search(rf"(?<![\w-]){re.escape(n)}", text)]
    name = found or max(longer, key=len, default="")
    if name and (two_ways or TWO_WAYS.search(text)) and f"{name}-both" in known:
        name = f"{name}-both"
    if name and ALL_TYPES.search(text) and f"{name}-all" in known:
        name = f"{name}-all"
    stated = _stated(text)
    if name:
        preset = graph_preset(name)
        changed = {k: v for k, v in stated.items() if k in ("feature_dim", "feature_dtype")}
        preset = replace(preset, **changed)
    else:
        notes.append(f"data set {row.dataset!r} is not known: sizes as stated, else of products")
        usual = graph_preset("products")
        nodes = int(stated.get("nodes", usual.nodes))
        edges = int(stated.get("edges", nodes * usual.mean_degree))
        kept = {k: v for k, v in stated.items() if k in ("feature_dim", "feature_dtype")}
        preset = replace(usual, nodes=nodes, edges=edges, source="stated by the row", **kept)
    train = float(stated.get("train", preset.train_share * preset.nodes))
    return name or first, preset, train


def _stated(text: str) -> dict[str, Any]:
    """Sizes that a data set's words state."""
    found: dict[str, Any] = {}
    for key, pattern in (("nodes", r"([\d.,]+\s*[kmgb]?)\s*(?:nodes|vertices)"),
                         ("edges", r"([\d.,]+\s*[kmgb]?)\s*edges"),
                         ("train", r"([\d,]{4,})\s*(?:training\s*)?(?:seeds|training)"),
                         ):  # fmt: skip
        if match := re.search(pattern, text):
            number = first_number(match[1].upper())
            found |= {} if number is None else {key: number}
    if match := re.search(r"dim(?:ension)?s?\s*(\d+)|(\d+)\s*(?:features|dims)", text):
        found["feature_dim"] = int(match[1] or match[2])
    if re.search(r"fp16|float16|half", text):
        found["feature_dtype"] = "float16"
    return found


def trained(row: Row, batch: int, trainers: int, train: float) -> float:
    """Training nodes, where the notes state steps or batches of an epoch."""
    notes = row.notes.lower()
    if match := re.search(r"([\d,]+) batches of (\d+)", notes):
        return float(match[1].replace(",", "")) * int(match[2])
    if match := re.search(r"\b([\d,]+) (?:steps|iterations|minibatches)\b", notes):
        return float(match[1].replace(",", "")) * batch * trainers
    return train


MODELS = (
    (r"r-?gat", "rgat"), (r"r-?gcn", "rgcn"), (r"gat", "gat"), (r"pinsage", "pinsage"),
    (r"sage", "sage"), (r"gcn", "gcn"), (r"gin\b", "sage"), (r"none", "none"),
)  # fmt: skip


def model_of(row: Row, notes: list[str]) -> tuple[str, int]:
    """Find the model and its heads."""
    text = row.model.lower()
    name = next((name for pattern, name in MODELS if re.search(pattern, text)), "")
    if not name:
        if text:
            notes.append(f"model {row.model!r} is not known: sage taken")
        name = "sage"
    heads = re.search(r"(\d+)\s*heads", text)
    return name, int(heads[1]) if heads else (4 if name in ("gat", "rgat") else 1)


def fanouts_of(row: Row, model: str, *, seeds_last: bool, notes: list[str]) -> tuple[int, ...]:
    """Read fan-outs, next to the seeds first; lists of DGL's order end next to the seeds."""
    text = row.fanouts.lower()
    if "full" in text or "full" in row.batch.lower():
        return ()
    listed = re.match(r"[\[( ]*(-?\d+(?:\s*[,/x ]\s*-?\d+)*)", text)
    if listed is None:
        fanout = PINSAGE_NEIGHBOURS if model == "pinsage" else DEFAULT_FANOUT
        notes.append(f"fan-outs not stated: {fanout} a hop")
        return (fanout,) * (row.layers or DEFAULT_LAYERS)
    found = [int(x) for x in re.findall(r"-?\d+", listed[1])]
    if len(found) == 1 and row.layers > 1:
        found = found * row.layers
    return tuple(reversed(found) if seeds_last else found)


def batch_of(row: Row) -> int:
    """Seeds of one trainer."""
    number = first_number(row.batch)
    if number is None:
        return DEFAULT_BATCH
    shared = "global" in row.batch.lower() or "total" in row.batch.lower()
    return max(1, int(number) // max(1, row.gpus) if shared else int(number))


POLICIES = (
    "optimal", "presample", "degree", "random", "vip", "sieve", "fifo", "lru", "clock", "static",
)  # fmt: skip


def caches_of(row: Row) -> CacheWords:
    """Read sizes, shares and policies of caches."""
    text = f"{row.system} {row.cache} {row.notes if 'kappa' in row.notes.lower() else ''}".lower()
    found: dict[str, Any] = {}
    if match := re.search(r"(?:cache )?share ([\d.]+)", text):
        found["share"] = float(match[1])
    elif match := re.search(r"([\d.]+)%\s*(?:of )?(?:own )?(?:rows|on gpu|cached|cache)?", text):
        found["share"] = float(match[1]) / 100
    for amount, scale, unit, before in re.findall(
        r"([\d.,]+)\s*([kmg]?)\s*(rows|gb)\s*(gpu|cpu|host|cached)?", text
    ):
        value = float(amount.replace(",", "").rstrip(".")) * SCALES.get(scale, 1.0)
        key = "host_rows" if before in ("cpu", "host") else "gpu_rows"
        if unit == "gb":
            value *= 1e9
            key = "gpu_bytes" if before == "gpu" else "host_bytes"
        found.setdefault(key, value)
    if match := re.search(r"(?:replication|alpha)\s*([\d.]+)", text):
        found["replication"] = float(match[1])
    if match := re.search(r"kappa\s*=?\s*(\d+)", text):
        found["kappa"] = int(match[1])
    words = re.split(r"[^a-z0-9]+", f"{row.cache} {row.system}".lower())
    found["policy"] = next((p for p in POLICIES if any(w.startswith(p) for w in words)), "")
    return CacheWords(**found)


DGL_UNSAID = "dgl-gpu"
"""DGL where nothing says how it draws."""
SYSTEMS: tuple[tuple[str, str], ...] = (
    (r"mlperf|wholegraph|\bwg\b", "wholegraph"),
    (r"cugraph", "cugraph-pyg"),
    (r"gnnlab", "gnnlab"),
    (r"ugache|clique", "wholegraph"),
    (r"\bsgnn\b|cache policy|legion|pagraph|gnnadvisor", "sgnn"),
    (r"quiver", "quiver"),
    (r"ginex|pyg\+|marius|diskgnn|outre|gids", "ginex"),
    (r"memory[- ]mapped|mmap|np\.memmap", "dgl-mmap"),
    (r"distgraphbolt|distdgl|graphstorm", "dgl-cpu"),
    (r"graphbolt.*(?:disk|ssd)|disk.*graphbolt", "graphbolt-disk"),
    (r"graphbolt", "graphbolt-uva"),
    (r"salient|partitioned|\bvip\b|degree reachable", "salient"),
    (r"bns|pipegcn|adaqp|cagnet|\broc\b|full[- ]graph", "dgl-full-graph"),
    (r"pyg 2\.0|pytorch geometric 1|torch-geometric 1", "pyg-2.0-loader"),
    (r"\bpyg\b|pytorch.geometric|neighborloader", "pyg-loader"),
    (r"dgl.*(?:cpu sampling|sampling on cpu)", "dgl-cpu"),
    (r"dgl.*(?:uva|unifiedtensor)", "dgl-uva"),
    (r"dgl.*(?:gpu|allcuda|cuda)", "dgl-gpu"),
    (r"dgl", DGL_UNSAID),
)
"""Framework by the first of these words; those of the system's own name go before its settings'."""
DEFAULT_SYSTEM = "dgl-uva"
SEEDS_LAST = re.compile(r"dgl|graphbolt|gnnlab|sgnn|cache policy|ugache|distrgcn")
"""Systems whose lists of fan-outs go from the inputs to the seeds."""
BOTH_WAYS = re.compile(r"graphbolt|salient|partitioned|cugraph|diskgnn")
"""Systems and sources that train papers100M on both directions of its edges (DiskGNN's load_graph
adds the reverse ones, for its baselines too)."""
NARROWED = re.compile(r"diskgnn")
"""Sources that train MAG240M on all node types with 128 float32 columns (DiskGNN's load_graph)."""


def system_of(row: Row, notes: list[str]) -> str:
    """Find the framework whose model speaks for the row."""
    own, words = row.system.lower(), row.words
    if "full" in row.fanouts.lower() or row.batch.lower().startswith("full"):
        return "bns-gcn" if "bns" in own else "dgl-full-graph"
    if re.search(r"disk|ssd|nvme", row.cache.lower()) and "graphbolt" in own:
        return "graphbolt-disk"
    for text in (own, words):
        for pattern, name in SYSTEMS:
            if re.search(pattern, text):
                if pattern.startswith("dgl") and text is own and name == DGL_UNSAID:
                    break  # which of its ways is said by the settings
                return name
    notes.append(f"system {row.system!r} is not known: {DEFAULT_SYSTEM} taken")
    return DEFAULT_SYSTEM


def places_of(row: Row) -> tuple[str, str]:
    """Where lists and rows are, as far as the row's settings say."""
    text = f"{row.cache} {row.notes} {row.system}".lower()
    sampling = rows = ""
    if re.search(r"sampling on cpu|cpu sampling", text) or row.gpus == 0:
        sampling = "cores"
    elif re.search(r"sampling on uva|\buva\b", text):
        sampling = "host"
    elif re.search(r"sampling (?:in|on) gpu|gpu sampling|all in gpu|allcuda|\bcuda\b", text):
        sampling = "gpu"
    if re.search(r"features (?:on )?cpu|page cache", text):
        rows = "copied"
    elif re.search(r"unifiedtensor|\buva\b|page-locked|pinned|all in gpu|allcuda|gpu memory", text):
        rows = "in_place"
    return sampling, rows


def case_of(row: Row) -> Case:
    """Read a row; nothing in it makes this fail."""
    notes: list[str] = []
    asked = asked_of(row)
    machine = machine_of(row, notes)
    system = system_of(row, notes)
    own = row.system.lower()
    model, heads = model_of(row, notes)
    source = f"{own} {row.source.lower()}"
    two_ways = bool(BOTH_WAYS.search(source))
    name, preset, train = graph_of(row, two_ways=two_ways, notes=notes)
    if name == "mag240m" and NARROWED.search(source):
        name = "mag240m-all"
        preset = replace(graph_preset(name), feature_dim=128, feature_dtype="float32")
    if system == "wholegraph" and "mlperf" in own:
        seeds_last = False  # MLPerf's rules count hops from the seeds
    else:
        seeds_last = bool(SEEDS_LAST.search(own))
    samplers = re.search(r"\b(\d+)\s*s\b", f"{row.cache} {row.system}".lower())
    split = int(samplers[1]) if samplers and system == "gnnlab" else 0
    if system == "gnnlab" and not split and row.gpus > 1:
        split = 1
    batch, sampling, rows = batch_of(row), *places_of(row)
    gpus = 1 if re.search(r"of one (?:gpu|trainer)|one sampler/trainer", row.words) else row.gpus
    gpus += split if gpus < row.gpus else 0
    workers = re.search(r"num_workers\s*=?\s*(\d+)|(\d+) workers", row.words)
    epoch = re.search(r"epoch (\d+)", row.quantity.lower())
    network = re.search(r"([\d.]+)\s*gbit", row.hardware.lower())
    first = int(epoch[1]) if epoch else (1 if "first" in row.quantity.lower() else 0)
    reason = asked.reason
    if re.search(r"graph property|graph-level|molecul", f"{row.model} {row.notes}".lower()):
        reason = "training on many small graphs is outside the product"
    case = Case(
        row=row,
        paper=paper_of(row.source),
        asked=asked,
        machine=hosted(machine, row.hosts, notes),
        gpus=gpus,
        hosts=max(1, row.hosts),
        cores=cores_of(row, machine),
        network=float(network[1]) * 1e9 / 8 if network else 0.0,
        graph=name,
        preset=preset,
        system=system,
        sampling=sampling,
        rows=rows,
        model=model,
        hidden=row.hidden or DEFAULT_HIDDEN,
        heads=heads,
        fanouts=fanouts_of(row, model, seeds_last=seeds_last, notes=notes),
        sampler="labor" if "labor" in row.words else "neighbor",
        batch=batch,
        ends=ends_of(row),
        samplers=split,
        workers=int(workers[1] or workers[2]) if workers else -1,
        train=train,
        cache=caches_of(row),
        epoch=first,
        reason=reason,
        notes=notes,
    )
    return replace(case, train=trained(row, batch, case.trainers, train))


def cases_of(rows: Sequence[Row]) -> list[Case]:
    """Read all rows."""
    return [case_of(row) for row in rows]
