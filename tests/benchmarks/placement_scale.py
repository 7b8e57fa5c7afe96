"""Placing 111 M nodes on 8 devices from hotness on disk: seconds and peak memory.

Papers100M's size: feature rows of 128 floats and lists of its mean degree, Zipf hotness in files
that are memory-mapped. Song-Jiang's best of three and joint (features and topology, one NVSwitch
clique, pipelined) each run in a process of their own, whose peak resident memory is that of the
whole process. Hotness is generated once, outside the clock.

    python -m tests.benchmarks.placement_scale --json [--nodes 111000000]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from gnnplan.planner.placement.costs import RowCosts, objective_rows
from gnnplan.planner.placement.lp.formulate import find_groups, make_buckets
from gnnplan.planner.placement.lp.relax import relax
from gnnplan.planner.placement.placement import check_placement
from gnnplan.planner.placement.policies.joint import place_joint
from gnnplan.planner.placement.policies.song_jiang import best_of
from gnnplan.planner.placement.problem import ItemKind, PlacementProblem, as_laws
from tests.benchmarks.common import cache_folder, record
from tests.support.placements import shape_network

NUM_NODES, NUM_DEVICES = 111_000_000, 8
ROW_BYTES = 512
CACHE_SHARE = 0.1
"""Of all feature rows, per device."""
BAR_SECONDS, BAR_BYTES, BAR_LP_SECONDS = 60.0, 10 * 2**30, 1.0
CHUNK = 1 << 24


def hotness_files(num_nodes: int) -> Path:
    """Folder with features.npy, topology.npy (float32) and degree.npy (int32), made once."""
    folder = cache_folder() / f"zipf-{num_nodes}"
    if (folder / "degree.npy").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    files = [
        np.lib.format.open_memmap(folder / f"{name}.part", "w+", dtype, (num_nodes,))
        for name, dtype in (
            ("features", np.float32),
            ("topology", np.float32),
            ("degree", np.int32),
        )
    ]
    rng = np.random.default_rng(0)
    for start in range(0, num_nodes, CHUNK):
        stop = min(num_nodes, start + CHUNK)
        rank = rng.integers(1, num_nodes + 1, stop - start)  # a Zipf law, its ranks shuffled
        p = np.minimum(1.0, 3e4 / rank).astype(np.float32)
        degree = np.minimum(1 + rng.pareto(1.6, stop - start) * 9, 1e5).astype(np.int32)
        files[0][start:stop] = p
        files[1][start:stop] = p * np.minimum(degree, 10)
        files[2][start:stop] = degree
    for file, name in zip(files, ("features", "topology", "degree"), strict=True):
        file.flush()
        (folder / f"{name}.part").rename(folder / f"{name}.npy")
    return folder


def peak_bytes() -> int:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compile_kernels() -> None:
    """Run both once on little, so that compilation is not timed."""
    p = np.random.default_rng(0).random(5000).astype(np.float32)
    p.flags.writeable = False  # as a mapped file is
    best_of(p, RowCosts(local=0.0, peer=0.1, host=1.0), NUM_DEVICES, 50)
    instance = make_instance(p, p, np.full(5000, 9, np.int32))
    check_placement(instance, place_joint(instance).placement)


def make_instance(
    features: np.ndarray, topology: np.ndarray, degree: np.ndarray
) -> PlacementProblem:
    """Rows and lists on 8 devices behind one NVSwitch."""
    heat, laws = as_laws(features, NUM_DEVICES)
    reads, _ = as_laws(topology, NUM_DEVICES)
    size = degree * np.int32(4)
    size += 8
    return PlacementProblem(
        kinds=(
            ItemKind(name="features", heat=heat, laws=laws, size=ROW_BYTES, read_bytes=ROW_BYTES),
            ItemKind(name="topology", heat=reads, laws=laws, size=size, read_bytes=64.0),
        ),
        cliques=(tuple(range(NUM_DEVICES)),),
        device_bytes=(int(CACHE_SHARE * len(features)) * ROW_BYTES,) * NUM_DEVICES,
        host_bytes=None,
        network=shape_network("NVSwitch 8"),
    )


def run(name: str, folder: Path) -> None:
    """One measurement, printed as JSON; in a process of its own."""
    compile_kernels()
    base = peak_bytes()
    features = np.load(folder / "features.npy", mmap_mode="r")
    found: dict[str, float | str] = {}
    start = time.perf_counter()
    if name == "song_jiang":
        rows = int(CACHE_SHARE * len(features))
        placed = best_of(features, RowCosts(local=0.0, peer=0.1, host=1.0), NUM_DEVICES, rows)
        found["seconds"] = time.perf_counter() - start
        found["variant"] = placed.variants[0].name
    else:
        topology = np.load(folder / "topology.npy", mmap_mode="r")
        degree = np.load(folder / "degree.npy", mmap_mode="r")
        instance = make_instance(features, topology, degree)
        joint = place_joint(instance)
        found["seconds"] = time.perf_counter() - start
        found |= {"gap": joint.gap, "solver": joint.relaxed.solver, "status": joint.relaxed.status}
        check_placement(instance, joint.placement)
        rows = objective_rows(instance.network, "pipelined")
        groups = find_groups(instance, rows)
        buckets = [make_buckets(kind, 256) for kind in instance.kinds]
        start = time.perf_counter()
        relax(instance, rows, groups, buckets, goal="pipelined")
        found["lp_seconds"] = time.perf_counter() - start
        found["buckets"] = sum(len(b.bytes) for b in buckets)
    found |= {"peak_bytes": peak_bytes(), "base_bytes": base}
    print(json.dumps(found))


def main() -> None:
    """Measure, print one record a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.add_argument("--nodes", type=int, default=NUM_NODES)
    parser.add_argument("--one", choices=["song_jiang", "joint"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = hotness_files(args.nodes)
    if args.one:
        run(args.one, folder)
        return
    total, peak = 0.0, 0.0
    for name in ("song_jiang", "joint"):
        command = [sys.executable, "-m", "tests.benchmarks.placement_scale"]
        command += ["--one", name, "--nodes", str(args.nodes)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(out.splitlines()[-1])
        seconds = found.pop("seconds")
        total, peak = total + seconds, max(peak, found["peak_bytes"])
        record(f"scale_{name}", seconds, "s", nodes=args.nodes, devices=NUM_DEVICES, **found)
        if "lp_seconds" in found:
            lp = found["lp_seconds"]
            record("scale_joint_lp", lp, "s", baseline=BAR_LP_SECONDS, ratio=BAR_LP_SECONDS / lp)
    record("scale_both", total, "s", baseline=BAR_SECONDS, ratio=BAR_SECONDS / total)
    record("scale_peak", peak, "B", baseline=BAR_BYTES, ratio=BAR_BYTES / peak)


if __name__ == "__main__":
    main()
