"""Each script reaches under a plan what it reached with PyG's loaders, by few changed lines."""

import difflib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links, generate_sbm
from tests.support.plans import make_plan
from tests.support.ranks import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MOST_LINES = 5
SCRIPTS: dict[str, dict[str, Any]] = {
    "node": {"batch_size": 64},
    "distributed": {"batch_size": 128, "ranks": 2},
    "link": {"batch_size": 256},
    "lightning": {"batch_size": 64},
}


def changed_lines(name: str) -> list[str]:
    """Lines that the planned script has and the other has not."""
    old, new = ((HERE / f"{name}_{kind}.py").read_text() for kind in ("pyg", "planned"))
    found = difflib.ndiff(old.splitlines(), new.splitlines())
    return [line[2:] for line in found if line.startswith("+ ") and line[2:].strip()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_at_most_five_lines_change(name: str) -> None:
    found = changed_lines(name)
    assert 2 <= len(found) <= MOST_LINES
    assert any("PlannedLoader(" in line for line in found)


def data_of(graph: Graph) -> Data:
    """A dataset as a script's own `Data`."""
    degree = np.diff(graph.indptr)
    ends = [np.asarray(graph.indices), np.repeat(np.arange(len(degree)), degree)]
    data = Data(
        x=torch.from_numpy(np.array(graph.x, np.float32)),
        edge_index=torch.from_numpy(np.stack(ends)).long(),
    )
    for split in ("train", "val", "test"):
        ids = torch.from_numpy(np.array(getattr(graph, f"{split}_idx")))
        if graph.task == "link":
            data[f"{split}_pos"] = ids.t().contiguous()
        else:
            data[f"{split}_mask"] = torch.zeros(graph.num_nodes, dtype=torch.bool)
            data[f"{split}_mask"][ids] = True
    if graph.y is not None and graph.task != "link":
        data.y = torch.from_numpy(np.array(graph.y))
    return data


def run(script: str, folder: Path) -> dict[str, float]:
    """What a script prints, by its first word."""
    own = folder / "script.py"
    own.write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, own.name, str(free_port())]
    found = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert found.returncode == 0, found.stderr[-3000:]
    splits = ("train", "val", "test")
    lines = [line.split() for line in found.stdout.splitlines() if line.startswith(splits)]
    assert lines, found.stdout
    return {words[0]: float(words[1]) for words in lines}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_converted_script_is_as_accurate(name: str, tmp_path: Path) -> None:
    if name == "lightning":
        pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    if name == "link":
        graph = generate_links(tmp_path / "graph", num_nodes=1500, seed=0)
    else:
        graph = generate_sbm(
            tmp_path / "graph", num_nodes=2000, degree=16.0, feature_dim=32, num_classes=5, seed=0
        )
    torch.save(data_of(graph), tmp_path / "data.pt")
    make_plan(graph, tmp_path / "my-plan", fanouts=[10, 5], **SCRIPTS[name])
    before = (HERE / f"{name}_pyg.py").read_text()
    before = before.replace("from torch_geometric.loader ", "from tests.support.pyg_loaders ")
    expected = run(before, tmp_path)
    found = run((HERE / f"{name}_planned.py").read_text(), tmp_path)
    assert found.keys() == expected.keys()
    for split, score in expected.items():
        assert score > 0.7
        assert found[split] == pytest.approx(score, abs=0.04)
