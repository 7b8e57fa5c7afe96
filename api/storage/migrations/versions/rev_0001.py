"""Make the first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
FLOAT: sa.Double[float] = sa.Double()
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make every table."""
    op.create_table(
        "audit",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("time_seconds", FLOAT, nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("client", sa.String(length=64), nullable=False),
        sa.Column("method", sa.String(length=8), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("lane", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("subject", sa.String(length=64), nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("share", FLOAT, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("cancel", sa.Boolean(), nullable=False),
        sa.Column("time_limit_seconds", FLOAT, nullable=False),
        sa.Column("created_seconds", FLOAT, nullable=False),
        sa.Column("started_seconds", FLOAT, nullable=True),
        sa.Column("finished_seconds", FLOAT, nullable=True),
        sa.Column("lease_owner", sa.String(length=32), nullable=True),
        sa.Column("lease_until_seconds", FLOAT, nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("result_sha256", sa.String(length=64), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_jobs_created", "jobs", ["created_seconds", "id"], unique=False)
    op.create_index("ix_jobs_queue", "jobs", ["lane", "state", "created_seconds"], unique=False)
    op.create_index("ix_jobs_subject", "jobs", ["subject"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.String(length=64), nullable=False),
        sa.Column("created_seconds", FLOAT, nullable=False),
        sa.Column("revoked_seconds", FLOAT, nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_table(
        "machines",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.String(length=128), nullable=False),
        sa.Column("provenance", sa.String(length=16), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_seconds", FLOAT, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("graph", sa.Text(), nullable=False),
        sa.Column("graph_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("machine", sa.String(length=128), nullable=False),
        sa.Column("policy", sa.String(length=32), nullable=False),
        sa.Column("num_ranks", sa.Integer(), nullable=False),
        sa.Column("step_seconds", FLOAT, nullable=False),
        sa.Column("epoch_seconds", FLOAT, nullable=False),
        sa.Column("statistics_class", sa.String(length=16), nullable=False),
        sa.Column("created_seconds", FLOAT, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_plans_created", "plans", ["created_seconds", "id"], unique=False)
    op.create_table(
        "profiles",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("graph", sa.Text(), nullable=False),
        sa.Column("graph_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("machine", sa.String(length=128), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_seconds", FLOAT, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "attempts",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=32), nullable=False),
        sa.Column("started_seconds", FLOAT, nullable=False),
        sa.Column("ended_seconds", FLOAT, nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_attempts_job_id"), "attempts", ["job_id"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("created_seconds", FLOAT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("principal", "key"),
    )
    op.create_table(
        "plan_requests",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("plan_id", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index(op.f("ix_plan_requests_plan_id"), "plan_requests", ["plan_id"], unique=False)


def downgrade() -> None:
    """Remove every table."""
    op.drop_index(op.f("ix_plan_requests_plan_id"), table_name="plan_requests")
    op.drop_table("plan_requests")
    op.drop_table("idempotency")
    op.drop_index(op.f("ix_attempts_job_id"), table_name="attempts")
    op.drop_table("attempts")
    op.drop_table("profiles")
    op.drop_index("ix_plans_created", table_name="plans")
    op.drop_table("plans")
    op.drop_table("machines")
    op.drop_table("keys")
    op.drop_index("ix_jobs_subject", table_name="jobs")
    op.drop_index("ix_jobs_queue", table_name="jobs")
    op.drop_index("ix_jobs_created", table_name="jobs")
    op.drop_table("jobs")
    op.drop_table("audit")
