"""The service under load: `python -m tests.benchmarks.service --json [--only NAME]`.

    cached_plan    GETs of one plan over keep-alive connections: requests a second, p50, p99
    followers      streams of one job's events: events lost, memory gained
    kills          noop jobs with the service and its processes killed at random moments
    planning_kills the same with planning jobs

The limit of `cached_plan` is a server of a few lines that answers the same bytes over the same
library, uvicorn, also in a process of its own, measured in turns with the service. The load comes
from this process, on the same machine.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from gnnplan.api.storage.storage import Storage
from gnnplan.api.storage.tables import PlanRow
from tests.api.test_kill import check_once, kill_at_random, soak, wait_for
from tests.benchmarks.common import Spread, record
from tests.support.ranks import free_port
from tests.support.service import ServiceProcess

CONNECTIONS = 16
SECONDS = 10.0
ROUNDS = 3
RATE_BAR, P99_BAR_MS = 500.0, 50.0
PLAN_ID = "0" * 32


async def _client(port: int, path: str, until: float, seconds: list[float]) -> None:
    """GETs one after the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ask = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    while time.perf_counter() < until:
        started = time.perf_counter()
        writer.write(ask)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise AssertionError(head.split(b"\r\n")[0])
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        seconds.append(time.perf_counter() - started)
    writer.close()


def load(port: int, path: str) -> tuple[float, list[float]]:
    """Requests a second over `CONNECTIONS` connections, and the seconds of each."""
    taken: list[float] = []

    async def run() -> float:
        started = time.perf_counter()
        until = started + SECONDS
        await asyncio.gather(*(_client(port, path, until, taken) for _ in range(CONNECTIONS)))
        return time.perf_counter() - started

    elapsed = asyncio.run(run())  # first: it fills `taken`
    return len(taken) / elapsed, taken


def serve_plainly(body: bytes, port: int) -> None:
    """Run uvicorn with an application that answers one body, until the process is ended."""
    head = {"type": "http.response.start", "status": 200}
    headers = [(b"content-length", str(len(body)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive
        if scope["type"] == "http":
            await send({**head, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, port=port, log_level="error", lifespan="off")


@contextmanager
def plain_server(body: bytes, port: int) -> Iterator[None]:
    """That server as a process, once it answers."""
    process = multiprocessing.get_context("spawn").Process(target=serve_plainly, args=(body, port))
    process.start()
    try:
        while True:
            try:
                asyncio.run(_client(port, "/", time.perf_counter() + 0.01, []))
                break
            except OSError:
                if process.exitcode is not None:
                    raise
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.join()


def store_plan(data_dir: Path, body: bytes) -> None:
    """Put a document where a plan's would be."""
    storage = Storage(data_dir)
    folder = storage.catalogue.plan_folder(PLAN_ID)
    folder.mkdir(parents=True)
    (folder / "plan.json").write_bytes(body)
    row = PlanRow(
        id=PLAN_ID, graph="g", graph_fingerprint="f", machine="m", policy="none", num_ranks=1,
        step_seconds=1.0, epoch_seconds=1.0, statistics_class="exact", created_seconds=0.0,
    )  # fmt: skip
    with storage.database.writing() as session:
        session.add(row)
    storage.close()


def cached_plan(folder: Path) -> None:
    """A plan of 20 kB, as those of two ranks are."""
    body = json.dumps({"padding": "x" * 20_000}).encode()
    store_plan(folder / "data", body)
    service = ServiceProcess(folder / "data", "--reads-per-second", "1000000")
    service.start()
    plain_port = free_port()
    rates, taken, limits = list[float](), list[float](), list[float]()
    try:
        with plain_server(body, plain_port):
            for _ in range(ROUNDS):
                rate, seconds = load(service.port, f"/v1/plans/{PLAN_ID}")
                rates.append(rate)
                taken += seconds
                limits.append(load(plain_port, "/")[0])
    finally:
        service.stop()
    limit = float(np.median(limits))
    p50, p99 = np.percentile(taken, [50, 99])
    spread = Spread.of(rates)
    record(
        "service.cached_plan",
        spread,
        "requests/s",
        baseline=limit,
        ratio=spread.median / limit,
        p50_ms=1e3 * float(p50),
        p99_ms=1e3 * float(p99),
        connections=CONNECTIONS,
        bar=f"{RATE_BAR:g} requests/s, p99 under {P99_BAR_MS:g} ms",
        met=spread.median >= RATE_BAR and 1e3 * float(p99) < P99_BAR_MS,
    )


async def _follow(port: int, job: str, shares: list[float]) -> None:
    """Read a job's events to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    name = ""
    while line := await reader.readline():
        text = line.decode().strip()
        if text.startswith("event: "):
            name = text[7:]
        elif text.startswith("data: ") and name == "progress":
            shares.append(json.loads(text[6:])["share"])
        elif text.startswith("data: ") and name == "end":
            break
    writer.close()


def followers(folder: Path, count: int, seconds: float) -> None:
    """Every follower sees every event; the service's memory is compared before and after."""
    service = ServiceProcess(folder / "data", "--writes-per-second", "100000")
    service.start()
    try:
        steps = max(1, round(2 * seconds))
        request = {"seconds": seconds, "steps": steps}
        job = service.call("POST", "/v1/jobs", request)["id"]
        seen: list[list[float]] = [[] for _ in range(count)]
        before = resident_bytes(service)

        async def run() -> list[int]:
            tasks = [asyncio.create_task(_follow(service.port, job, each)) for each in seen]
            sizes: list[int] = []
            while not all(task.done() for task in tasks):
                sizes.append(resident_bytes(service))
                await asyncio.sleep(seconds / 20)
            await asyncio.gather(*tasks)
            return sizes

        sizes = asyncio.run(run())
    finally:
        service.stop()
    expected = [round((i + 1) / steps, 4) for i in range(steps)]
    lost = sum(each != expected for each in seen)
    settled = sizes[len(sizes) // 4 :]
    record(
        "service.followers",
        lost,
        "followers with loss",
        baseline=0,
        followers=count,
        events_each=steps,
        memory_before_bytes=before,
        memory_settled_bytes=settled[0] if settled else before,
        memory_end_bytes=sizes[-1],
    )


def resident_bytes(service: ServiceProcess) -> int:
    """Resident memory of the service's process."""
    assert service.process is not None
    pages = Path(f"/proc/{service.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def kills(folder: Path, jobs: int, rounds: int) -> None:
    """`rounds` times: jobs are queued, 20 kills fall at random moments, each job ends once."""
    for number in range(rounds):
        started = time.monotonic()
        place = folder / f"kills-{number}"
        place.mkdir()
        # The pauses end before the jobs do: `waiting` says how many the last kill found.
        outcomes = soak(
            place,
            jobs=jobs,
            kills=20,
            seed=number,
            seconds=7200,
            most_pause_seconds=jobs / 300,
        )
        record(
            "service.kills",
            outcomes.get("succeeded", 0),
            "jobs ended once, well",
            baseline=jobs,
            ratio=outcomes.get("succeeded", 0) / jobs,
            round=number,
            outcomes=outcomes,
            seconds=round(time.monotonic() - started, 1),
        )


def planning_kills(folder: Path, jobs: int, rounds: int) -> None:
    """The same with real planning jobs, each of another request."""
    from gnnplan.runtime.graph.generate import generate_sbm

    generate_sbm(
        folder / "graph", num_nodes=3000, degree=15.0, feature_dim=16, num_classes=5, seed=7
    )
    for number in range(rounds):
        # A cache of its own: the round before must not have measured what this one plans.
        os.environ["GNNPLAN_CACHE"] = str(folder / f"cache-{number}")
        started, dice = time.monotonic(), random.Random(number)
        service = ServiceProcess(
            folder / f"planning-{number}", "--graph-root", str(folder),
            "--writes-per-second", "100000",
        )  # fmt: skip
        service.start()
        try:
            body = {"graph": "graph", "machine": "cpu-2core", "devices": 1, "fanouts": [5, 5]}
            ids = [
                service.call("POST", "/v1/plans", {**body, "batch_size": 64 + i, "hidden": 8})["id"]
                for i in range(jobs)
            ]
            for kill in range(6):
                # Spread over the jobs: one whose process dies three times fails, and says so.
                wait_for(service, ids[: kill * jobs // 6], 7200)
                time.sleep(dice.random() * 10)
                kill_at_random(service, dice)
            wait_for(service, ids, 7200)
            service.stop()
        finally:
            if service.process is not None and service.process.poll() is None:
                service.kill()
        outcomes = check_once(folder / f"planning-{number}", ids)
        good = outcomes.get("succeeded", 0)
        record(
            "service.planning_kills", good, "plans made once", baseline=jobs, ratio=good / jobs,
            round=number, outcomes=outcomes, seconds=round(time.monotonic() - started, 1),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one record per line (always so)")
    parser.add_argument("--only", choices=["cached_plan", "followers", "kills", "planning_kills"])
    parser.add_argument("--followers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the followed job")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--planning-jobs", type=int, default=20)
    parser.add_argument("--planning-rounds", type=int, default=3)
    options = parser.parse_args()
    wanted = options.only
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if wanted in (None, "cached_plan"):
            cached_plan(folder)
        if wanted in (None, "followers"):
            (folder / "followed").mkdir()
            followers(folder / "followed", options.followers, options.seconds)
        if wanted in (None, "kills"):
            kills(folder, options.jobs, options.rounds)
        if wanted in (None, "planning_kills"):
            planning_kills(folder, options.planning_jobs, options.planning_rounds)


if __name__ == "__main__":
    main()
