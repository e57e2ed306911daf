"""Write the next schema version of the store: what ``mua/store/tables.py`` has and the newest migration does not make.

    python -m tools.store_migration "what changes, in a line"

The module is written from the difference that alembic finds, with plain types, so that later changes of
``mua/store/column_types.py`` do not change what it did. Read it before it is committed: a rename looks like a column
that goes and another one that comes. ``tests/unit/test_store.py`` refuses tables that no migration makes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import sqlalchemy as sa
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations.ops import UpgradeOps

from mua.store.database import FILE, HEAD, Store
from mua.store.tables import metadata
from tools import kit

VERSIONS = Path(__file__).resolve().parents[1] / "mua/store/migrations/versions"
_MODULE = '''"""{what}"""

import sqlalchemy as sa
from alembic import op

revision = "{version}"
down_revision = {before}
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
    with TemporaryDirectory() as folder:
        upgrade = difference(Path(folder))
    if not upgrade.ops:
        sys.exit("the tables are those of the newest migration")
    path = write(what, upgrade)
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(path)], check=True)
    print(path)


def difference(folder: Path) -> UpgradeOps:
    """What turns a store of the newest migration into the tables."""
    engine = sa.create_engine(f"sqlite:///{folder / FILE}")
    if HEAD != "0000":
        Store.open(folder).close()
    with engine.connect() as connection:
        options = {"compare_type": True, "compare_server_default": True, "render_as_batch": True}
        context = MigrationContext.configure(connection, opts=options)
        found = produce_migrations(context, metadata).upgrade_ops
    assert found is not None
    return found


def write(what: str, upgrade: UpgradeOps) -> Path:
    """The module of ``upgrade``; lines that split a statement over columns are ruff's to join."""
    version = f"{int(HEAD) + 1:04}"
    code = render_python_code(upgrade, render_as_batch=HEAD != "0000", render_item=_plain)
    body = "\n".join(line for line in code.splitlines() if not line.strip().startswith("#"))
    before = "None" if HEAD == "0000" else f'"{HEAD}"'
    path = VERSIONS / f"schema_{version}.py"
    path.write_text(_MODULE.format(what=what.rstrip(".") + ".", version=version, before=before, body=body.strip()))
    return path


def _plain(kind: str, item: Any, _: Any) -> str | Literal[False]:
    """The project's own types by what they are in the database."""
    if kind == "type" and isinstance(item, sa.types.TypeDecorator):
        return f"sa.{type(item.impl).__name__}()"
    return False


if __name__ == "__main__":
    main()
