"""Lists of trajectories are read from indexes; trajectories say how long they took."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make this schema of the one before."""
    with op.batch_alter_table("trajectories", schema=None) as batch_op:
        batch_op.add_column(sa.Column("seconds", sa.Double(), server_default=sa.text("0"), nullable=False))
        batch_op.create_index(
            batch_op.f("ix_trajectories_run_id_ended_at_id"), ["run_id", "ended_at", "id"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_trajectories_run_id_reward_id"), ["run_id", "reward", "id"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_trajectories_run_id_seconds_id"), ["run_id", "seconds", "id"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_trajectories_run_id_tokens_id"), ["run_id", "tokens", "id"], unique=False)
        batch_op.create_index(batch_op.f("ix_trajectories_run_id_turns_id"), ["run_id", "turns", "id"], unique=False)
    op.execute("UPDATE trajectories SET seconds = ended_at - started_at WHERE started_at IS NOT NULL")
