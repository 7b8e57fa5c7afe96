"""Job files for schedulers: what they ask for is the plan's, and nobody's text becomes code."""

import os
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gnnplan.planner.cli.common import flag_words
from gnnplan.planner.cli.main import main
from gnnplan.runtime.device import machine_facts
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.identity import missing_share
from gnnplan.runtime.launch.config import TrainOptions
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.plan.schema import HostSize, MemoryUse
from tests.support.plans import make_plan

NASTY = "my plan; $(touch pwned) `touch pwned` 'x' \"y\"\n#SBATCH --exclusive"
RANK_BYTES = [300 << 20, 500 << 20, 400 << 20]
SHARED_BYTES = 100 << 20
FAKE_PYTHON = """#!/bin/bash
printf '%s\\n' "host=$SLURM_NODEID" "$@" "" >> "$OUT"
"""
FAKE_SRUN = """#!/bin/bash
[ "$1 $2" = "--kill-on-bad-exit=1 --cpus-per-task=6" ] || exit 1
shift 2
for node in 0 1; do SLURM_NODEID=$node "$@"; done
"""
FAKE_SCONTROL = """#!/bin/bash
printf '%s\\n' node7 node8
"""


def plan_of_three_ranks(graph: Graph, folder: Path, **settings: Any) -> Path:
    """Rank 0 on host 0, ranks 1 and 2 on host 1, three cores a rank, with predicted memory."""
    hosts, compute, sample = [0, 1, 1], 2, 1
    make_plan(graph, folder, ranks=3, hosts=hosts, compute_threads=compute,
              sample_threads=sample, **settings)  # fmt: skip
    plan = load_plan(folder)
    memory = {f"rank{r}": used({"model": n}) for r, n in enumerate(RANK_BYTES)}
    memory["host0"] = used({"ranks": sum(RANK_BYTES), "features": SHARED_BYTES})
    prediction = replace(plan.prediction, memory_bytes=memory)
    save_plan(replace(plan, prediction=prediction, arrays={}), {}, folder)
    return folder


def used(parts: dict[str, int]) -> MemoryUse:
    total = sum(parts.values())
    return MemoryUse(parts=parts, total=total, capacity=2 * total, headroom=total)


def emitted(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def directives(script: str) -> dict[str, str]:
    """What sbatch reads: directives up to the first line that is neither comment nor empty."""
    found: dict[str, str] = {}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value
    return found


def expected_mib() -> int:
    """Host 1 needs most: its ranks and what they share, and a tenth more."""
    return -(-round((sum(RANK_BYTES[1:]) + SHARED_BYTES) * 1.1) // (1 << 20))


def test_a_batch_script_asks_for_what_the_plan_needs(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plan_of_three_ranks(small_graph, tmp_path / "plan")
    assert directives(emitted(capsys, "train", str(folder), "--emit", "slurm")) == {
        "job-name": "gnnplan-plan",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "6",
        "mem": f"{expected_mib()}M",
        "open-mode": "append",
        "requeue": "",
    }


def test_what_a_batch_script_asks_for_is_enough_for_the_plan(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = load_plan(plan_of_three_ranks(small_graph, tmp_path / "plan"))
    for cores, asked in ((64, 6), (5, 5)):  # threads may be more than the machine's cores
        sizes = [HostSize(cores=cores, memory_gib=64)] * 2
        machine = replace(plan.machine, fingerprint="whole+whole", hosts=sizes)
        save_plan(replace(plan, machine=machine, arrays={}), {}, tmp_path / "plan")
        found = directives(emitted(capsys, "train", str(tmp_path / "plan"), "--emit", "slurm"))
        assert found["cpus-per-task"] == str(asked)
        given = {**machine_facts(), "cores": asked, "ram_bytes": int(found["mem"][:-1]) << 20}
        assert missing_share(load_plan(tmp_path / "plan"), given) == ""


def fake(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("restarts", [None, "1"])
@pytest.mark.parametrize("verb", ["train", "launch"])
def test_a_batch_script_runs_the_command_on_every_host_whatever_the_names_hold(
    small_graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    restarts: str | None,
) -> None:
    """The script is run by bash, with srun, scontrol and Python as small fakes that write down."""
    folder = plan_of_three_ranks(small_graph, tmp_path / NASTY)
    tools = tmp_path / "bin"
    tools.mkdir()
    fake(tools, "srun", FAKE_SRUN)
    fake(tools, "scontrol", FAKE_SCONTROL)
    monkeypatch.setattr(sys, "executable", str(fake(tools, "a python", FAKE_PYTHON)))
    script = ["tr ain.py", "--name", "$(touch pwned)", "a'b"] if verb == "launch" else []
    words = [verb, "--emit", "slurm", "-o", str(tmp_path / "job.sh"), str(folder), *script]
    assert main(words) == 0
    job = tmp_path / "job.sh"
    subprocess.run(["bash", "-n", str(job)], check=True)
    names = ["job-name", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "open-mode"]
    assert [*directives(job.read_text())] == names + ["requeue"] * (verb == "train")
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
    env |= {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[7-8]"}
    env |= {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    subprocess.run(["bash", str(job)], cwd=tmp_path, env=env, check=True)
    assert not list(tmp_path.rglob("pwned"))
    resume = "\n--resume" if verb == "train" and restarts else ""
    written = (tmp_path / "out").read_text()
    for host in (0, 1):
        place = f"--node-rank\n{host}\n--rdzv-endpoint\nnode7:32345{resume}\n"
        assert f"host={host}\n-m\ngnnplan.planner\n{verb}\n{place}" in written
    tail = "\n".join([str(folder), *(str(Path(w).resolve()) for w in script[:1]), *script[1:]])
    assert written.count(f"{tail}\n\n") == 2
    assert ("--epochs=10" in written) == (verb == "train")


def test_a_job_on_one_host_needs_no_rendezvous(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2)
    script = emitted(capsys, "train", str(tmp_path / "plan"), "--emit", "slurm")
    assert "rdzv-endpoint" not in script
    found = directives(script)
    assert (found["nodes"], found["cpus-per-task"]) == ("1", "2")
    assert "mem" not in found  # this plan predicts none
    job = yaml.safe_load(emitted(capsys, "train", str(tmp_path / "plan"), "--emit", "kubernetes"))
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_a_rank_that_is_alone_on_its_host_needs_no_memory_to_share(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2, hosts=[0, 1])
    job = yaml.safe_load(emitted(capsys, "train", str(tmp_path / "plan"), "--emit", "kubernetes"))
    for each in job["spec"]["pytorchReplicaSpecs"].values():
        pod = each["template"]["spec"]
        assert [volume["name"] for volume in pod["volumes"]] == ["gnnplan-data"]
        assert all("subPath" in mount for mount in pod["containers"][0]["volumeMounts"])


@pytest.mark.parametrize("verb", ["train", "launch"])
def test_a_kubernetes_job_holds_the_plans_hosts_and_starts_no_shell(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    folder = plan_of_three_ranks(small_graph, tmp_path / "My Plan_$(RANK)")
    script = ["/code/train me.py", "--lr", "$(RANK)"] if verb == "launch" else []
    text = emitted(
        capsys, verb, "--emit", "kubernetes", "--image", "gnn:1", "--claim", "data", str(folder),
        *script,
    )  # fmt: skip
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    name = job["metadata"]["name"]
    assert name == "gnnplan-my-plan-rank"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {
        "Master": 1, "Worker": 1,
    }  # fmt: skip
    for each in replicas.values():
        assert each["restartPolicy"] == ("OnFailure" if verb == "train" else "Never")
        (container,) = each["template"]["spec"]["containers"]
        assert (container["name"], container["image"]) == ("pytorch", "gnn:1")
        assert container["resources"]["limits"] == {"cpu": "6", "memory": f"{expected_mib()}Mi"}
        assert container["command"] == ["gnnplan"]
        place = ["--node-rank", "$(RANK)", "--rdzv-endpoint", f"{name}-master-0:29400"]
        args = container["args"]
        assert args[:5] == [verb, *place]
        assert ("--resume" in args) == (verb == "train")
        literal = [str(folder), *script]
        assert args[-len(literal) :] == [word.replace("$(", "$$(") for word in literal]
        mounts = {m["mountPath"]: m.get("subPath") for m in container["volumeMounts"]}
        assert mounts[str(folder)] == str(folder).removeprefix("/")
        assert str(small_graph.path) in mounts
        volume, memory = each["template"]["spec"]["volumes"]
        assert volume["persistentVolumeClaim"] == {"claimName": "data"}
        assert memory["emptyDir"] == {"medium": "Memory"}
        assert "/dev/shm" in mounts


def test_a_host_of_gpus_asks_for_what_lies_in_its_own_memory(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, lists and processes of each host, and nothing of what lies on the GPUs."""
    plan = make_plan(small_graph, tmp_path / "plan", ranks=2, hosts=[0, 1])
    devices = [
        replace(device, kind="cuda", memory=f"{prefix}gpu0.memory")
        for device, prefix in zip(plan.strategy.devices, ("", "h1."), strict=True)
    ]
    memory = {f"rank{r}": used({"own rows": 70 << 30}) for r in range(2)}
    memory["host0"] = used({"ranks": 2 << 30, "features": 50 << 30, "topology": 12 << 30})
    memory["h1.host0"] = used({"ranks": 2 << 30, "features": 50 << 30, "topology": 14 << 30})
    prediction = replace(plan.prediction, memory_bytes=memory)
    strategy = replace(plan.strategy, devices=devices)
    plan = replace(plan, strategy=strategy, prediction=prediction, arrays={})
    save_plan(plan, {}, tmp_path / "gpu")
    found = directives(emitted(capsys, "train", str(tmp_path / "gpu"), "--emit", "slurm"))
    assert found["mem"] == f"{-(-round((66 << 30) * 1.1) // (1 << 20))}M"


def test_gpus_of_a_plan_are_asked_for(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(small_graph, tmp_path / "plan", ranks=3, hosts=[0, 1, 1])
    devices = [replace(device, kind="cuda") for device in plan.strategy.devices]
    plan = replace(plan, strategy=replace(plan.strategy, devices=devices), arrays={})
    save_plan(plan, {}, tmp_path / "gpu")
    words = ["train", str(tmp_path / "gpu"), "--emit"]
    assert directives(emitted(capsys, *words, "slurm"))["gpus-per-node"] == "2"
    job = yaml.safe_load(emitted(capsys, *words, "kubernetes"))
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "2"
    (memory,) = [m["name"] for m in worker["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == memory]
    assert volume == {"name": memory, "emptyDir": {"medium": "Memory"}}


def test_two_hyphens_before_a_script_end_the_options(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(plan_of_three_ranks(small_graph, tmp_path / "plan"))
    script = ["/code/train.py", "--lr", "0.1", "--", "-x"]
    plain = emitted(capsys, "launch", "--force", "--emit", "slurm", plan, *script)
    for words in (
        ["--force", "--emit", "slurm", plan, "--", *script],
        ["--force", "--emit", "slurm", "--", plan, *script],
        [plan, "--emit", "slurm", "--force", "--", *script],
    ):
        assert emitted(capsys, "launch", *words) == plain
    assert "--force" in plain
    assert plain.endswith(f"{plan} /code/train.py --lr 0.1 -- -x\n")


def test_a_path_that_kubernetes_cannot_mount_is_refused(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(small_graph, tmp_path / "a:b")
    assert main(["train", str(tmp_path / "a:b"), "--emit", "kubernetes"]) == 2
    assert "expected a path without a colon" in capsys.readouterr().err


def test_flags_are_the_options_they_came_from() -> None:
    options = TrainOptions(
        epochs=3, resume=True, eval_fanouts=[5, -1], checkpoint_every_steps=7, hang_seconds=20.0
    )
    assert shlex.join(flag_words(options)) == (
        "--epochs=3 --resume --eval-fanouts=5,-1 --eval-every=1 --checkpoint-every=7 "
        "--max-restarts=3 --hang-seconds=20"
    )
