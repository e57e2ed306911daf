"""Commands of the project, run as a person would type them."""

from __future__ import annotations

import shlex
import subprocess
import sys


def say(text: str) -> None:
    """A heading between commands."""
    print(f"\n== {text}", flush=True)


def mua(*arguments: str) -> None:
    """Run one command, printed before it runs; leave with its status if it fails."""
    print("$ mua " + shlex.join(arguments), flush=True)
    status = subprocess.run([sys.executable, "-m", "mua.cli", *arguments]).returncode
    if status:
        sys.exit(status)
