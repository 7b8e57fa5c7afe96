"""One system of `tests.benchmarks.peers`: does an epoch of what it is told, and prints its seconds.

    python -m tests.benchmarks.peers_worker graphbolt FOLDER

It runs in the environment of the system that it measures, which need not have gnnplan. FOLDER holds
indptr.npy, indices.npy, x.npy, y.npy and seeds.npy; settings.json has fan-outs (the hop next to the
seeds first), batch size, hidden columns, number of classes and of cores. Each line of stdin names
an act; the answer is one line of JSON.

sample   draws every batch, with its nodes numbered anew
load     draws every batch and collects its rows of features
train    loads every batch and takes a step of Adam on two layers of GraphSAGE
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ACTS = ("sample", "load", "train")
LEARNING_RATE = 3e-3


class Given:
    """The graph, the seeds and the settings that all systems share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = json.loads((folder / "settings.json").read_text())
        self.fanouts: list[int] = settings["fanouts"]
        self.batch_size: int = settings["batch_size"]
        self.hidden: int = settings["hidden"]
        self.num_classes: int = settings["num_classes"]
        self.cores: int = settings["cores"]
        self.arrays = {name: self.load(name) for name in ("indptr", "indices", "x", "y", "seeds")}

    def load(self, name: str) -> Any:
        return np.array(np.load(self.folder / f"{name}.npy"))

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])


class Sage(nn.Module):
    """Two layers of a library's SAGEConv with a rectifier between, as users write them."""

    def __init__(self, conv: Any, given: Given, **settings: Any) -> None:
        super().__init__()
        width = given.arrays["x"].shape[1]
        first = conv(width, given.hidden, **settings)
        self.convs = nn.ModuleList([first, conv(given.hidden, given.num_classes, **settings)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def on_blocks(self, x: Tensor, blocks: Any) -> Tensor:
        return self.convs[1](blocks[1], self.convs[0](blocks[0], x).relu())


class Peer:
    """A system; `edges` counts what it draws."""

    def __init__(self, given: Given) -> None:
        torch.manual_seed(0)
        self.given = given
        self.edges = 0
        self.versions = {"torch": torch.__version__}

    def train_with(self, model: nn.Module) -> None:
        self.model: Any = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def step(self, logits: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(logits, y).backward()
        self.optimizer.step()

    def sample(self) -> None:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError

    def train(self) -> None:
        raise NotImplementedError


class GraphBolt(Peer):
    """DGL's GraphBolt: its own sampler, feature store and layers."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.gb = importlib.import_module("dgl.graphbolt")
        dgl = importlib.import_module("dgl")
        self.versions["dgl"] = dgl.__version__
        indptr = given.tensor("indptr").long()
        self.graph = self.gb.fused_csc_sampling_graph(indptr, given.tensor("indices").long())
        rows = self.gb.TorchBasedFeature(given.tensor("x"))
        self.store = self.gb.BasicFeatureStore({("node", None, "feat"): rows})
        seeds = given.tensor("seeds").long()
        labels = given.tensor("y")[seeds]
        self.items = self.gb.ItemSet((seeds, labels), names=("seed_nodes", "labels"))
        self.train_with(Sage(dgl.nn.SAGEConv, given, aggregator_type="mean"))

    def batches(self, *, rows: bool) -> Iterator[Any]:
        pipe = self.gb.ItemSampler(self.items, batch_size=self.given.batch_size, shuffle=True)
        pipe = pipe.sample_neighbor(self.graph, self.given.fanouts[::-1])  # outermost hop first
        if rows:
            pipe = pipe.fetch_feature(self.store, node_feature_keys=["feat"])
        for batch in self.gb.DataLoader(pipe, num_workers=0):
            graphs = batch.sampled_subgraphs
            self.edges += sum(len(graph.sampled_csc.indices) for graph in graphs)
            yield batch

    def sample(self) -> None:
        for _ in self.batches(rows=False):
            pass

    def load(self) -> None:
        for _ in self.batches(rows=True):
            pass

    def train(self) -> None:
        for batch in self.batches(rows=True):
            logits = self.model.on_blocks(batch.node_features["feat"], batch.blocks)
            self.step(logits, batch.labels)


class Pyg(Peer):
    """PyG's loader over a sampler, and PyG's layers, as an unchanged PyG script has them."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        pyg = importlib.import_module("torch_geometric")
        self.versions["torch_geometric"] = pyg.__version__
        self.sampling = importlib.import_module("torch_geometric.sampler")
        target = np.repeat(np.arange(len(given.arrays["y"])), np.diff(given.arrays["indptr"]))
        edges = np.stack([given.arrays["indices"].astype(np.int64), target])
        self.data = pyg.data.Data(
            x=given.tensor("x"), y=given.tensor("y"), edge_index=torch.from_numpy(edges)
        )
        self.loader = self.make_loader(importlib.import_module("torch_geometric.loader"))
        self.train_with(Sage(pyg.nn.SAGEConv, given))

    def make_loader(self, loading: Any) -> Any:
        importlib.import_module("pyg_lib")
        return loading.NeighborLoader(self.data, self.given.fanouts, **self.wanted())

    def wanted(self) -> dict[str, Any]:
        seeds = self.given.tensor("seeds").long()
        return {"input_nodes": seeds, "batch_size": self.given.batch_size, "shuffle": True}

    def sample(self) -> None:
        seeds = self.given.tensor("seeds").long()
        order = torch.randperm(len(seeds))
        for ids in seeds[order].split(self.given.batch_size):
            wanted = self.sampling.NodeSamplerInput(input_id=None, node=ids)
            self.edges += len(self.loader.node_sampler.sample_from_nodes(wanted).row)

    def load(self) -> None:
        for batch in self.loader:
            self.edges += batch.num_edges

    def train(self) -> None:
        for batch in self.loader:
            self.edges += batch.num_edges
            logits = self.model(batch.x, batch.edge_index)[: batch.batch_size]
            self.step(logits, batch.y[: batch.batch_size])


class PygOverOurs(Pyg):
    """PyG's loader where pyg-lib is not there: over gnnplan's sampler."""

    def make_loader(self, loading: Any) -> Any:
        ours = importlib.import_module("gnnplan.runtime.sampling.pyg_sampler")
        self.sampler = ours.PygSampler.from_data(self.data, self.given.fanouts)
        self.epochs = 0
        return loading.NodeLoader(self.data, self.sampler, **self.wanted())

    def load(self) -> None:
        self.next_epoch()
        super().load()

    def train(self) -> None:
        self.next_epoch()
        super().train()

    def sample(self) -> None:
        self.next_epoch()
        super().sample()

    def next_epoch(self) -> None:
        self.epochs += 1
        self.sampler.set_epoch(self.epochs)


class Gnnplan(Peer):
    """gnnplan's loader and loop under a plan whose rows lie in memory, and PyG's layers in it."""

    dialect = "first_seen"

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        load = importlib.import_module
        graph = load("gnnplan.runtime.graph.dataset").open_graph(given.folder / "graph")
        from dataclasses import replace

        self.graph = replace(graph, train_idx=given.arrays["seeds"])
        threads = given.cores - 1
        plan = given.folder / f"plan-{self.dialect}"
        load("tests.support.plans").make_plan(
            self.graph,
            plan,
            hidden=given.hidden,
            fanouts=given.fanouts,
            batch_size=given.batch_size,
            sample_threads=threads,
            dialect=self.dialect,
        )
        loading = load("gnnplan.runtime.loader.loader")
        self.loader = loading.PlannedLoader(plan, self.graph)
        sampling = load("gnnplan.runtime.sampling.neighbor")
        minibatch = load("gnnplan.runtime.sampling.minibatch")
        self.sampler = sampling.NeighborSampler(
            given.arrays["indptr"],
            given.arrays["indices"],
            given.fanouts,
            dialect=minibatch.Dialect(self.dialect),
        )
        seeds = load("gnnplan.runtime.sampling.seeds")
        self.schedule = seeds.SeedSchedule(given.arrays["seeds"], given.batch_size, seed=0)
        self.epochs = 0
        layers = load("torch_geometric.nn")
        model = load("gnnplan.runtime.models.planned").planned(Sage(layers.SAGEConv, given))
        self.train_with(model)
        load("gnnplan.runtime.process").keep_freed_memory()  # as every rank does

    def sample(self) -> None:
        self.epochs += 1
        for step in range(self.schedule.num_steps):
            ids = self.schedule.share(self.epochs, step)[0]
            self.edges += self.sampler.sample(ids, epoch=self.epochs, step=step).num_edges

    def load(self) -> None:
        for batch in self.loader:
            self.edges += batch.num_edges

    def train(self) -> None:
        for batch in self.loader:
            self.edges += batch.num_edges
            self.step(self.model(batch), batch.y)


class GnnplanEveryHop(Gnnplan):
    """The same, with every node of a hop expanded again, as DGL does."""

    dialect = "every_hop"


PEERS: dict[str, type[Peer]] = {
    "gnnplan": Gnnplan,
    "gnnplan_every_hop": GnnplanEveryHop,
    "pyg_over_gnnplan": PygOverOurs,
    "pyg": Pyg,
    "graphbolt": GraphBolt,
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    given = Given(folder)
    torch.set_num_threads(max(1, given.cores - 1) if name.startswith("gnnplan") else given.cores)
    peer = PEERS[name](given)
    print(json.dumps({"versions": peer.versions}), file=answers)
    for line in sys.stdin:
        peer.edges = 0
        began, core = time.perf_counter(), time.process_time()
        getattr(peer, line.strip())()
        seconds, core = time.perf_counter() - began, time.process_time() - core
        answer = {"seconds": seconds, "core_seconds": core, "edges": peer.edges}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
