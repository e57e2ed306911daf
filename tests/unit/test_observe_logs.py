"""The log file of a process: time, level and where; the error that ends it; the terminal as before.

Not covered: ranks in processes of their own (tests/e2e/test_two_ranks.py), what a whole run says.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from disk_support import largest_file

from mua.observe.logs import log_file, logging_to
from mua.utils.errors import ConfigError

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (INFO   |WARNING|ERROR  ) [\w.]+: .*")


def test_lines_have_time_level_and_place_and_no_text_can_look_like_one(tmp_path: Path) -> None:
    with logging_to(tmp_path, "train"):
        logging.getLogger("mua.trainer.rl").info("step 0")
        logging.getLogger("mua.users").warning("it said \x1b[31mred\n2026-01-01T00:00:00.000+00:00 ERROR mua: forged")
        logging.getLogger("someone").info("chatter")
        logging.getLogger("someone").warning("odd")
    logging.getLogger("mua").warning("after it")
    begins, step, said, forged, odd, ends = log_file(tmp_path, "train").read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in (begins, step, said, odd, ends))
    assert forged.startswith("    2026-01-01")
    assert "␛[31mred" in said
    assert "mua.trainer.rl: step 0" in step
    assert logging.getLogger("mua").level == logging.NOTSET


def test_the_error_that_ends_it_is_kept_with_its_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        with pytest.raises(ConfigError), logging_to(tmp_path, "eval"):
            raise ConfigError(f"model.path: no such folder {number}")
    text = log_file(tmp_path, "eval").read_text()
    assert text.count("ERROR   mua: mua eval ends: ConfigError: model.path: no such folder") == 2
    assert "Traceback" in text
    assert "no such folder" not in caplog.text


def test_another_rank_has_a_file_once_it_has_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with logging_to(tmp_path, "train"):
        logging.getLogger("mua").info("all is well")
    assert not log_file(tmp_path, "train").exists()
    with pytest.raises(ValueError, match="x"), logging_to(tmp_path, "train"):
        raise ValueError("x")
    assert "ends: ValueError: x" in (tmp_path / "logs" / "train-rank-3.log").read_text()


def test_the_terminal_has_every_warning_once_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import logging, pathlib; from mua.observe.logs import logging_to\n"
        f"with logging_to(pathlib.Path({str(tmp_path)!r}), 'train'):\n"
        "    logging.getLogger('mua.x').info('quiet'); logging.getLogger('mua.x').warning('loud')\n"
        "logging.getLogger('mua.x').warning('later')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "loud\nlater\n")


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path, "train"), largest_file(300):
        for _ in range(20):
            logging.getLogger("mua").info("word " * 10)
    assert capfd.readouterr().err.count("train.log: cannot be written, the log ends here") == 1
