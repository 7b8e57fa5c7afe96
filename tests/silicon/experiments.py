"""The experiments that wait for a GPU, the one list of them.

To add one: a function of a module here that takes a `Setting` and raises where it fails, and an
entry below with its seconds (three minutes at most; split what takes longer) and the files that
its answer depends on.
"""

import re

from tests.emulated.modes import MODES, Mode
from tests.silicon.queue import Experiment, Sitting

COLLECTIVES = ("runtime/comm/*.py", "tests/silicon/setting.py", "tests/support/ranks.py")
WORKER = (
    *COLLECTIVES, "runtime/*.py", "runtime/train/*.py", "runtime/features/*.py",
    "runtime/models/*.py", "runtime/sampling/**/*.py", "runtime/loader/*.py",
    "runtime/plan/*.py", "runtime/launch/*.py",
    "runtime/faults/*.py", "tests/support/plans.py",
)  # fmt: skip
MODE_FILES = (
    "runtime/**/*.py", "tests/emulated/modes.py", "tests/silicon/setting.py",
    "tests/support/emulated.py", "tests/support/emulated_ranks.py",
)  # fmt: skip
"""Of the modes: what they run. That the planner plans them is seen by the tests of every day."""
TESTED = {
    "gathers": ("features/test_gather_triton.py", "features/test_device_rows.py"),
    "stores": ("features/test_device_store.py", "features/test_device_peers.py"),
    "sampling_neighbor": (
        "sampling/gpu/test_neighbor_triton.py", "sampling/gpu/test_neighbor_captured.py",
        "sampling/gpu/test_neighbor_stack_device.py", "sampling/gpu/test_rng_triton.py",
    ),
    "sampling_padded": ("sampling/gpu/test_padded.py", "sampling/gpu/test_padded_tasks.py"),
    "sampling_layers": (
        "sampling/gpu/test_layerwise_device.py", "sampling/gpu/test_segments_triton.py",
        "sampling/gpu/test_labor_device.py", "sampling/gpu/test_locality_device.py",
        "sampling/test_build_device.py", "sampling/gpu/test_device_topology.py",
    ),
    "sampling_tasks": (
        "sampling/gpu/test_tasks_device.py", "sampling/distributed/test_matrix_grid.py",
    ),
    "models": (
        "models/test_device_blocks.py", "models/test_aggregate_triton.py",
        "models/test_weights_padded.py", "fullgraph/test_forward.py", "test_rounding.py",
    ),
    "loaders": (
        "loader/test_loader_device.py", "loader/test_loader_device_bulk.py",
        "loader/test_loader_padded.py", "loader/test_loader_row_dtype.py",
        "loader/test_loader_typed.py",
    ),
    "training": ("train/test_streams.py", "train/test_shared_device.py"),
}  # fmt: skip
"""Tests below tests/runtime whose kernels take the GPU that is here."""
CAPTURED = (
    *WORKER,
    *(f"tests/silicon/{name}.py" for name in ("captured", "training", "graphs", "beside", "bars")),
)
PLANNED = (*CAPTURED, "planner/**/*.py")
LOT_SECONDS = {"hardest": 120.0, "middle": 120.0, "rest": 75.0}
"""Of the lots of `tests.silicon.planned`, which take what a call has left besides."""
SANITIZED = ("features/test_gather_triton.py", "sampling/gpu/test_neighbor_triton.py")
PARTS = {"gathers": 100.0, "sampling": 110.0, "epoch": 110.0, "sampling,curve": 120.0}
"""Parts of the GPU benchmark, with their seconds."""


def _collectives() -> list[Experiment]:
    return [
        Experiment(
            name=f"nccl_{ranks}_ranks",
            question=f"do {ranks} ranks on one GPU talk by NCCL, also with nothing to say?",
            entry="tests.silicon.nccl:check_collectives",
            seconds=90,
            files=COLLECTIVES,
            arguments=(("ranks", ranks),),
        )
        for ranks in (2, 4)
    ]


def _hosts() -> list[Experiment]:
    asked = {
        "train": ("the losses and rows of CPU ranks", False, False),
        "validate": ("validation and test as on CPU ranks", True, False),
        "resume": ("the losses of an undisturbed run", False, True),
    }
    beside = Experiment(
        name="two_hosts_exchange_ahead",
        question="rows of another GPU, exchanged by NCCL beside compute: the losses of CPU ranks?",
        entry="tests.silicon.hosts:train_on_hosts",
        seconds=120,
        files=WORKER,
        arguments=(("ranks", 2), ("evaluate", True), ("resume", False), ("ahead", True)),
    )
    return [
        beside,
        *(
            Experiment(
                name=f"two_hosts_{name}",
                question=f"two hosts of one GPU each under NCCL: {question}?",
                entry="tests.silicon.hosts:train_on_hosts",
                seconds=120,
                files=WORKER,
                arguments=(("ranks", 2), ("evaluate", evaluate), ("resume", resume)),
            )
            for name, (question, evaluate, resume) in asked.items()
        ),
    ]


def _faults() -> list[Experiment]:
    asked = {"kill": "killed", "stop": "stopped"}
    return [
        Experiment(
            name=f"nccl_rank_{word}",
            question=f"a rank is {word} while another waits in a sum: does training go on?",
            entry="tests.silicon.kills:disturb",
            seconds=120,
            files=(*WORKER, "tests/support/models.py"),
            arguments=(("how", how),),
        )
        for how, word in asked.items()
    ]


def mode_name(mode: Mode) -> str:
    """Name of the experiment that trains a mode."""
    return "mode_" + re.sub(r"[^a-z0-9]+", "_", mode.label.lower())


def _modes() -> list[Experiment]:
    """Every mode that needs no recorded driver, one of each row first."""
    return [
        Experiment(
            name=mode_name(mode),
            question=f"{mode.label}: batches, losses and rows of CPU ranks?",
            entry="tests.silicon.rows:train_mode",
            seconds=120.0 if mode.devices > 2 else 90.0,
            files=MODE_FILES,
            arguments=(("label", mode.label),),
        )
        for mode in sorted(MODES, key=lambda mode: not mode.quick)
        if mode.recording is None
    ]


def _peers() -> list[Experiment]:
    files = (*COLLECTIVES, "runtime/features/device_rows.py", "runtime/features/gather_triton.py")
    return [
        Experiment(
            name="peer_opened_by_reader",
            question="does a kernel read a peer's rows that were opened on the reader's device?",
            entry="tests.silicon.peers:open_on_readers_device",
            seconds=60,
            files=files,
        ),
        Experiment(
            name="peer_expandable_segments",
            question="are rows shared while torch's allocator grows its segments?",
            entry="tests.silicon.peers:share_expandable_segments",
            seconds=60,
            files=files,
        ),
        Experiment(
            name="host_lists_shared",
            question="do kernels of two ranks read lists that both have locked in one mapping?",
            entry="tests.silicon.peers:share_host_lists",
            seconds=60,
            files=(*files, "runtime/folders.py", "runtime/sampling/gpu/*.py"),
        ),
        Experiment(
            name="peer_lists_read",
            question="does a sampler read lists of its own, of a peer's memory and of the host?",
            entry="tests.silicon.peers:share_peer_lists",
            seconds=60,
            files=(*files, "runtime/folders.py", "runtime/sampling/gpu/*.py"),
        ),
    ]


def _steps() -> list[Experiment]:
    floors = [
        Experiment(
            name=f"step_floor_{precision}",
            question=f"how long does a step take in {precision} when the host does nothing?",
            entry="tests.silicon.step:find_floor",
            seconds=90,
            files=("runtime/models/*.py", "tests/silicon/training.py", "tests/support/plans.py"),
            arguments=(("precision", precision),),
        )
        for precision in ("float32", "tf32", "bfloat16")
    ]
    return [
        Experiment(
            name="step_parts",
            question="kernels, launches, copies and waits of one step",
            entry="tests.silicon.step:count_step",
            seconds=90,
            files=(*WORKER, "tests/silicon/training.py"),
        ),
        *floors,
    ]


def _bars() -> list[Experiment]:
    """What has a bar of speed or truth, the hardest first.

    The first call of 480 s holds every kind of bar, the second the further configurations, lanes
    and a user's own model.
    """
    planned = {
        name: Experiment(
            name=f"plans_{name}",
            question=f"the {name} configurations, planned and run: is the plan right?",
            entry="tests.silicon.planned:run_lot",
            seconds=seconds,
            files=PLANNED,
            arguments=(("lot", name),),
            grows=True,
            bar="step off by 8% (median), 15% (p90); choice within 2% of 5 others; all fit at 97%",
        )
        for name, seconds in LOT_SECONDS.items()
    }
    return [
        Experiment(
            name="captured_steps",
            question="captured steps of models: how near the GPU's own work, how far from PyG?",
            entry="tests.silicon.captured:time_steps",
            seconds=135,
            files=CAPTURED,
            arguments=(
                ("cases", ("sage", "sage_tf32", "sage_bfloat16", "links", "rgcn", "gat", "gcn")),
            ),
            bar="1.3 of the GPU's own work; SAGE 1.4 ms, 0.9 ms in TF32 and bfloat16; PyG over 12",
        ),
        Experiment(
            name="papers",
            question="papers100M's shape: seeds per second, and rows read from the host?",
            entry="tests.silicon.papers:feed_papers",
            seconds=65,
            files=CAPTURED,
            bar="1.2 million seeds/s; 90% of the pinned copy rate with rows on the host",
        ),
        planned["hardest"],
        Experiment(
            name="tune_full",
            question="how long does `gnnplan tune` take?",
            entry="tests.silicon.planned:tune_in_full",
            seconds=185,
            files=PLANNED,
            bar="180 s",
        ),
        Experiment(
            name="probe_whole",
            question="how long does a full probe take, and by which subject?",
            entry="tests.silicon.probing:time_whole_probe",
            seconds=185,
            files=("planner/probe/**/*.py", "runtime/features/gather_triton.py"),
            bar="180 s",
        ),
        planned["middle"],
        planned["rest"],
        Experiment(
            name="captured_step_lanes",
            question="a batch drawn beside the step before it: shorter than the two in turn?",
            entry="tests.silicon.captured:time_lanes",
            seconds=70,
            files=CAPTURED,
            bar="1.02 of draw and step in turn; their losses",
        ),
        Experiment(
            name="own_model_replayed",
            question="a user's own model, replayed over padded batches: the losses of its kernels?",
            entry="tests.silicon.own_model:replay_own_model",
            seconds=60,
            files=CAPTURED,
            bar="losses of the eager model",
        ),
    ]


def _probes() -> list[Experiment]:
    ranks = [
        Experiment(
            name=f"probe_{count}_ranks",
            question=f"collectives of {count} ranks by the probe's own tasks, and their memory",
            entry="tests.silicon.probing:time_ranks",
            seconds=90,
            files=(*COLLECTIVES, "planner/probe/gpu/*.py"),
            arguments=(("ranks", count),),
        )
        for count in (2, 4)
    ]
    return [*ranks, *_gpu_probes()]


def _gpu_probes() -> list[Experiment]:
    return [
        Experiment(
            name=f"probe_{name}",
            question=f"what does the GPU part of a {name} probe spend its seconds on?",
            entry="tests.silicon.probing:time_probe",
            seconds=seconds,
            files=("planner/probe/gpu/*.py", "runtime/features/gather_triton.py"),
            arguments=(("quick", name == "quick"),),
        )
        for name, seconds in (("quick", 60.0), ("full", 120.0))
    ]


def _programs() -> list[Experiment]:
    tests = [
        Experiment(
            name=f"tests_{name}",
            question=f"tests of {name.replace('_', ', ')} with kernels on the GPU",
            entry="tests.silicon.programs:run_tests",
            seconds=120,
            files=("runtime/**/*.py", *(f"tests/runtime/{path}" for path in paths)),
            arguments=(("paths", tuple(f"tests/runtime/{path}" for path in paths)),),
        )
        for name, paths in TESTED.items()
    ]
    sanitized = [
        Experiment(
            name=f"{tool}_{path.split('test_')[1].removesuffix('.py')}",
            question=f"compute-sanitizer's {tool} over {path}",
            entry="tests.silicon.programs:run_tests",
            seconds=120,
            files=(f"runtime/{path.split('/')[0]}/**/*.py", f"tests/runtime/{path}"),
            arguments=(("paths", (f"tests/runtime/{path}",)), ("tool", tool)),
        )
        for path in SANITIZED
        for tool in ("memcheck", "racecheck")
    ]
    benchmarks = [
        Experiment(
            name=f"benchmark_{parts.replace(',', '_')}",
            question=f"the GPU benchmark's {parts}",
            entry="tests.silicon.programs:run_benchmark",
            seconds=seconds,
            files=("tests/benchmarks/gpu*.py", "runtime/**/*.py"),
            arguments=(
                ("name", "gpu"),
                ("options", ("--parts", parts, "--budget-seconds", f"{seconds - 35:g}")),
            ),
        )
        for parts, seconds in PARTS.items()
    ]
    return [*tests, *sanitized, *benchmarks]


SITTINGS = (
    Sitting(names=("captured_steps", "papers"), seconds=165),
    Sitting(names=("tune_full", "probe_whole"), seconds=185, at_once=True),
    Sitting(names=("plans_middle", "plans_rest"), seconds=170),
    Sitting(names=("captured_step_lanes", "own_model_replayed"), seconds=105),
)
"""Those that share a process share its start, graphs and compiled kernels. A probe and a tuning are
to end in time whatever else runs, so each is the other's disturbance."""

EXPERIMENTS = [
    *_bars(), *_collectives(), *_hosts(), *_faults(), *_peers(), *_probes(), *_modes(),
    *_steps(), *_programs(),
]  # fmt: skip
