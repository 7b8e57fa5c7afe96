"""Make the first tables."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

COLUMNS = {
    "audit": "id:number time_seconds:float principal:64 client:64 method:8 path:text status:int "
    "request_id:64 job_id:32",
    "jobs": "id:32 kind:16 lane:16 state:16 request:text subject:64 principal:64 request_id:64 "
    "stage:text share:float attempt:int crashes:int cancel:bool time_limit_seconds:float "
    "created_seconds:float started_seconds:float? finished_seconds:float? lease_owner:32? "
    "lease_until_seconds:float? result:text? result_sha256:64? problem:text?",
    "keys": "id:16 name:64 sha256:64 scopes:64 created_seconds:float revoked_seconds:float?",
    "machines": "id:32 name:text fingerprint:128 provenance:16 sha256:64 created_seconds:float",
    "plans": "id:32 graph:text graph_fingerprint:64 machine:128 policy:32 num_ranks:int "
    "step_seconds:float epoch_seconds:float statistics_class:16 created_seconds:float",
    "profiles": "id:64 graph:text graph_fingerprint:64 machine:128 sha256:64 created_seconds:float",
    "attempts": "id:number job_id:32 attempt:int owner:32 started_seconds:float "
    "ended_seconds:float? outcome:16?",
    "idempotency": "principal:64 key:255 request_hash:64 job_id:32 created_seconds:float",
    "plan_requests": "key:64 plan_id:32",
}
"""Columns by table, each NAME:TYPE; a number is the longest text, `?` allows NULL."""
TYPES: dict[str, sa.types.TypeEngine[Any]] = {
    "number": sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
    "float": sa.Double(),
    "int": sa.Integer(),
    "bool": sa.Boolean(),
    "text": sa.Text(),
}
PRIMARY_KEYS = {"idempotency": ("principal", "key"), "plan_requests": ("key",)}
"""Columns of the primary key, where it is not `id`."""
FOREIGN_KEYS = {
    "attempts": ("job_id", "jobs.id"),
    "idempotency": ("job_id", "jobs.id"),
    "plan_requests": ("plan_id", "plans.id"),
}
INDICES = (
    ("ix_jobs_created", "jobs", ["created_seconds", "id"]),
    ("ix_jobs_queue", "jobs", ["lane", "state", "created_seconds"]),
    ("ix_jobs_subject", "jobs", ["subject"]),
    ("ix_plans_created", "plans", ["created_seconds", "id"]),
    ("ix_attempts_job_id", "attempts", ["job_id"]),
    ("ix_plan_requests_plan_id", "plan_requests", ["plan_id"]),
)


def upgrade() -> None:
    """Make every table."""
    for table, columns in COLUMNS.items():
        constraints: list[sa.Constraint] = [
            sa.PrimaryKeyConstraint(*PRIMARY_KEYS.get(table, ("id",)))
        ]
        if table in FOREIGN_KEYS:
            column, target = FOREIGN_KEYS[table]
            constraints.append(sa.ForeignKeyConstraint([column], [target], ondelete="CASCADE"))
        if table == "keys":
            constraints.append(sa.UniqueConstraint("sha256"))
        op.create_table(table, *map(_column, columns.split()), *constraints)
    for name, table, columns in INDICES:
        op.create_index(name, table, columns, unique=False)


def _column(text: str) -> "sa.Column[Any]":
    name, _, kind = text.rstrip("?").partition(":")
    return sa.Column(
        name,
        sa.String(length=int(kind)) if kind.isdecimal() else TYPES[kind],
        autoincrement=kind == "number",
        nullable=text.endswith("?"),
    )


def downgrade() -> None:
    """Remove every table."""
    for name, table, _ in reversed(INDICES):
        op.drop_index(name, table_name=table)
    for table in reversed(COLUMNS):
        op.drop_table(table)
