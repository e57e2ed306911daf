"""Ask a run's store what an auditor would, in SQL, and write questions and answers as a page.

    python -m tools.audit_page STORE [--run ID] > docs/audit.md

The queries are plain SQL of both databases; the page shows what the store at hand answered.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.database import Store
from mua.store.verification import verify
from tools import kit

QUESTIONS = (
    ("What ran, in how many starts?",
     "SELECT r.name, r.state, p.part, p.from_step, round(p.ended_at - p.started_at) AS seconds\n"
     "FROM runs r JOIN parts p ON p.run_id = r.id WHERE r.id = :run ORDER BY p.part"),
    ("Which steps were taken, on how many episodes and tokens, and which checkpoints hold the result?",
     "SELECT s.step, s.part, s.state, count(DISTINCT u.trajectory_id) AS episodes, sum(u.tokens) AS trained_tokens,\n"
     "       v.checkpoint\n"
     "FROM steps s LEFT JOIN uses u ON u.run_id = s.run_id AND u.step = s.step AND u.part = s.part\n"
     "LEFT JOIN versions v ON v.run_id = s.run_id AND v.version = s.step + 1 AND v.part = s.part\n"
     "WHERE s.run_id = :run GROUP BY s.step, s.part, s.state, v.checkpoint ORDER BY s.step, s.part"),
    ("What did the last step train on, and how did these episodes end?",
     "SELECT u.trajectory_id, t.task_id, t.outcome, t.reward, t.turns, u.tokens\n"
     "FROM uses u JOIN trajectories t ON t.id = u.trajectory_id\n"
     "WHERE u.run_id = :run AND u.step = (SELECT max(step) FROM steps WHERE run_id = :run)\n"
     "ORDER BY t.ordinal, t.sample"),
    ("Was anything trained on in two steps, without a score, or by a policy newer than its step?",
     "SELECT sum(CASE WHEN steps > 1 THEN 1 ELSE 0 END) AS in_two_steps,\n"
     "       sum(CASE WHEN scored THEN 0 ELSE 1 END) AS not_scored,\n"
     "       sum(CASE WHEN version_high > step THEN 1 ELSE 0 END) AS from_the_future,\n"
     "       max(step - version_low) AS oldest_version_behind, count(*) AS episodes\n"
     "FROM (SELECT t.id, t.scored, t.version_low, t.version_high, min(u.step) AS step,\n"
     "             count(DISTINCT u.step) AS steps\n"
     "      FROM uses u JOIN trajectories t ON t.id = u.trajectory_id WHERE u.run_id = :run\n"
     "      GROUP BY t.id, t.scored, t.version_low, t.version_high) AS used"),
    ("Every request of the first of these episodes: which tokens, from where, how long?",
     "SELECT r.role, r.number, r.turn, r.version, r.prompt_tokens, r.cached_tokens, r.token_start,\n"
     "       r.token_end, r.finish, round(r.seconds * 1000) AS ms\n"
     "FROM requests r WHERE r.trajectory_id = (SELECT min(u.trajectory_id) FROM uses u WHERE u.run_id = :run\n"
     "     AND u.step = (SELECT max(step) FROM steps WHERE run_id = :run)) ORDER BY r.started_at"),
    ("Do the requests account for every sampled token?",
     "SELECT sum(t.sampled_tokens) AS in_trajectories,\n"
     "       (SELECT sum(r.completion_tokens) FROM requests r WHERE r.run_id = :run AND r.role = 'policy'\n"
     "        AND r.trajectory_id IS NOT NULL) AS in_requests\n"
     "FROM trajectories t WHERE t.run_id = :run"),
    ("Which tools were called, and how often in vain?",
     "SELECT name, count(*) AS calls, count(error) AS errors FROM tool_calls WHERE run_id = :run\n"
     "GROUP BY name ORDER BY calls DESC, name LIMIT 8"),
    ("What was given up?",
     "SELECT (SELECT count(*) FROM requests WHERE run_id = :run AND trajectory_id IS NULL) AS of_failed_attempts,\n"
     "       (SELECT count(*) FROM tasks WHERE run_id = :run AND state = 'cancelled') AS cancelled_groups,\n"
     "       (SELECT count(*) FROM trajectories WHERE run_id = :run AND NOT scored) AS episodes_without_score"),
)  # fmt: skip


def answers(connection: Connection, run: str) -> str:
    """Each question, its query and what the store says."""
    parts = []
    for question, query in QUESTIONS:
        result = connection.execute(sa.text(query), {"run": run})
        names = tuple(result.keys())
        rows = [tuple(_shown(value) for value in row) for row in result]
        parts.append(f"## {question}\n\n```sql\n{query}\n```\n\n{kit.table(names, rows)}")
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("store")
    parser.add_argument("--run")
    arguments = parser.parse_args()
    with Store.open(arguments.store, create=False, write=False) as store, store.read() as connection:
        newest = sa.text("SELECT id FROM runs ORDER BY started_at DESC LIMIT 1")
        run = arguments.run or str(connection.execute(newest).scalar_one())
        print("# A run audited by SQL\n")
        faults = len(list(verify(connection)))
        print(
            "What the store of one run answers to the questions of an auditor. The run is the one of the end-to-end\n"
            "tests: a tiny policy, four steps of three groups of two episodes at a help desk, no tool called.\n"
            "`python -m tools.audit_page STORE` asks any other; [store.md](store.md) explains the tables, and\n"
            f"`mua store verify` checks blobs and references too (here: {faults} faults).\n"
        )
        print(answers(connection, run))


if __name__ == "__main__":
    main()
