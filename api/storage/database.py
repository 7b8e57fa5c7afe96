"""The database: SQLite with a write-ahead log, or PostgreSQL; its tables are migrated when opened.

Lists are read in pages, newest rows first. A cursor names the last row of a page.
"""

import base64
import binascii
import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, make_url, select, tuple_
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError
from sqlalchemy.orm import Session, sessionmaker

from gnnplan.api.storage.tables import Base
from gnnplan.runtime.errors import InputError

Row = TypeVar("Row", bound=Base)
Item = TypeVar("Item")
BUSY_SECONDS = 60
MIGRATIONS = Path(__file__).with_name("migrations")
SQLITE_FILE = "service.sqlite3"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page(Generic[Item]):
    """Some items of a list, newest first."""

    items: list[Item]
    next_cursor: str | None
    """What names the page after this one; None for the last."""


class Database:
    """One database, named by a SQLAlchemy URL and used by short transactions."""

    def __init__(self, url: str) -> None:
        self.url = normal_url(url)
        self.engine = _engine(self.url)
        self._read = sessionmaker(self.engine, expire_on_commit=False)
        writer = self.engine.execution_options(writes=True)
        self._write = sessionmaker(writer, expire_on_commit=False)

    @contextmanager
    def reading(self) -> Generator[Session]:
        """Open a transaction that changes nothing."""
        with self._read() as session:
            yield session

    @contextmanager
    def writing(self) -> Generator[Session]:
        """Open a transaction that is committed at the end of the block, or not at all.

        Raises:
            IntegrityError: another transaction has written a row of the same key meanwhile. On
                SQLite this cannot happen, because writers wait for each other.
        """
        with self._write.begin() as session:
            yield session

    def get(self, table: type[Row], key: Any) -> Row | None:
        """Return the row of a primary key, or None."""
        with self.reading() as session:
            return session.get(table, key)

    def page(
        self, table: type[Row], *, cursor: str | None = None, limit: int = 50, **equal: str | None
    ) -> Page[Row]:
        """Return one page of a table, newest rows first.

        Args:
            table: class of the rows.
            cursor: `next_cursor` of the page before; None: the newest rows.
            limit: most rows of the page.
            equal: values that columns must have; None: any.
        """
        place = [getattr(table, name) for name in (table.TIME, "id")]
        query = select(table).order_by(*(column.desc() for column in place)).limit(limit + 1)
        for name, value in equal.items():
            if value is not None:
                query = query.where(getattr(table, name) == value)
        if cursor is not None:
            time_seconds, row_id = decode_cursor(cursor)
            number = _number(row_id) if place[1].type.python_type is int else row_id
            query = query.where(tuple_(*place) < tuple_(time_seconds, number))
        with self.reading() as session:
            found = list(session.scalars(query))
        items, more = found[:limit], len(found) > limit
        last = [getattr(items[-1], column.key) for column in place] if more else None
        return Page(items=items, next_cursor=None if last is None else encode_cursor(*last))

    def migrate(self, revision: str = "head") -> None:
        """Bring the tables to a revision: `head`, `base` or the name of one."""
        # One connection for both questions: a second one would wait for the first's lock.
        try:
            with self.engine.execution_options(writes=True).begin() as connection:
                _run_alembic(connection, revision)
        except DatabaseError as error:
            reason = str(error.orig).strip().splitlines()[0]
            raise InputError(
                f"{make_url(self.url).render_as_string()}: expected a database that answers, "
                f"found: {reason}"
            ) from None
        except CommandError as error:  # it has a revision that is not among these
            raise InputError(
                f"{make_url(self.url).render_as_string()}: expected tables of this version of "
                f"gnnplan or an older one, found: {error}; install the version that wrote them"
            ) from None

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()


def sqlite_url(data_dir: Path) -> str:
    """Return the URL of the SQLite database in a data folder."""
    return f"sqlite:///{data_dir / SQLITE_FILE}"


def normal_url(url: str) -> str:
    """Return the URL with psycopg as PostgreSQL's driver, unless it names one."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InputError(
            f"expected a database URL such as postgresql://user@host/name, found {url!r}"
        ) from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise InputError(f"expected a URL of sqlite or postgresql, found {backend}")
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed.render_as_string(hide_password=False)


def _run_alembic(connection: Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    if revision == "base":
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


def _engine(url: str) -> Engine:
    if url.startswith("sqlite"):
        return _sqlite_engine(url)
    try:
        return create_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=20)
    except (ImportError, NoSuchModuleError):
        raise InputError(
            "expected psycopg for a PostgreSQL URL, found none; pip install gnnplan[postgres]"
        ) from None


def _sqlite_engine(url: str) -> Engine:
    engine = create_engine(
        url, connect_args={"timeout": BUSY_SECONDS}, pool_size=10, max_overflow=40
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        # Transactions are begun below: the driver's own would begin after the first read.
        connection.isolation_level = None
        # Readers never block the one writer, and a writer waits instead of failing.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}")
        # An accepted job survives a power cut.
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads before it writes would fail where another wrote in between.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    del configure, begin
    return engine


def make_storable(text: str) -> str:
    """Replace characters that some database refuses: lone surrogates and zero bytes."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def encode_cursor(time_seconds: float, row_id: str | int) -> str:
    """Name a row for `decode_cursor`."""
    text = json.dumps([time_seconds, row_id])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(text: str) -> tuple[float, str]:
    """Return the time and id of the row that a cursor names."""
    try:
        found: Any = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        time_seconds, row_id = found
        if not re.fullmatch(r"[0-9a-z]{1,64}", str(row_id)):
            raise ValueError(row_id)
        return float(time_seconds), str(row_id)
    except (ValueError, TypeError, OverflowError, binascii.Error, RecursionError):
        raise InputError(
            "cursor: expected the next_cursor of an earlier page, found something else"
        ) from None


def _number(row_id: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", row_id):
        raise InputError(f"cursor: expected that of the same list, found {row_id!r}")
    return int(row_id)
