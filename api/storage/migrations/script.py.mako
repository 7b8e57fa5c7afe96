"""${message}."""

import sqlalchemy as sa
from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the tables forward."""
    ${upgrades if upgrades else "raise NotImplementedError"}


def downgrade() -> None:
    """Bring the tables back."""
    ${downgrades if downgrades else "raise NotImplementedError"}
