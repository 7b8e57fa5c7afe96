"""State survives: accepted once, claimed by one, ended once; the same on both databases."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text, update

from gnnplan.api.jobs.lanes import lock_folder, sign_folder
from gnnplan.api.jobs.recording import plan_row
from gnnplan.api.resources import job_of
from gnnplan.api.storage.database import SQLITE_FILE, Database, decode_cursor, normal_url
from gnnplan.api.storage.job_queue import Ending, KeyReusedError, NewJob, PlanGoneError
from gnnplan.api.storage.storage import Artefacts, Storage
from gnnplan.api.storage.tables import AuditRow, Base, JobRow, MachineRow, PlanRow
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from tests.support.plans import make_plan


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    storage = Storage(tmp_path, url)
    yield storage
    storage.database.migrate("base")
    storage.close()


def job(**changes) -> NewJob:
    return NewJob(
        **{
            "kind": "noop",
            "lane": "planning",
            "request": {"seconds": 0, "steps": 1},
            "time_limit_seconds": 60.0,
            **changes,
        }
    )


def test_migrations_give_the_tables_that_the_code_declares(storage: Storage):
    with storage.database.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []


def test_migrations_can_be_taken_back(storage: Storage):
    storage.database.migrate("base")
    with storage.database.engine.connect() as connection:
        assert inspect(connection).get_table_names() == ["alembic_version"]
    storage.database.migrate()


def test_plans_that_are_there_belong_to_whose_job_made_them(storage: Storage):
    storage.database.migrate("base")
    storage.database.migrate("0001")
    plan = (
        "INSERT INTO plans (id, graph, graph_fingerprint, machine, policy, num_ranks, step_seconds,"
        " epoch_seconds, statistics_class, created_seconds)"
        " VALUES (:id, 'g', 'f', 'm', 'none', 1, 1.0, 1.0, 'exact', 0.0)"
    )
    made = (
        "INSERT INTO jobs (id, kind, lane, state, request, subject, principal, request_id, stage,"
        " share, attempt, crashes, cancel, time_limit_seconds, created_seconds) VALUES (:id, :kind,"
        " 'planning', 'succeeded', '{}', :plan, :who, '', '', 1.0, :attempt, 0, false, 1.0, :when)"
    )
    rows = [
        ("1", "plan", "a", "cached", 0, 0.0),  # answered by the plan that was there
        ("2", "what-if", "a", "asker", 1, 1.0),
        ("3", "plan", "a", "maker", 2, 2.0),
        ("4", "plan", "a", "later", 1, 3.0),
    ]
    with storage.database.engine.begin() as connection:
        for name in ("a", "b"):
            connection.execute(text(plan), {"id": name})
        for row in rows:
            names = ("id", "kind", "plan", "who", "attempt", "when")
            connection.execute(text(made), dict(zip(names, row, strict=True)))
    storage.database.migrate()
    owners = [(row.id, row.owner) for row in storage.database.page(PlanRow).items]
    assert sorted(owners) == [("a", "maker"), ("b", "")]


def test_a_job_is_not_accepted_about_a_plan_that_is_not_there(storage: Storage):
    with pytest.raises(PlanGoneError):
        storage.jobs.add(job(subject="0" * 32))
    assert storage.jobs.num_waiting() == 0


def test_a_job_is_claimed_once_oldest_first(storage: Storage):
    ids = [storage.jobs.add(job())[0].id for _ in range(3)]
    claimed = [storage.jobs.claim("planning", "a") for _ in range(4)]
    assert [None if c is None else c.id for c in claimed] == [*ids, None]
    assert storage.jobs.claim("exclusive", "a") is None


def test_only_the_attempt_that_holds_a_job_can_end_it(storage: Storage):
    storage.jobs.add(job())
    first = storage.jobs.claim("planning", "a")
    assert first is not None
    assert storage.jobs.take_over("a") == 1
    second = storage.jobs.claim("planning", "b")
    assert second is not None
    assert (second.id, second.attempt) == (first.id, 2)
    assert storage.jobs.renew(first) is None
    assert not storage.jobs.finish(first, Ending(state="succeeded"))
    assert storage.jobs.finish(second, Ending(state="succeeded"))
    assert not storage.jobs.finish(second, Ending(state="failed"))
    outcomes = [a.outcome for a in storage.jobs.attempts(first.id)]
    assert outcomes == ["interrupted", "succeeded"]


def test_a_lease_that_has_run_out_is_taken_over(storage: Storage):
    row, _ = storage.jobs.add(job())
    assert storage.jobs.claim("planning", "a") is not None
    assert storage.jobs.claim("planning", "b") is None
    with storage.database.writing() as session:
        session.execute(update(JobRow).values(lease_until_seconds=time.time() - 1))
    again = storage.jobs.claim("planning", "b")
    assert again is not None
    assert again.id == row.id


def test_an_idempotency_key_makes_one_job_for_each_principal(storage: Storage):
    first, known = storage.jobs.add(job(idempotency_key="k", principal="p"))
    again, known_again = storage.jobs.add(job(idempotency_key="k", principal="p"))
    other, _ = storage.jobs.add(job(idempotency_key="k", principal="q"))
    assert (known, known_again) == (False, True)
    assert again.id == first.id
    assert other.id != first.id
    with pytest.raises(KeyReusedError):
        storage.jobs.add(job(idempotency_key="k", principal="p", request={"seconds": 1}))


def at_once(act: Callable[[], Any], times: int = 8) -> list[Any]:
    """What some threads get that do the same at the same moment."""
    ready = Barrier(times)

    def run(_number: int) -> Any:
        ready.wait()
        return act()

    with ThreadPoolExecutor(times) as threads:
        return list(threads.map(run, range(times)))


def test_a_key_that_comes_many_times_at_once_makes_one_job(storage: Storage):
    for key in ("a", "b", "c"):
        found = at_once(lambda key=key: storage.jobs.add(job(idempotency_key=key, principal="p")))
        assert len({row.id for row, _ in found}) == 1
        assert [known for _, known in found].count(False) == 1
    assert storage.jobs.num_waiting() == 3


def test_a_machine_that_comes_many_times_at_once_is_kept_once(storage: Storage):
    def add() -> None:
        storage.catalogue.add_machine(
            MachineRow(
                id="0" * 32, name="m", fingerprint="f", provenance="probe", sha256="0" * 64,
                created_seconds=0.0,
            )
        )  # fmt: skip

    at_once(add)
    assert len(storage.database.page(MachineRow).items) == 1


def test_cancelling_ends_a_waiting_job_and_asks_a_running_one(storage: Storage):
    waiting, running = (storage.jobs.add(job())[0] for _ in range(2))
    cancelled = storage.jobs.cancel(waiting.id)
    assert cancelled is not None
    assert cancelled.state == "cancelled"
    claimed = storage.jobs.claim("planning", "a")
    assert claimed is not None
    assert claimed.id == running.id
    storage.jobs.cancel(running.id)
    assert storage.jobs.renew(claimed) is True


def test_pages_hold_every_job_once(storage: Storage):
    ids = {storage.jobs.add(job())[0].id for _ in range(7)}
    seen: list[str] = []
    cursor = None
    while True:
        page = storage.database.page(JobRow, cursor=cursor, limit=3)
        seen += [row.id for row in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert len(seen) == 7
    assert set(seen) == ids


def test_rows_of_one_moment_are_not_lost_between_pages(storage: Storage):
    ids = {storage.jobs.add(job())[0].id for _ in range(5)}
    with storage.database.writing() as session:
        session.execute(update(JobRow).values(created_seconds=1.0))
        session.add_all(audit_line(at) for at in (2.0, 2.0, 2.0))
    first = storage.database.page(JobRow, limit=2)
    second = storage.database.page(JobRow, limit=2, cursor=first.next_cursor)
    third = storage.database.page(JobRow, limit=2, cursor=second.next_cursor)
    pages = [row.id for page in (first, second, third) for row in page.items]
    assert len(pages) == 5
    assert set(pages) == ids
    lines = storage.database.page(AuditRow, limit=2)
    rest = storage.database.page(AuditRow, limit=2, cursor=lines.next_cursor)
    assert [line.id for line in (*lines.items, *rest.items)] == [3, 2, 1]


def audit_line(at: float) -> AuditRow:
    return AuditRow(time_seconds=at, principal="", client="", method="POST", path="/", status=202,
                    request_id="")  # fmt: skip


def test_crashes_are_counted_and_interruptions_are_not(storage: Storage):
    made, _ = storage.jobs.add(job())
    for outcome in ("crashed", "interrupted", "crashed"):
        claimed = storage.jobs.claim("planning", "a")
        assert claimed is not None
        assert storage.jobs.give_back(claimed, outcome)
    row = storage.jobs.get(made.id)
    assert row is not None
    assert (row.crashes, row.attempt, row.state) == (2, 3, "queued")


def test_a_text_that_no_database_takes_ends_no_job(
    storage: Storage, small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    odd = "a\ud800\0b"
    made = make_plan(small_graph, tmp_path / "plan")
    named = replace(
        made, graph=replace(made.graph, name=odd), machine=replace(made.machine, name=odd)
    )
    monkeypatch.setattr("gnnplan.api.jobs.recording.load_plan", lambda _folder: named)
    storage.jobs.add(job())
    claimed = storage.jobs.claim("planning", "a")
    assert claimed is not None
    storage.jobs.progress(claimed, odd, 0.5)
    problem = {"type": "x", "title": "t", "status": 500, "detail": odd}
    ending = Ending(state="failed", problem=problem, rows=(plan_row(tmp_path),))
    assert storage.jobs.finish(claimed, ending)
    row, plan = storage.jobs.get(claimed.id), storage.catalogue.plan(made.plan_id)
    assert row is not None
    assert plan is not None
    assert (row.stage, plan.graph, plan.machine) == ("a??b", "a??b", "a??b")
    assert job_of(row).problem == {**problem, "detail": "a?\0b"} | {
        name: ("" if name == "instance" else None)
        for name in ("instance", "constraint", "needed_bytes", "available_bytes")
    }


def test_retention_removes_ended_jobs_and_their_files_alone(storage: Storage):
    storage.jobs.add(job())
    ended = storage.jobs.claim("planning", "a")
    assert ended is not None
    digest = storage.artefacts.put(b"{}")
    storage.jobs.finish(ended, Ending(state="succeeded", result_sha256=digest))
    waiting, _ = storage.jobs.add(job())
    folder = storage.job_folder(ended.id)
    folder.mkdir(parents=True)
    assert storage.sweep(retention_days=1.0) == 0
    assert storage.artefacts.get(digest) == b"{}"
    assert storage.sweep(retention_days=0.0) == 1
    assert not folder.exists()
    assert storage.jobs.get(ended.id) is None
    assert storage.jobs.get(waiting.id) is not None


def test_a_sweep_removes_what_a_killed_service_left_and_no_row_names(storage: Storage):
    known, _ = storage.jobs.add(job())
    halfway = storage.data_dir / "plans" / ".removed-1"
    gone = [storage.job_folder("gone"), storage.run_folder("gone"), halfway]
    kept = [storage.job_folder(known.id), storage.run_folder(known.id)]
    fresh = storage.job_folder("fresh")
    for folder in (*gone, *kept, fresh):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    for folder in (*gone, *kept):
        os.utime(folder, (0.0, 0.0))
    assert storage.sweep(retention_days=1.0) == 0
    assert [folder.exists() for folder in gone] == [False] * 3
    assert all(folder.exists() for folder in (*kept, fresh))


def test_artefacts_are_kept_once_and_found_by_content(tmp_path: Path):
    artefacts = Artefacts(tmp_path)
    digest = artefacts.put(b"abc")
    # FIPS 180-2, B.1: SHA-256 of "abc".
    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert artefacts.put(b"abc") == digest
    assert artefacts.get(digest) == b"abc"
    artefacts.path(digest).write_bytes(b"abd")
    assert artefacts.get(digest) is None
    with pytest.raises(ValueError, match="sha256"):
        artefacts.path("../../etc/passwd")


def test_a_data_folder_serves_one_service(tmp_path: Path):
    lock, former = lock_folder(tmp_path)
    assert former == ""
    sign_folder(lock, "first")
    with pytest.raises(InputError, match="another service"):
        lock_folder(tmp_path)
    os.close(lock)
    lock, former = lock_folder(tmp_path)
    assert former == "first"
    os.close(lock)


def test_tables_of_a_newer_version_are_refused_in_a_line(storage: Storage):
    with storage.database.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = version_num || '9'"))
    with pytest.raises(InputError, match="of this version of gnnplan or an older one, found: "):
        storage.database.migrate()
    with storage.database.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = rtrim(version_num, '9')"))


def test_a_folder_or_file_that_cannot_hold_them_is_refused_in_a_line(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for folder in ("file", "file/below"):
        with pytest.raises(InputError, match="expected a data folder that can be written, found: "):
            Storage(tmp_path / folder)
    (tmp_path / SQLITE_FILE).write_text("no database" * 99)
    with pytest.raises(InputError, match="expected a database that answers, found: "):
        Storage(tmp_path)


@pytest.mark.parametrize("url", ["mysql://x/y", "no url", ""])
def test_other_databases_are_refused(url: str):
    with pytest.raises(InputError, match="expected a"):
        Database(url)


def test_psycopg_is_the_driver_of_a_postgresql_url():
    assert normal_url("postgresql://u@h/d") == "postgresql+psycopg://u@h/d"


@pytest.mark.parametrize("cursor", ["", "x", "bm90IGpzb24", "W10", "e30", "WyJhIiwgMV0"])
def test_a_cursor_that_is_none_of_ours_is_refused(cursor: str):
    with pytest.raises(InputError, match="cursor"):
        decode_cursor(cursor)
