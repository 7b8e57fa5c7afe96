"""Control groups of both versions, and the plan's memory sum against their limit."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.runtime import device
from gnnplan.runtime.errors import BudgetExceeded, PlanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.source import memory_bytes
from gnnplan.runtime.identity import check_identity, is_planned_machine
from gnnplan.runtime.limits import (
    MemoryGroup,
    as_budget_error,
    check_limit,
    cpu_quota,
    killed_text,
    memory_group,
    memory_limit_bytes,
    room_to_keep,
)
from gnnplan.runtime.plan.schema import HostSize, MemoryUse, Plan
from tests.support.memory_groups import LimitedGroup, NoGroups, limited_group
from tests.support.plans import make_plan

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextmanager
def group_or_skip(limit_bytes: int) -> Iterator[LimitedGroup]:
    """A real group with a limit, removed again."""
    try:
        with limited_group(limit_bytes) as group:
            yield group
    except NoGroups as error:
        pytest.skip(str(error))


def with_memory(plan: Plan, total: int) -> Plan:
    parts = {"own rows": total // 2, "activations": total - total // 2}
    use = MemoryUse(parts=parts, total=total, capacity=2 * total, headroom=total)
    uses = {"rank0": use, "host0": replace(use, parts={"ranks": total, "features": 0})}
    return replace(plan, prediction=replace(plan.prediction, memory_bytes=uses))


def test_version_1_is_read_with_the_limits_above(tmp_path: Path) -> None:
    group = "fs/cgroup/memory/jobs/one"
    tree(
        tmp_path,
        {
            "self/cgroup": "5:devices:/\n4:cpu,memory:/jobs/one\n0::/\n",
            f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/memory.usage_in_bytes": "4096\n",
            f"{group}/memory.stat": "cache 0\nhierarchical_memory_limit 1048576\n",
            f"{group}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        },
    )
    assert memory_group(tmp_path, tmp_path) == MemoryGroup(
        folder=tmp_path / group, limit_bytes=1048576, usage_bytes=4096, oom_kills=3
    )


def test_version_2_is_read_with_the_limits_above(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "self/cgroup": "0::/jobs/one\n",
            "fs/cgroup/cgroup.controllers": "memory\n",
            "fs/cgroup/jobs/memory.max": "2097152\n",
            "fs/cgroup/jobs/one/cgroup.procs": "",
            "fs/cgroup/jobs/one/memory.max": "max\n",
            "fs/cgroup/jobs/one/memory.current": "8192\n",
            "fs/cgroup/jobs/one/memory.events": "low 0\noom 2\noom_kill 1\n",
        },
    )
    assert memory_group(tmp_path, tmp_path) == MemoryGroup(
        folder=tmp_path / "fs/cgroup/jobs/one", limit_bytes=2097152, usage_bytes=8192, oom_kills=1
    )


def test_no_limit_is_none_and_no_groups_are_none(tmp_path: Path) -> None:
    assert memory_group(tmp_path, tmp_path) is None
    tree(
        tmp_path,
        {
            "self/cgroup": "4:memory:/\n",
            "fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    found = memory_group(tmp_path, tmp_path)
    assert found is not None
    assert found.limit_bytes is None


# Layouts of a system's files: what they allow, as (cores, bytes).
V1_LIMITED = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
V1_FREE = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}
NO_LIMIT = "9223372036854771712\n"
MEMORY_V1 = "memory.limit_in_bytes"


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


LAYOUTS: dict[str, tuple[dict[str, str], float | None, int | None]] = {
    "version 1, in the group itself": (
        {"self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n"}
        | under("fs/cgroup/cpu,cpuacct/job", V1_LIMITED)
        | under("fs/cgroup/memory/job", {MEMORY_V1: str(300 * MIB)}),
        1.5,
        300 * MIB,
    ),
    "version 1, mounted together under the names in another order": (
        {"self/cgroup": "4:hugetlb,memory:/job\n3:cpuacct,cpu:/job\n2:cpuset:/job\n"}
        | under("fs/cgroup/cpu,cpuacct/job", V1_LIMITED)
        | under("fs/cgroup/cpuset/job", {"cpuset.cpus": "0-3"})
        | under("fs/cgroup/memory,hugetlb/job", {MEMORY_V1: str(300 * MIB)}),
        1.5,
        300 * MIB,
    ),
    "version 1, in the groups above": (
        {"self/cgroup": "4:memory:/pod/job\n3:cpu:/pod/job\n"}
        | under("fs/cgroup/cpu/pod", V1_LIMITED)
        | under("fs/cgroup/cpu/pod/job", V1_FREE)
        | under("fs/cgroup/memory", {MEMORY_V1: NO_LIMIT})
        | under("fs/cgroup/memory/pod", {MEMORY_V1: str(300 * MIB)})
        | under("fs/cgroup/memory/pod/job", {MEMORY_V1: str(900 * MIB)}),
        1.5,
        300 * MIB,
    ),
    "version 1, in a container that sees its own group as the root": (
        {"self/cgroup": "4:memory:/docker/abc\n3:cpu:/docker/abc\n"}
        | under("fs/cgroup/cpu", V1_LIMITED)
        | under("fs/cgroup/memory", {MEMORY_V1: str(300 * MIB)}),
        1.5,
        300 * MIB,
    ),
    "version 2, max in the leaf and limits in its parents": (
        {"self/cgroup": "0::/pod/job/rank\n", "fs/cgroup/cgroup.controllers": "cpu memory\n"}
        | under("fs/cgroup/pod", {"cpu.max": "400000 100000\n", "memory.max": str(300 * MIB)})
        | under("fs/cgroup/pod/job", {"cpu.max": "75000 50000\n", "memory.max": "max\n"})
        | under(
            "fs/cgroup/pod/job/rank",
            {"cpu.max": "max 100000\n", "memory.max": "max\n", "cgroup.procs": ""},
        ),
        1.5,
        300 * MIB,
    ),
    "version 2, in a name space of its own": (
        {"self/cgroup": "0::/../other\n", "fs/cgroup/cgroup.controllers": "cpu memory\n"}
        | under(
            "fs/cgroup",
            {"cpu.max": "150000 100000\n", "memory.max": str(300 * MIB), "cgroup.procs": ""},
        ),
        1.5,
        300 * MIB,
    ),
    "both versions, each with one controller": (
        {
            "self/cgroup": "3:cpu:/job\n0::/job\n",
            "fs/cgroup/unified/cgroup.controllers": "memory\n",
        }
        | under("fs/cgroup/cpu/job", V1_LIMITED)
        | under("fs/cgroup/unified/job", {"memory.max": str(300 * MIB), "cgroup.procs": ""}),
        1.5,
        300 * MIB,
    ),
    "no limit anywhere": (
        {"self/cgroup": "4:memory:/job\n3:cpu:/job\n"}
        | under("fs/cgroup/cpu/job", V1_FREE)
        | under("fs/cgroup/memory/job", {MEMORY_V1: NO_LIMIT}),
        None,
        None,
    ),
    "files that cannot be read as numbers": (
        {"self/cgroup": "4:memory:/\n3:cpu:/\nnonsense\n"}
        | under("fs/cgroup/cpu", {"cpu.cfs_quota_us": "many", "cpu.cfs_period_us": "0"})
        | under("fs/cgroup/memory", {MEMORY_V1: ""}),
        None,
        None,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_lowest_limit_of_all_groups_above_holds_in_either_version(
    name: str, tmp_path: Path
) -> None:
    files, cores, limit = LAYOUTS[name]
    tree(tmp_path, files)
    assert cpu_quota(tmp_path, tmp_path) == cores
    assert memory_limit_bytes(tmp_path, tmp_path) == limit


@pytest.mark.parametrize("name", LAYOUTS)
def test_probe_plan_and_import_go_by_the_same_cores_and_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a probe finds is what a plan's caches, and an import's arrays, must fit into."""
    files, cores, limit = LAYOUTS[name]
    tree(tmp_path, {**files, "meminfo": "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\n"})
    monkeypatch.setattr(device, "SYS", tmp_path)
    monkeypatch.setattr(device, "PROC", tmp_path)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(8)))
    assert device.usable_cores() == (8 if cores is None else 2)
    allowed = 16 << 30 if limit is None else limit
    assert device.usable_ram_bytes() == memory_bytes() == allowed
    assert device.available_ram_bytes() == allowed
    facts = device.machine_facts()
    assert (facts["cores"], facts["ram_bytes"]) == (8 if cores is None else 2, allowed)


GROUP = {"self/cgroup": "0::/\n", "fs/cgroup/cgroup.controllers": "cpu memory\n"}


def put_in_job(folder: Path, monkeypatch: pytest.MonkeyPatch, cores: int, gib: float) -> None:
    """Give this process some cores, and a group of some memory, of 8 cores and 16 GiB."""
    monkeypatch.setattr(device, "SYS", folder)
    monkeypatch.setattr(device, "PROC", folder)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(cores)))
    limit = {"fs/cgroup/memory.max": f"{round(gib * 1024) * MIB}\n"}
    tree(folder, {**GROUP, **limit, "meminfo": "MemTotal: 16777216 kB\n"})


def plan_of_four_cores(graph: Graph, folder: Path, hosts: list[HostSize]) -> Plan:
    """Two ranks of two threads that need 1.5 GiB, planned on the machine that is here now."""
    plan = make_plan(graph, folder, ranks=2, sample_threads=1)
    use = MemoryUse(parts={"own rows": 768 * MIB}, total=768 * MIB, capacity=1, headroom=0)
    memory = {"rank0": use, "rank1": use, "host0": replace(use, parts={"ranks": 1536 * MIB})}
    return replace(
        plan,
        machine=replace(plan.machine, fingerprint=device.machine_fingerprint(), hosts=hosts),
        prediction=replace(plan.prediction, memory_bytes=memory),
    )


def test_a_share_of_the_machine_that_is_enough_for_the_plan_is_the_machine(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_job(tmp_path / "sys", monkeypatch, 8, 16)
    whole = [HostSize(cores=8, memory_gib=16)]
    plan = plan_of_four_cores(small_graph, tmp_path / "plan", whole)
    assert check_identity(plan) == []
    for cores, gib in ((4, 1.5), (8, 2), (4, 16)):
        put_in_job(tmp_path / "sys", monkeypatch, cores, gib)
        (note,) = check_identity(plan)
        assert note.startswith(f"{cores} cores and {gib:.2f} GiB may be used here, less than")
    for cores, gib in ((3, 2), (4, 1), (1, 1)):
        put_in_job(tmp_path / "sys", monkeypatch, cores, gib)
        line = rf"^expected 4 cores and 1\.50 GiB for .* found {cores} cores and {gib}\.00 GiB"
        with pytest.raises(PlanError, match=line):
            check_identity(plan)
        assert len(check_identity(plan, force=True)) == 2


def test_a_plan_that_was_made_in_a_job_runs_in_a_larger_one_and_on_the_whole_machine(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_job(tmp_path / "sys", monkeypatch, 4, 3)
    plan = plan_of_four_cores(small_graph, tmp_path / "plan", [HostSize(cores=4, memory_gib=3)])
    for cores, gib in ((4, 3), (6, 4), (8, 16)):
        put_in_job(tmp_path / "sys", monkeypatch, cores, gib)
        assert check_identity(plan) == []


def test_another_machine_is_refused_however_large_it_is(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_job(tmp_path / "sys", monkeypatch, 8, 16)
    plan = plan_of_four_cores(small_graph, tmp_path / "plan", [HostSize(cores=8, memory_gib=16)])
    earlier = replace(plan, machine=replace(plan.machine, hosts=[]))
    tree(tmp_path / "sys", {"cpuinfo": "model name : another\n"})
    with pytest.raises(PlanError, match="expected the machine the plan was made for"):
        check_identity(plan)
    (tmp_path / "sys" / "cpuinfo").unlink()
    assert check_identity(earlier) == []
    put_in_job(tmp_path / "sys", monkeypatch, 4, 2)  # of it nobody knows how large it was
    with pytest.raises(PlanError, match="expected the machine the plan was made for"):
        check_identity(earlier)


def test_a_share_of_a_plans_gpus_is_of_their_model(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = device.machine_facts()
    box = {**facts, "box_gpus": ["A"] * 8}
    plan = make_plan(small_graph, tmp_path / "plan")
    devices = [replace(plan.strategy.devices[0], kind="cuda")]
    size = HostSize(cores=facts["cores"], memory_gib=facts["ram_gib"], gpu="A")
    plan = replace(
        plan,
        strategy=replace(plan.strategy, devices=devices),
        machine=replace(plan.machine, fingerprint=device.machine_fingerprint(box), hosts=[size]),
    )
    for shown, alike in ((["A"], True), (["A", "A"], True), (["B"], False), ([], False)):
        gpus = [{"uuid": str(number), "name": name} for number, name in enumerate(shown)]
        job = {**facts, "gpus": gpus, "box_gpus": shown}
        assert is_planned_machine(plan, job) == alike


def test_a_real_group_shows_its_limit_and_counts_its_kills() -> None:
    """A process that takes more than its 64 MiB is ended, and the count says so."""
    code = "import os\nkept = []\nwhile True: kept.append(os.urandom(1 << 22))"
    look = "from gnnplan.runtime.limits import memory_group; print(memory_group().limit_bytes)"
    with group_or_skip(64 * MIB) as group:
        join = f"{group.join_words()}; exec {sys.executable} -c"
        seen = subprocess.run(
            ["sh", "-c", f"{join} '{look}'"], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert int(seen.stdout) == 64 * MIB
        killed = subprocess.run(["sh", "-c", f"{join} '{code}'"], check=False)
        assert killed.returncode == -9
        assert group.kills() == 1


def test_a_plan_that_passes_the_limit_is_refused_with_the_sum(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = with_memory(make_plan(small_graph, tmp_path / "plan"), 600 * MIB)
    group = MemoryGroup(folder=tmp_path, limit_bytes=512 * MIB, usage_bytes=0, oom_kills=0)
    with pytest.raises(
        BudgetExceeded, match=r"^host0: ranks 600\.0 MiB = 600\.0 MiB passes the 512\.0 MiB limit"
    ):
        check_limit(plan, group)
    check_limit(plan, replace(group, limit_bytes=700 * MIB))
    check_limit(plan, replace(group, limit_bytes=None))
    check_limit(plan, None)


def test_ranks_of_a_whole_graph_keep_what_they_free_where_there_is_room_for_twice_their_bytes(
    small_graph: Graph, tmp_path: Path
) -> None:
    batches = with_memory(make_plan(small_graph, tmp_path / "plan"), 600 * MIB)
    plan = replace(batches, strategy=replace(batches.strategy, mode="full-graph"))
    group = MemoryGroup(folder=tmp_path, limit_bytes=1200 * MIB, usage_bytes=0, oom_kills=0)
    assert room_to_keep(plan, None)
    assert room_to_keep(plan, group)
    tight = replace(group, limit_bytes=1100 * MIB)
    assert not room_to_keep(plan, tight)
    assert room_to_keep(batches, tight)
    uses = plan.prediction.memory_bytes
    for name in ("rank0", "host0"):
        less = {**uses, name: replace(uses[name], headroom=500 * MIB)}
        short = replace(plan, prediction=replace(plan.prediction, memory_bytes=less))
        assert not room_to_keep(short, None)


def test_ranks_of_batches_give_back_what_they_free_where_a_group_would_kill_them(
    small_graph: Graph, tmp_path: Path
) -> None:
    # Half of the bytes are rows that stay; the other half may be held twice.
    plan = with_memory(make_plan(small_graph, tmp_path / "plan"), 600 * MIB)
    group = MemoryGroup(folder=tmp_path, limit_bytes=900 * MIB, usage_bytes=0, oom_kills=0)
    assert room_to_keep(plan, group)
    assert not room_to_keep(plan, replace(group, limit_bytes=899 * MIB))
    uses = {name: replace(use, headroom=0) for name, use in plan.prediction.memory_bytes.items()}
    full = replace(plan, prediction=replace(plan.prediction, memory_bytes=uses))
    assert room_to_keep(full, None)  # budgets are filled with rows; nobody is killed at theirs


def test_a_killed_rank_is_told_with_the_sum(small_graph: Graph, tmp_path: Path) -> None:
    plan = with_memory(make_plan(small_graph, tmp_path / "plan"), 600 * MIB)
    group = MemoryGroup(folder=tmp_path, limit_bytes=512 * MIB, usage_bytes=0, oom_kills=1)
    text = killed_text(plan, 0, group)
    assert text.startswith("rank 0: ended by the out-of-memory killer of control group")
    assert "rank0: activations 300.0 MiB + own rows 300.0 MiB = 600.0 MiB" in text
    assert "(limit 512.0 MiB)" in text
    assert text.endswith("probe and plan again under this limit, or raise it")


def test_a_rank_killed_without_a_limit_blames_the_machine(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = with_memory(make_plan(small_graph, tmp_path / "plan"), 600 * MIB)
    group = MemoryGroup(folder=tmp_path, limit_bytes=None, usage_bytes=0, oom_kills=1)
    text = killed_text(plan, 0, group)
    assert "out-of-memory killer of the machine, whose memory was full" in text
    assert "this limit" not in text
    assert text.endswith("end what else fills it, or plan with a smaller --host-memory")


def test_an_allocation_that_fails_is_told_with_the_sum(small_graph: Graph, tmp_path: Path) -> None:
    plan = with_memory(make_plan(small_graph, tmp_path / "plan"), 600 * MIB)
    torch_error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 TB")
    for error in (MemoryError("no room"), torch_error, OSError(12, "Cannot allocate memory")):
        found = as_budget_error(error, plan, 0)
        assert isinstance(found, BudgetExceeded)
        assert str(found).startswith("rank 0: out of memory (")
        assert "= 600.0 MiB" in str(found)
    assert as_budget_error(RuntimeError("shape mismatch"), plan, 0) is None
