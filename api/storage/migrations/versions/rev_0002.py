"""Add owners of plans, and the row that is written to see whether the database is writable.

A plan belongs to the key whose job made it, if that job is still known, else to nobody.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
FLOAT: sa.Double[float] = sa.Double()
down_revision = "0001"
branch_labels = None
depends_on = None
FIND_OWNERS = """
UPDATE plans SET owner = COALESCE(
  (SELECT principal FROM jobs
   WHERE jobs.subject = plans.id AND jobs.kind = 'plan' AND jobs.attempt > 0
   ORDER BY jobs.created_seconds LIMIT 1), '')
"""
"""A job without an attempt did not make its plan: it found one."""


def upgrade() -> None:
    """Add both."""
    owner = sa.Column("owner", sa.String(length=64), nullable=False, server_default="")
    with op.batch_alter_table("plans") as batch:
        batch.add_column(owner)
    op.execute(FIND_OWNERS)
    op.create_table(
        "written",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("time_seconds", FLOAT, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )


def downgrade() -> None:
    """Remove both."""
    op.drop_table("written")
    with op.batch_alter_table("plans") as batch:
        batch.drop_column("owner")
