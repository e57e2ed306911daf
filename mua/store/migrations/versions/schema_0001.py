"""The schema that migrations start from. A new store is made from ``mua/store/tables.py``, so this makes nothing."""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Stores of this version exist already."""
