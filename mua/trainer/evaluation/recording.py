"""What ``mua eval`` writes into the store: its episodes, with every request and call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.store.database import Store, store_url
from mua.store.recorder import Recorder
from mua.store.starts import begin_part
from mua.store.tables import parts, runs
from mua.store.writer import Update, Writer
from mua.tokens.codec import tokenizer_digest


@contextmanager
def recording(config: ExperimentConfig) -> Iterator[Recorder | None]:
    """A block whose episodes are kept in the store of ``config.output``; None where none is wanted."""
    chosen = config.store
    if not chosen.enabled:
        yield None
        return
    config.output.mkdir(parents=True, exist_ok=True)
    made = {"tokenizer": tokenizer_digest(config.model.path)}
    with Store.open(store_url(config.output, chosen), busy_seconds=chosen.busy_seconds) as store:
        run, part, rounds = begin_part(
            store, config.output, config.name, yaml.safe_load(dump_config(config)), made,
            from_step=None, seconds=chosen.outage_seconds,
        )  # fmt: skip
        with Writer(
            store,
            every_seconds=chosen.write_seconds,
            queue_bytes=chosen.queue_megabytes * 2**20,
            outage_seconds=chosen.outage_seconds,
            name=run,
        ) as writer:
            recorder, state = Recorder(writer, run, part, round=rounds), "left"
            try:
                yield recorder
                state = "done"
            finally:
                ended = {"ended_at": time.time()}
                of_part = Update(parts, {"run_id": run, "part": part}, ended)
                writer.put([Update(runs, {"id": run}, ended | {"state": state}), of_part])
