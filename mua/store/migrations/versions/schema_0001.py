"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make this schema of the one before."""
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("output", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("config", sa.Text(), nullable=True),
        sa.Column("provenance", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_table(
        "texts",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_texts")),
    )
    op.create_table(
        "writes",
        sa.Column("writer", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("writer", name=op.f("pk_writes")),
    )
    op.create_table(
        "engines",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("capacity", sa.Integer(), nullable=False),
        sa.Column("running", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("waiting", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("details", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_engines_run_id")),
        sa.PrimaryKeyConstraint("run_id", "label", name=op.f("pk_engines")),
    )
    op.create_table(
        "parts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("from_step", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("config", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_parts_run_id")),
        sa.PrimaryKeyConstraint("run_id", "part", name=op.f("pk_parts")),
    )
    op.create_table(
        "samplers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("running", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("details", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_samplers_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_samplers")),
    )
    op.create_index(op.f("ix_samplers_run_id_seen_at"), "samplers", ["run_id", "seen_at"], unique=False)
    op.create_table(
        "steps",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.Column("denominators", sa.Text(), nullable=True),
        sa.Column("gradient", sa.Text(), nullable=True),
        sa.Column("details", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id")),
        sa.PrimaryKeyConstraint("run_id", "step", "part", name=op.f("pk_steps")),
    )
    op.create_table(
        "tasks",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("split", sa.Text(), nullable=True),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("priority", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("part", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("taken_step", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("details", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_tasks_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "ordinal", name=op.f("pk_tasks")),
    )
    op.create_index(
        op.f("ix_tasks_run_id_state_round_ordinal"), "tasks", ["run_id", "state", "round", "ordinal"], unique=False
    )
    op.create_table(
        "trajectories",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("scored", sa.Boolean(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("success", sa.Boolean(), nullable=False),
        sa.Column("passing", sa.Boolean(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("turn_rewards", sa.Text(), nullable=False),
        sa.Column("segments", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("version_low", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("version_high", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("messages", sa.LargeBinary(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=True),
        sa.Column("sampler", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("pruned", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_trajectories_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trajectories")),
        sa.UniqueConstraint(
            "run_id",
            "part",
            "round",
            "ordinal",
            "sample",
            "attempt",
            name=op.f("uq_trajectories_run_id_part_round_ordinal_sample_attempt"),
        ),
    )
    op.create_index(
        op.f("ix_trajectories_run_id_domain_task_id"), "trajectories", ["run_id", "domain", "task_id"], unique=False
    )
    op.create_index(
        op.f("ix_trajectories_run_id_round_ordinal_sample"),
        "trajectories",
        ["run_id", "round", "ordinal", "sample"],
        unique=False,
    )
    op.create_index(
        op.f("ix_trajectories_run_id_success_reward"), "trajectories", ["run_id", "success", "reward"], unique=False
    )
    op.create_table(
        "versions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("synced_at", sa.Double(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_versions_run_id")),
        sa.PrimaryKeyConstraint("run_id", "version", "part", name=op.f("pk_versions")),
    )
    op.create_table(
        "episodes",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("sample", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=True),
        sa.Column("lease", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=True),
        sa.Column("details", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id", "round", "ordinal"], ["tasks.run_id", "tasks.round", "tasks.ordinal"], name="fk_episodes_tasks"
        ),
        sa.PrimaryKeyConstraint("run_id", "round", "ordinal", "sample", name=op.f("pk_episodes")),
    )
    op.create_index(
        op.f("ix_episodes_run_id_state_lease_until"), "episodes", ["run_id", "state", "lease_until"], unique=False
    )
    op.create_index(
        op.f("ix_episodes_run_id_state_round_ordinal_sample"),
        "episodes",
        ["run_id", "state", "round", "ordinal", "sample"],
        unique=False,
    )
    op.create_index(op.f("ix_episodes_sampler"), "episodes", ["sampler"], unique=False)
    op.create_table(
        "requests",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=True),
        sa.Column("turn", sa.Integer(), nullable=True),
        sa.Column("endpoint", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("waited", sa.Double(), nullable=True),
        sa.Column("version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("cached_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("segment", sa.Integer(), nullable=True),
        sa.Column("token_start", sa.Integer(), nullable=True),
        sa.Column("token_end", sa.Integer(), nullable=True),
        sa.Column("follows", sa.Integer(), nullable=True),
        sa.Column("kept", sa.Integer(), nullable=True),
        sa.Column("messages", sa.Text(), nullable=True),
        sa.Column("tools", sa.Text(), nullable=True),
        sa.Column("reply", sa.Text(), nullable=True),
        sa.Column("finish", sa.Text(), nullable=True),
        sa.Column("sampling", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_requests_run_id")),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_requests_trajectory_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
        sa.UniqueConstraint(
            "run_id",
            "part",
            "round",
            "ordinal",
            "sample",
            "attempt",
            "role",
            "number",
            name=op.f("uq_requests_run_id_part_round_ordinal_sample_attempt_role_number"),
        ),
    )
    op.create_index(
        op.f("ix_requests_run_id_role_started_at"), "requests", ["run_id", "role", "started_at"], unique=False
    )
    op.create_index(op.f("ix_requests_trajectory_id"), "requests", ["trajectory_id"], unique=False)
    op.create_table(
        "scores",
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("scorer", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("details", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_scores_trajectory_id")),
        sa.PrimaryKeyConstraint("trajectory_id", "scorer", name=op.f("pk_scores")),
    )
    op.create_table(
        "segments",
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("sampled_tokens", sa.Integer(), nullable=False),
        sa.Column("arrays", sa.LargeBinary(), nullable=True),
        sa.Column("experts", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_segments_trajectory_id")),
        sa.PrimaryKeyConstraint("trajectory_id", "number", name=op.f("pk_segments")),
    )
    op.create_table(
        "tool_calls",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=True),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("by_user", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_tool_calls_run_id")),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_tool_calls_trajectory_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tool_calls")),
        sa.UniqueConstraint(
            "run_id",
            "part",
            "round",
            "ordinal",
            "sample",
            "attempt",
            "number",
            name=op.f("uq_tool_calls_run_id_part_round_ordinal_sample_attempt_number"),
        ),
    )
    op.create_index(op.f("ix_tool_calls_run_id_name"), "tool_calls", ["run_id", "name"], unique=False)
    op.create_index(op.f("ix_tool_calls_trajectory_id"), "tool_calls", ["trajectory_id"], unique=False)
    op.create_table(
        "uses",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("segment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("minibatch", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("position", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("arrays", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id", "step", "part"], ["steps.run_id", "steps.step", "steps.part"], name="fk_uses_steps"
        ),
        sa.PrimaryKeyConstraint("run_id", "step", "part", "epoch", "trajectory_id", "segment", name=op.f("pk_uses")),
    )
    op.create_index(op.f("ix_uses_trajectory_id_step"), "uses", ["trajectory_id", "step"], unique=False)
