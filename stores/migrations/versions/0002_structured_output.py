"""A turn's answer may be the validated JSON of an output type.

Revision 0002, after 0001. Answers that are there already are plain text.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("answer_is_output", sa.Boolean(), nullable=False, server_default=sa.false())
    with op.batch_alter_table("turns") as turns:
        turns.add_column(column)


def downgrade() -> None:
    raise AssertionError("migrations only go forward; restore a backup instead")
