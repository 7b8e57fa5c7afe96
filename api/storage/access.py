"""API keys and the audit log."""

import time

from sqlalchemy import select, update

from gnnplan.api.storage.database import Database, Page, page_of
from gnnplan.api.storage.tables import AuditRow, KeyRow


class Access:
    """Every method is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_key(self, row: KeyRow) -> None:
        """Keep a key's hash."""
        with self._database.writing() as session:
            session.add(row)

    def key_of_hash(self, sha256: str) -> KeyRow | None:
        """The key with that hash, revoked or not."""
        with self._database.reading() as session:
            return session.scalars(select(KeyRow).where(KeyRow.sha256 == sha256)).one_or_none()

    def list_keys(self) -> list[KeyRow]:
        """All keys, oldest first."""
        with self._database.reading() as session:
            return list(session.scalars(select(KeyRow).order_by(KeyRow.created_seconds)))

    def has_keys(self, *, revoked_too: bool = False) -> bool:
        """Whether any key is valid, or was ever made."""
        query = select(KeyRow.id).limit(1)
        if not revoked_too:
            query = query.where(KeyRow.revoked_seconds.is_(None))
        with self._database.reading() as session:
            return session.execute(query).first() is not None

    def revoke(self, key_id: str) -> bool:
        """Make a key useless; False where there is no such key."""
        with self._database.writing() as session:
            found = session.execute(
                update(KeyRow)
                .where(KeyRow.id == key_id)
                .values(revoked_seconds=time.time())
                .returning(KeyRow.id)
            ).scalar_one_or_none()
        return found is not None

    def write_audit(self, row: AuditRow) -> None:
        """Add a line to the audit log."""
        with self._database.writing() as session:
            session.add(row)

    def audit(
        self, *, principal: str | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page[AuditRow]:
        """The audit log, newest first."""
        with self._database.reading() as session:
            return page_of(
                session,
                AuditRow,
                order=(AuditRow.time_seconds, AuditRow.id),
                where=[] if principal is None else [AuditRow.principal == principal],
                cursor=cursor,
                limit=limit,
            )
