"""``python -m mua.cli`` is the command ``mua``."""

from mua.cli import main

main()
