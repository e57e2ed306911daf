"""The Python API as docs/python_api.md shows it, whose code runs here; and that ``import mua`` stays light.

The run is one that tests/store_support.py writes, and an endpoint plays the policy: a checkpoint's engine is tested by
tests/e2e/test_evaluation.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mua
from mua.store.database import Store
from mua.store.faults import StoreError
from mua.utils.errors import ConfigError, MuaError
from tests.chat_fixtures import chat_server_beside
from tests.clerks import clerk
from tests.store_support import GROUP, STEPS, write_run

PAGE = Path(__file__).parents[2] / "docs/python_api.md"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run in it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/shop"
    folder.mkdir(parents=True)
    with Store.open(folder / "store.sqlite") as store:
        write_run(store)
    lines = [{"step": step, "rollout/reward/mean": step / 4} for step in range(STEPS)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


async def test_the_page_runs_in_a_notebook(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a running event loop, as a notebook's cells are."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    with chat_server_beside(clerk) as server:
        endpoint = {"kind": "endpoint", "endpoint": {"base_url": server.base_url, "model": "clerk"}}
        config = {"name": "shop", "output": "out", "environment": {"name": "help_desk", "prompt": "short"},
                  "evaluation": {"split": "test", "outputs": ["json"], "resamples": 200, "policy": endpoint},
                  "observe": {"progress": False}}  # fmt: skip
        (tmp_path / "shop.yaml").write_text(json.dumps(config))
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), names)
    said = capsys.readouterr().out
    assert len(blocks) == 5
    assert "16 models/Qwen3-8B" in said
    assert "{0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75}" in said
    assert "trained on" in said  # of the trajectory that is shown
    assert json.loads((tmp_path / "out/evaluation.json").read_text())["tasks"] == 6
    assert names["result"] == json.loads((tmp_path / "out/evaluation.json").read_text())


def test_trajectories_are_a_sequence_under_a_filter(shop: Path) -> None:
    with mua.open_run(shop) as run:
        every = run.trajectories
        assert (len(every), len(list(every)), len(every.ids())) == (STEPS * GROUP,) * 3
        failed = every.where(success=False)
        assert [one.success for one in failed] == [False] * STEPS
        assert len(failed.where(step=1)) == 1
        assert [one.ordinal for one in failed[1:3]] == [failed[1].ordinal, failed[2].ordinal]
        assert failed[-1].task_id == failed[failed.ids()[-1]].task_id
        with pytest.raises(KeyError):
            failed[every.where(success=True).ids()[0]]
        with pytest.raises(TypeError, match="color"):
            every.where(color="red")
        with pytest.raises(TypeError, match="open_run"):
            every.where(run="other")
        assert {"id", "outcome", "reward"} <= every.rows(limit=1)[0].keys()
        assert repr(failed) == f"<{STEPS} trajectories: run r, success False>"


def test_what_is_not_there_is_named(shop: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        mua.open_run(tmp_path / "gone")
    with Store.open(shop / "store.sqlite") as store:
        write_run(store, "second")
    with pytest.raises(MuaError, match="2 runs; name one"):
        mua.open_run(shop)
    with mua.open_run(shop, run="second") as run:
        assert run.id == "second"
    with pytest.raises(ConfigError, match=r"trainer\.stepps"):
        mua.load_config("demo", {"trainer.stepps": 3})
    config = mua.load_config("demo", {"model.path": tmp_path, "environment.difficulties": ["easy"], "sft": None})
    assert (config.model.path, config.environment.difficulties) == (tmp_path, ["easy"])
    with pytest.raises(TypeError, match="overrides"):
        mua.evaluate(config, {"evaluation.tasks": 1})
    with pytest.raises(AttributeError, match="nothing"):
        mua.nothing  # noqa: B018 - what a mistyped name does


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, mua; assert 'open_run' in dir(mua); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded.isdisjoint({"torch", "numpy", "sqlalchemy", "pydantic", "yaml", "transformers", "sglang"})
    code = "import sys, mua; mua.load_config; mua.open_run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "sglang", "megatron"}.isdisjoint(name.partition(".")[0] for name in done.stdout.split())
