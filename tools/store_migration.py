"""Write the next schema version of the store: the migration from the newest version to ``mua/store/tables.py``.

    python -m tools.store_migration "what changes, in a line"

The migration is the difference that alembic finds between the tables and the frozen statements of the newest version
(``tests/data/store_schemas``). The new version's statements are frozen beside them, for SQLite and PostgreSQL.
Read the migration before it is committed: a rename looks like a dropped column and a new one. The tests bring every
frozen version to the tables on both databases.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations.ops import UpgradeOps
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from mua.store.database import HEAD
from mua.store.tables import metadata
from tools import kit

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ROOT / "mua/store/migrations/versions"
FROZEN = ROOT / "tests/data/store_schemas"
_DIALECTS = {"sqlite": sqlite.dialect(), "postgresql": postgresql.dialect()}
_MODULE = '''"""{what}"""

import sqlalchemy as sa
from alembic import op

revision = "{version}"
down_revision = "{before}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make this schema of the one before."""
    {body}
'''


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("what", help="the first line of the module")
    what = parser.parse_args().what
    upgrade = difference()
    if not upgrade.ops:
        sys.exit("the tables are those of the newest migration")
    code = render_python_code(upgrade, render_as_batch=True, render_item=_plain)
    body = "\n".join(line for line in code.splitlines() if not line.strip().startswith("#"))
    version = f"{int(HEAD) + 1:04}"
    path = VERSIONS / f"schema_{version}.py"
    path.write_text(_MODULE.format(what=what.rstrip(".") + ".", version=version, before=HEAD, body=body.strip()))
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(path)], check=True)
    for dialect in _DIALECTS:
        frozen(version, dialect).write_text(schema_sql(dialect))
    print(path)


def difference() -> UpgradeOps:
    """What turns a store of the newest version into the tables."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    connection = engine.raw_connection()
    connection.cursor().executescript(frozen(HEAD, "sqlite").read_text())  # type: ignore[attr-defined]
    with engine.connect() as opened:
        options = {"compare_type": True, "compare_server_default": True, "render_as_batch": True}
        found = produce_migrations(MigrationContext.configure(opened, opts=options), metadata).upgrade_ops
    assert found is not None
    return found


def frozen(version: str, dialect: str) -> Path:
    """The file of a version's statements."""
    return FROZEN / f"{version}.{dialect}.sql"


def schema_sql(dialect: str) -> str:
    """The statements that make the tables, and the version's own table, empty."""
    made: list[Any] = []
    for table in metadata.sorted_tables:
        made += [
            CreateTable(table),
            *(CreateIndex(index) for index in sorted(table.indexes, key=lambda index: str(index.name))),
        ]
    texts = [str(statement.compile(dialect=_DIALECTS[dialect])).strip() for statement in made]
    texts.append("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    return "".join(text.replace("\t", "    ").replace(" \n", "\n") + ";\n" for text in texts)


def _plain(kind: str, item: Any, _: Any) -> str | Literal[False]:
    """The project's own types by what they are in the database, so that later changes of them do not matter."""
    if kind == "type" and isinstance(item, sa.types.TypeDecorator):
        return f"sa.{type(item.impl).__name__}()"
    return False


if __name__ == "__main__":
    main()
