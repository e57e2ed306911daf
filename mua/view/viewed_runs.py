"""Which runs are looked at: stores named by a person, each opened for reading alone, and what lies beside them."""

from __future__ import annotations

import codecs
import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml

from mua.config.load import dump_config, load_config
from mua.observe.metrics_log import EVALUATIONS_FILE, METRICS_FILE, read_metrics
from mua.observe.output import CONFIG_FILE
from mua.store.database import Store
from mua.store.faults import NoStore, StoreError
from mua.store.queries import list_runs
from mua.store.tables import reading_on, runs
from mua.store.traces import import_writes
from mua.store.writer import execute
from mua.types import Json
from mua.utils.errors import MuaError
from mua.utils.run_identity import known_run


class TokenTexts:
    """Texts of ids by the tokenizer of a folder; without one, every id stands for itself. Safe in threads."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @property
    def fault(self) -> str | None:
        """Why there is no text, or None."""
        return self._loaded[1]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text a token. A character of several tokens belongs to the last of them; bytes that are no UTF-8 become
        U+FFFD, as in the engine's text."""
        bytes_of, fault = self._loaded
        if fault is not None:
            return [f"⟨{number}⟩" for number in ids]
        decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), []
        for number in ids:
            found.append(decoder.decode(bytes_of.get(int(number), b"")))
        if rest := decoder.decode(b"", final=True):
            found[-1] += rest
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return "".join(self.pieces(ids))

    @cached_property
    def _loaded(self) -> tuple[dict[int, bytes], str | None]:
        if self.folder is None:
            return {}, "the run says no model.path; name the tokenizer's folder with --model"
        path = self.folder / "tokenizer.json"
        try:
            return _byte_vocabulary(json.loads(path.read_text(encoding="utf-8"))), None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
            return {}, f"{path}: no tokenizer ({why}); name its folder with --model"


def _byte_vocabulary(specification: dict[str, Any]) -> dict[int, bytes]:
    """Bytes by id. Raises ValueError for a tokenizer whose vocabulary is not written in the bytes of byte-level BPE.

    There a printable character of Latin-1 stands for its own byte, and the characters from U+0100 on for the others
    (Radford et al. 2019, GPT-2's ``encoder.py``).
    """
    kinds = json.dumps([specification.get("decoder"), specification.get("pre_tokenizer")])
    if '"ByteLevel"' not in kinds:
        raise ValueError("its tokens are no bytes (ByteLevel)")
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in own)
    byte_of = {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
    found = {
        int(number): bytes(byte_of[character] for character in token)
        for token, number in specification["model"]["vocab"].items()
        if all(character in byte_of for character in token)
    }
    for token in specification["added_tokens"]:
        found[int(token["id"])] = token["content"].encode("utf-8", "replace")
    return found


TRACES = "traces"
"""Folder of a run's trace files; see mua/store/traces.py."""


class NotThere(MuaError):
    """A run, step or trajectory that was asked for is in no store that is looked at."""


@dataclass
class ViewedRun:
    """One run of one store."""

    key: str
    """Its id, or ``<id>@2`` where two stores have a run of that id."""
    id: str
    store: Store
    folder: Path | None
    """Where its metrics and checkpoints are, if they are on this machine."""
    config: Json
    """Masked, of its last start."""
    token_texts: TokenTexts
    _lines: list[dict[str, Any]] = field(default_factory=list)
    _read_sizes: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def metric_lines(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` and ``evaluations.jsonl``, one a step, in order; empty where there are none.

        Held-out figures at step ``k`` are of the policy after ``k`` steps, the rest of what the step ``k`` did, counted
        from 0.
        """
        names = () if self.folder is None else (METRICS_FILE, EVALUATIONS_FILE)
        with self._lock:
            paths = [path for name in names if (path := self.folder / name).is_file()]  # type: ignore[operator]
            if (sizes := [path.stat().st_size for path in paths]) != self._read_sizes:
                by_step: dict[int, dict[str, Any]] = {}
                for line in (line for path in paths for line in read_metrics(path)):
                    by_step[line["step"]] = by_step.get(line["step"], {}) | line
                self._lines, self._read_sizes = [by_step[step] for step in sorted(by_step)], sizes
            return self._lines


class ViewedRuns:
    """The runs of all stores that were named; a run that begins later appears. Safe in threads."""

    def __init__(self, places: Sequence[tuple[Store, Path | None]], model: Path | None) -> None:
        self._places, self._model = places, model
        self._runs: dict[str, ViewedRun] = {}
        self._lock = threading.Lock()
        self.refresh()

    def refresh(self) -> list[Json]:
        """A row a run, newest first, as :func:`mua.store.queries.list_runs`, with its ``key`` and ``store``."""
        found = []
        for number, (store, folder) in enumerate(self._places):
            with reading_on(), store.read() as connection:
                rows = list(list_runs(connection))
                configs = dict(connection.execute(sa.select(runs.c.id, runs.c.config)).all())
            for row in rows:
                with self._lock:
                    key = row["id"]
                    if key in self._runs and self._runs[key].store is not store:
                        key = f"{key}@{number + 1}"
                    if key not in self._runs:
                        config, own = configs.get(key), Path(row["output"])
                        config = config if isinstance(config, dict) else {}
                        named = folder is not None and (len(rows) == 1 or known_run(folder) == row["id"])
                        place = folder if named else own if known_run(own) == row["id"] else None
                        texts, model = self._model, config.get("model")
                        if texts is None and isinstance(model, dict) and model.get("path") is not None:
                            texts = Path(model["path"])
                        exported = None if place is None else place / "hf"  # where model.path is gone
                        if self._model is None and exported is not None and not (texts and texts.is_dir()):
                            texts = exported if (exported / "tokenizer.json").is_file() else texts
                        self._runs[key] = ViewedRun(key, row["id"], store, place, config, TokenTexts(texts))
                found.append(row | {"key": key, "store": store.name})
        return sorted(found, key=lambda row: -row["started_at"])

    def get(self, key: str | None = None) -> ViewedRun:
        """The run of this key; by default the only one, or else the one that goes on in the only folder named.

        Raises :class:`NotThere`, also where there are several.
        """
        if key is None and len(self._places) == 1 and (folder := self._places[0][1]) is not None:
            key = known if (known := known_run(folder)) in self._runs else None
        if key is None and len(self._runs) > 1:
            raise NotThere(f"there are {len(self._runs)} runs; name one (--run): {', '.join(self._runs)}")
        key = key or next(iter(self._runs))
        if key not in self._runs:
            self.refresh()
        if key not in self._runs:
            raise NotThere(f"run {key}: not in the stores that are looked at, which have {', '.join(self._runs)}")
        return self._runs[key]

    def keys(self) -> list[str]:
        """Of all runs, in the order in which they were seen."""
        return list(self._runs)


def config_in(folder: Path) -> Json:
    """The configuration in the folder of a run; empty where there is none that can be read."""
    try:
        found = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def opened_runs(
    places: Iterable[str], *, model: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> Iterator[ViewedRuns]:
    """A block with the runs of ``places``: output folders, store files, URLs. ``model`` is a tokenizer's folder.

    An output folder without a store is read through the importer, from its traces, into a temporary store; ``tell`` is
    given a line about it. Raises :class:`StoreError` for a place with neither.
    """
    with ExitStack() as stack:
        opened = []
        for place in places:
            folder = Path(place) if "://" not in place and Path(place).is_dir() else None
            try:
                store = Store.open(place, create=False, write=False)
            except NoStore:
                if folder is None or not (folder / TRACES).is_dir():
                    what = "no store; name the output folder of a run, its store file or its URL"
                    if folder is not None:
                        section = config_in(folder).get("store")
                        database = isinstance(section, dict) and section.get("url") is not None
                        what = "holds neither a store nor traces; name the output folder of a run"
                        what = "its store is a database (store.url); name the URL" if database else what
                    raise StoreError(f"{folder or place}: {what}") from None
                store = _imported(stack, folder, tell)
            opened.append((stack.enter_context(store), folder))
        viewed = ViewedRuns(opened, model)
        if not viewed.keys():
            names = ", ".join(store.name for store, _ in opened)
            raise StoreError(f"store {names}: has no run yet; wait for its first step, or name another")
        yield viewed


def _imported(stack: ExitStack, folder: Path, tell: Callable[[str], None]) -> Store:
    """A temporary store of a run that has only traces."""
    made_with = None
    if (folder / CONFIG_FILE).is_file():
        with contextlib.suppress(MuaError):  # of another version of mua: its tokenizer is then asked for
            made_with = yaml.safe_load(dump_config(load_config(folder / CONFIG_FILE, ())))
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mua-view-"))) / "store.sqlite"
    tell(f"{folder}: has no store; reading its traces (no requests, tool calls, advantages or weights)")
    with Store.open(path) as store, store.begin() as connection:
        files = [folder / TRACES, *sorted((folder / "evaluations").glob("*"))]
        execute(connection, import_writes(folder.resolve().name, files, config=made_with))
        connection.execute(sa.update(runs).values(output=str(folder)))
    return Store.open(path, create=False, write=False)
