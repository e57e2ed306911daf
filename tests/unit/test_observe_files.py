"""What a run writes while its disk is full: whole lines, and one clear line that names the file.

Disks are full for real: a small file system in memory (where the tests may mount one), a bound on the size of files,
and /dev/full. Not covered: checkpoints (``test_megatron_checkpoint.py``), logs of engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_support import fill, largest_file, small_disk

from mua.config.schema import ExperimentConfig
from mua.observe.metrics_log import METRICS_FILE, MetricsWriter
from mua.observe.output import CONFIG_FILE, prepare_output
from mua.store.traces import experts_file, read_traces, trace_file, write_traces
from mua.trainer.evaluation.store import EpisodeStore, Key
from mua.types import Outcome, Segment, Trajectory
from mua.utils.atomic import replace_text
from mua.utils.errors import ConfigError, DiskError
from mua.utils.files import LineFile

LIMIT = 20_000


def trajectory(sample: int, *, experts: bool = False) -> Trajectory:
    """About 7 kB on disk, and 6 kB of expert choices beside it."""
    chosen = np.zeros((500, 12), np.uint8) if experts else None
    array = np.zeros(500, np.int32)
    segment = Segment(array, array.astype(np.uint8), array.astype(np.float32), array, array, experts=chosen)
    return Trajectory("task", 0, sample, [segment], [0.0], 0.0, True, Outcome.USER_STOP)


def trajectories(*, experts: bool = False) -> Iterator[Trajectory]:
    return (trajectory(sample, experts=experts) for sample in range(100))


def test_a_line_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with LineFile(path) as file, largest_file(100):
        for _ in range(3):
            file.write("x" * 30)
        for _ in range(2):
            with pytest.raises(DiskError, match=rf"^{path}: cannot be written: File too large; make room there"):
                file.write("y" * 30)
    assert path.read_text() == ("x" * 30 + "\n") * 3
    with LineFile(path) as file:
        file.write("z")
    assert path.read_text().endswith("x\nz\n")


def test_a_file_that_does_not_fit_leaves_the_old_one_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_text(path, "old")
    with largest_file(10), pytest.raises(OSError, match="File too large") as error:
        replace_text(path, "new" * 10)
    assert error.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("experts", [False, True])
def test_traces_that_do_not_fit_leave_those_of_before(tmp_path: Path, experts: bool) -> None:
    path = trace_file(tmp_path, 3)
    write_traces(path, [trajectory(0, experts=experts)])
    with largest_file(LIMIT), pytest.raises(DiskError) as error:
        write_traces(path, trajectories(experts=experts))
    assert str(error.value).startswith((f"{path}: cannot be written", f"{experts_file(path)}: cannot be written"))
    assert len(list(read_traces(tmp_path))) == 1
    assert len(list(tmp_path.iterdir())) == 1 + experts


def _log_on(metrics: MetricsWriter) -> None:
    for step in range(1, 1000):
        metrics.log(step, {"train/loss": 1.0})


def _add_on(store: EpisodeStore, key: Key) -> None:
    for sample in range(100):
        store.add(key._replace(sample=sample), trajectory(sample))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_a_real_disk_that_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=256) as disk:
        key = Key("domain", "task", "digest", 0)
        with (
            MetricsWriter(disk, tensorboard=True) as metrics,
            EpisodeStore(disk / "episodes.jsonl", policy="p", setting="s") as store,
        ):
            metrics.log(0, {"train/loss": 1.0})
            store.add(key, trajectory(0))
            fill(disk)
            with pytest.raises(DiskError, match=rf"^{disk}/({METRICS_FILE}|tensorboard): cannot .*: No space left"):
                _log_on(metrics)
            with pytest.raises(DiskError, match=rf"^{disk}/episodes.jsonl: cannot be written: No space left"):
                _add_on(store, key)
            with pytest.raises(DiskError, match=rf"^{disk}/step_000001"):
                write_traces(trace_file(disk, 1), trajectories())
            config = ExperimentConfig(
                name="x", output=disk / "new", model={"path": "m"}, environment={"name": "e"}, trainer={"steps": 1}
            )
            with pytest.raises(ConfigError, match=r"output: cannot write into .*: No space left on device"):
                prepare_output(config)
            assert not list(disk.rglob(f"*{CONFIG_FILE}*"))
            (disk / "ballast").unlink()
        assert all(json.loads(line) for line in (disk / METRICS_FILE).read_text().splitlines())
        with EpisodeStore(disk / "episodes.jsonl", policy="p", setting="s") as store:
            assert key in store
