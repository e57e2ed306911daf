"""Weights & Biases and MLflow get what a run logs, in a thread that training never waits for.

Against stand-ins of both packages that record their calls. Not covered: the services; that the real packages take these
calls was tried by hand (docs/metrics.md says with which versions).
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from mua.config.schema import ExperimentConfig
from mua.config.storage import MlflowConfig, WandbConfig
from mua.observe import metric_sinks
from mua.observe.metric_sinks import MetricSink, ServiceSink, service_sink
from mua.observe.metrics_log import MetricsWriter, hyperparameters
from mua.utils.errors import ConfigError


def logged(output: Path, sink: MetricSink) -> None:
    """What a short run logs."""
    with MetricsWriter(output, False, 0, [sink]) as writer:
        writer.log_hyperparameters({"seed": 1})
        writer.log_evaluation(0, {"eval/test_success": 0.25})
        writer.log(0, {"rollout/reward/mean": 0.5, "train/loss": float("nan")})
        writer.log_details(0, {"rollout/reward/histogram": np.array([0.0, 1.0])}, {"rollout/episodes/solved": "well"})


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package = MagicMock()
    package.Histogram = lambda samples: ("histogram", len(samples))
    package.Table = lambda columns, data: ("table", data)
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_weights_and_biases_gets_all_on_the_axis_of_steps(wandb: Any, tmp_path: Path) -> None:
    config = WandbConfig(project="p", mode="offline")
    logged(tmp_path, service_sink(config, "shop", tmp_path, "r"))
    run = wandb.init.return_value
    assert [call.args[0] for call in run.log.call_args_list] == [
        {"step": 0, "eval/test_success": 0.25},
        {"step": 0, "rollout/reward/mean": 0.5, "train/loss": pytest.approx(float("nan"), nan_ok=True)},
        {"step": 0, "rollout/reward/histogram": ("histogram", 2)},
        {"step": 0, "rollout/episodes/solved": ("table", [[0, "well"]])},
    ]
    run.define_metric.assert_any_call("*", step_metric="step")
    run.config.update.assert_called_once_with({"seed": 1}, allow_val_change=True)
    run.finish.assert_called_once()
    service_sink(config, "shop", tmp_path, "r").close()
    first, again = (call.kwargs for call in wandb.init.call_args_list)
    assert (first["id"], first["name"], first["mode"]) == (again["id"], "shop", "offline")


def test_mlflow_gets_all_and_a_run_that_goes_on_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = MagicMock()
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "r1"
    entities = types.SimpleNamespace(Metric=lambda key, value, when, step: (key, value, step))
    package = types.SimpleNamespace(MlflowClient=MagicMock(return_value=client))
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    config = MlflowConfig(experiment="e", tracking_uri="sqlite:///x")
    logged(tmp_path, service_sink(config, "shop", tmp_path, "r"))
    assert [call.kwargs["metrics"] for call in client.log_batch.call_args_list] == [
        [("eval/test_success", 0.25, 0)], [("rollout/reward/mean", 0.5, 0)]
    ]  # fmt: skip
    client.log_param.assert_called_once_with("r1", "seed", "1")
    client.log_text.assert_called_once_with("r1", "well", "rollout/episodes/solved/step_000000.txt")
    assert sum(client.log_dict.call_args.args[1]["rollout/reward/histogram"]["counts"]) == 2
    client.set_terminated.assert_called_once_with("r1", status="FINISHED")
    logged(tmp_path, service_sink(config, "shop", tmp_path, "r"))
    assert client.create_run.call_count == client.log_param.call_count == 1
    client.update_run.assert_called_once_with("r1", status="RUNNING")


@pytest.mark.parametrize("config", [WandbConfig(project="p"), MlflowConfig(experiment="e")])
def test_a_package_that_is_not_there_is_named(
    config: WandbConfig | MlflowConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = type(config).__name__.removesuffix("Config").lower()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"^observe.{name}: .*pip install {name}"):
        service_sink(config, "x", tmp_path, "r")


def test_a_service_that_fails_is_told_once_and_one_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away() -> MetricSink:
        raise ConnectionError("no route")

    monkeypatch.setattr(metric_sinks, "CLOSING_SECONDS", 0.2)
    monkeypatch.setattr(metric_sinks, "RETRY_SECONDS", (0.01, 0.05))
    logged(tmp_path, ServiceSink("wandb", away))
    assert caplog.text.count("observe.wandb: cannot be reached, it is tried again: ConnectionError: no route") == 1
    assert "wandb: 5 calls were dropped; the run's own files have everything" in caplog.text

    taken, refuses = [], MagicMock()

    def write(kind: str, *_: object) -> None:
        taken.append(kind)
        if kind == "scalars":
            raise ValueError("full")

    refuses.write.side_effect = write
    logged(tmp_path, ServiceSink("mlflow", lambda: refuses))
    assert caplog.text.count("observe.mlflow: did not take a call, and will not: ValueError: full") == 1
    assert taken.count("texts") == 1

    monkeypatch.setattr(metric_sinks, "QUEUED", 2)
    answers, hangs = threading.Event(), MagicMock()
    hangs.write.side_effect = lambda *_: answers.wait()
    sink = ServiceSink("wandb", lambda: hangs)
    for step in range(10):
        sink.write("scalars", step, {})
    sink.close()
    answers.set()
    assert "does not keep up" in caplog.text
    assert "did not take everything" in caplog.text
    assert "calls were dropped; the run's own files have everything" in caplog.text


def test_what_a_service_did_not_take_is_tried_again_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sinks, "RETRY_SECONDS", (0.01, 0.02))
    faults: Iterator[Exception | None] = iter(
        [OSError("no route"), None, ConnectionResetError(), TimeoutError(), None, ValueError("never"), None]
    )
    tried: list[tuple[int, float | None]] = []
    taken: list[tuple[int, float | None]] = []

    def write(kind: str, step: int, values: Any, at: float | None = None) -> None:
        tried.append((step, at))
        if (fault := next(faults)) is not None:
            raise fault
        taken.append((step, at))

    service = MagicMock()
    service.write.side_effect = write
    starts = iter([OSError("asleep"), service])

    def make() -> MetricSink:
        if isinstance(found := next(starts), Exception):
            raise found
        return found

    sink = ServiceSink("mlflow", make)
    for step in range(4):
        sink.write("scalars", step, {"a": 1.0})
    sink.close()
    assert [step for step, _ in tried] == [0, 0, 1, 1, 1, 2, 3]
    assert [step for step, _ in taken] == [0, 1, 3]
    assert len({at for step, at in tried if step == 1}) == 1, "a call has one time, however often it is made"
    service.close.assert_called_once_with("finished")


def test_a_run_that_cannot_begin_online_is_kept_for_later(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb.init.side_effect = [RuntimeError("no key"), MagicMock()]
    logged(tmp_path, service_sink(WandbConfig(project="p"), "x", tmp_path, "r"))
    assert [call.kwargs["mode"] for call in wandb.init.call_args_list] == ["online", "offline"]
    assert f"RuntimeError: no key): it is written to {tmp_path / 'wandb'}" in caplog.text
    wandb.init.reset_mock(side_effect=True)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    service_sink(WandbConfig(project="p"), "x", tmp_path, "r").close()
    assert wandb.init.call_args.kwargs["mode"] == "disabled"


def test_hyperparameters_are_flat_and_masked() -> None:
    config = ExperimentConfig.model_validate(
        {
            "name": "x", "output": "out", "model": {"path": "m"}, "environment": {"name": "help_desk"},
            "trainer": {"steps": 3}, "store": {"url": "postgresql://u:hush@host/db"},
            "judge": {"llm": {"base_url": "http://j", "model": "j", "api_key": "hush"}},
        }
    )  # fmt: skip
    found = hyperparameters(config)
    assert (found["trainer.steps"], found["model.path"], found["environment.name"]) == (3, "m", "help_desk")
    assert "optimizer.learning_rate" in found
    assert "rollout.max_turns" not in found
    assert "hush" not in str(found)
