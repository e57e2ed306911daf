"""Which run an output folder holds: the one that was started there, not one that it is a copy of."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from uuid import uuid4

from mua.utils.atomic import replace_text

RUN_FILE = "store_run"
"""The run's id in its store and with trackers, and on the second line the folder in which it got it."""

log = logging.getLogger(__name__)


def known_run(output: Path) -> str | None:
    """The id of the run that was last started in this folder, or in the one that it is a copy of."""
    path = output / RUN_FILE
    return path.read_text(encoding="utf-8").partition("\n")[0].strip() if path.is_file() else None


def claim_run(output: Path) -> str:
    """The id of the run in ``output``, made where there is none.

    A folder that was copied or moved has the id of the run it was taken from, which may go on where it was: what goes
    on here gets an id, and so a record and a curve, of its own.
    """
    path, here, known = output / RUN_FILE, str(output.resolve()), known_run(output)
    if known:
        place = path.read_text(encoding="utf-8").partition("\n")[2].removesuffix("\n")
        if place == "":  # of an older version
            replace_text(path, f"{known}\n{here}\n")
        if place in ("", here):
            return known
        log.warning("%s: is a copy of run %s in %s; what goes on here is a run of its own", output, known, place)
    made = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid4().hex[:8]}"
    replace_text(path, f"{made}\n{here}\n")
    return made
