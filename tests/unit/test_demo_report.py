"""The report of the demonstration: which episodes it shows, that nothing a policy says is markup, that it is one file.

Not covered: how a browser shows it; tests/unit/test_view_browser.py opens a page of the same kind.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from mua.store.database import Store
from tests.store_support import spoil, write_run
from workbench.demo_report import Kind, Section, write_report

SECTION = Section(
    "seed 1: <success>",
    ["after SFT", "after RL"],
    [Kind("cancel", 12, ["0.100", "0.700"], 0.7)],
    [("mean over kinds", ["0.1", "0.7"])],
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a seed: nothing is solved before, one of three tasks after."""
    for name in ("before", "after", "rl"):
        (tmp_path / name).mkdir()
        with Store.open(tmp_path / name / "store.sqlite") as store:
            write_run(store, name)
            spoil(store, f"update trajectories set success = {int(name == 'after')}")
            spoil(store, "update trajectories set success = 0 where task_id <> 'task 1'")
    (tmp_path / "reward.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_a_failure_stands_next_to_a_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "report.html"
    turned, left = write_report(out, [SECTION], folder / "reward.png", folder, [], "<the help desk>")
    assert (turned.left.trajectory["success"], turned.right.trajectory["success"]) == (False, True)
    assert turned.left.trajectory["task_id"] == turned.right.trajectory["task_id"] == "task 1"
    assert (turned.left.run, turned.right.run) == ("before", "after")
    assert (left.left.trajectory["success"], left.right.trajectory["success"]) == (False, True)
    page = out.read_text(encoding="utf-8")
    lead = page[page.index('<section id="lead">') : page.index('<div id="app">')]
    assert "&lt;the help desk&gt;" in lead
    assert "&lt;success&gt;" in lead
    assert "0.700" in lead
    assert "data:image/png;base64,iVBORw==" in lead
    assert f"mua env play '<the help desk>' --as user --policy {folder}/rl/hf" in html.unescape(lead)
    for shown in (turned.left, turned.right, left.left):
        assert f'href="#/run/{shown.run}/t/{shown.trajectory["id"]}"' in lead
    assert not re.search(r'(?:src|href)="(?!data:|#)', page), "one file, which asks nothing of a network"


def test_without_a_success_there_is_a_report_all_the_same(folder: Path) -> None:
    with Store.open(folder / "after/store.sqlite") as store:
        spoil(store, "update trajectories set success = 0")
    assert write_report(folder / "report.html", [SECTION], folder / "reward.png", folder, [], "x") == []
    assert "Where to go next" in (folder / "report.html").read_text(encoding="utf-8")
