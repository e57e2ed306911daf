"""Training on what a store holds: which groups and episodes, in which steps, and runs of a tiny policy on Megatron.

Every store is a real one that this file writes. Not here: the stores that runs write, a teacher that is asked, and how
much a policy learns from its successes (docs/store.md has figures).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from mua.config.schema import ExperimentConfig, RolloutConfig
from mua.config.storage import StoredDemonstrations, StoredSource
from mua.observe.metrics_log import read_metrics
from mua.store.database import Store
from mua.store.stored_groups import demonstrations, stored_groups
from mua.store.tables import parts
from mua.store.trajectories import EpisodeKey, trajectory_inserts
from mua.store.writer import Insert, execute
from mua.tokens.chat_family import load_family
from mua.tokens.codec import tokenizer_digest
from mua.trainer.conversations import load_sets
from mua.trainer.from_store import train_offline, use_schedule
from mua.trainer.sft import fine_tune
from mua.utils.errors import ConfigError, EngineError, Preempted
from tests.store_support import played, spoil, write_run
from tests.tokens_fixtures import write_tokenizer
from tests.unit.test_trainer_sft_run import LeavingAt

STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("policy") / "model", "qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), initializer_range=0.2, **shape, **heads)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        write_run(opened, steps_done=STEPS)
        spoil(opened, "UPDATE runs SET provenance = ?", json.dumps({"tokenizer": tokenizer_digest(model)}))
        yield opened


def config(model: Path, output: Path, **sections: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "stored",
            "output": str(output),
            "model": {"path": str(model), "dtype": "float32", "max_length": 128},
            "environment": {"name": "help_desk"},
            "rollout": {"max_tokens": 64},
            "megatron": {"max_tokens_per_microbatch": 128, "threads": 1},
            "optimizer": {"learning_rate": 1e-2},
            "observe": {"tensorboard": False, "progress": False},
            "algorithm": {"group_size": 2, "groups_per_step": 2, "correction": "truncate"}
            | sections.pop("algorithm", {}),
            "trainer": {"steps": 4, "save_every": 2} | sections.pop("trainer", {}),
        }
        | sections
    )


# ---- which step trains on which group


@given(
    groups=st.integers(1, 12), per_step=st.integers(1, 5), max_uses=st.integers(1, 4), apart=st.integers(1, 5),
    steps=st.integers(1, 12), seed=st.integers(0, 3),
)  # fmt: skip
def test_schedule_keeps_its_bounds_and_is_fair(
    groups: int, per_step: int, max_uses: int, apart: int, steps: int, seed: int
) -> None:
    try:
        found = use_schedule(groups, per_step, steps, max_uses, apart, seed)
    except ConfigError as error:
        possible = int(str(error).split(" are enough for ")[1].split()[0])
        assert possible < steps
        found = use_schedule(groups, per_step, possible, max_uses, apart, seed)
    else:
        assert len(found) == steps
    uses: dict[int, list[int]] = {}
    for step, chosen in enumerate(found):
        assert len(set(chosen)) == per_step
        waiting = {
            g for g in range(groups) if step - uses.get(g, [-99])[-1] >= apart and len(uses.get(g, [])) < max_uses
        }
        assert set(chosen) <= waiting
        left_out = waiting - set(chosen)
        for group in chosen:
            assert all(len(uses.get(group, [])) <= len(uses.get(other, [])) for other in left_out), (
                "the least used first"
            )
        for group in chosen:
            uses.setdefault(group, []).append(step)
    assert found == use_schedule(groups, per_step, len(found), max_uses, apart, seed)


# ---- which groups and episodes


def groups_of(
    store: Store,
    temperature: float = 1.0,
    until: float | None = None,
    *,
    allow_truncated_sampling: bool = False,
    **source: Any,
) -> list[tuple[str, ...]]:
    with store.read() as connection:
        asked = StoredSource(store="unused", **source)
        rollout = RolloutConfig(temperature=temperature, allow_truncated_sampling=allow_truncated_sampling)
        found, _ = stored_groups(connection, asked, rollout=rollout, until=until)
        for group in found:
            whole = group.read(connection)
            assert [t.sample for t in whole.trajectories] == [0, 1]
            assert {t.ordinal for t in whole.trajectories} == {group.ordinal}
        return [tuple(key.trajectory_id for key in group.members) for group in found]


def test_only_whole_groups_are_trained_on(store: Store) -> None:
    every = [(f"r/1/0/{n}/0/1", f"r/1/0/{n}/1/1") for n in range(STEPS)]
    assert groups_of(store) == every
    spoil(store, "UPDATE tasks SET state = 'cancelled' WHERE ordinal = 0")
    spoil(store, "UPDATE tasks SET size = 3 WHERE ordinal = 1")
    spoil(store, "UPDATE trajectories SET pruned = 'arrays' WHERE id = 'r/1/0/2/0/1'")
    assert groups_of(store) == every[3:]
    assert groups_of(store, min_version=4) == every[4:]
    assert groups_of(store, until=2.0 + 4) == every[3:5]
    assert groups_of(store, domains=["retail"]) == []
    spoil(store, "UPDATE trajectories SET sampling = ?", json.dumps({"temperature": 0.7}))
    assert groups_of(store, temperature=0.7) == every[3:]
    with pytest.raises(ConfigError, match=r"rollout.temperature: 1, and trajectory r/1/0/3/0/1 was sampled at 0.7"):
        groups_of(store)
    spoil(store, "UPDATE trajectories SET sampling = ?", json.dumps({"temperature": 1.0, "min_p": 0.1}))
    with pytest.raises(
        ConfigError, match=r"allow_truncated_sampling: trajectory r/1/0/3/0/1 was sampled with min_p 0.1"
    ):
        groups_of(store)
    assert groups_of(store, allow_truncated_sampling=True) == every[3:]


def test_what_was_played_again_counts_once(store: Store) -> None:
    again = EpisodeKey("r", 2, 0, 5, 1)
    with store.begin() as connection:
        execute(connection, [Insert(parts, [{"run_id": "r", "part": 2, "from_step": 5, "started_at": 9.0}])])
        execute(connection, trajectory_inserts(again, played(5, 1, 5, success=True), ended_at=9.0))
        found = [name for name, _ in demonstrations(connection, StoredDemonstrations(store="x"))]
    assert groups_of(store)[-1] == ("r/1/0/5/0/1", "r/2/0/5/1/1")
    assert found == [*(f"r/1/0/{n}/1/1" for n in range(5)), "r/2/0/5/1/1"]


def test_demonstrations_by_their_conditions(store: Store) -> None:
    evaluation = EpisodeKey("r", 1, 1, 0, 0)
    with store.begin() as connection:
        execute(connection, trajectory_inserts(evaluation, played(0, 0, 3, success=True), ended_at=9.0))

        def count(**conditions: Any) -> int:
            return len(list(demonstrations(connection, StoredDemonstrations(store="x", **conditions))))

        assert count() == STEPS
        assert count(success=False) == 2 * STEPS
        assert count(success=False, min_reward=0.5) == STEPS
        assert count(evaluations=True) == STEPS + 1
        assert count(max_per_task=1) == 3
        assert count(min_version=2) == STEPS - 2
        assert count(domains=["retail"]) == 0


# ---- supervised


def test_stored_tokens_are_imitated_as_they_are(store: Store, model: Path, tmp_path: Path) -> None:
    def sets(**sft: Any) -> Any:
        loaded = config(model, tmp_path / "sft", sft={"stored": {"store": str(tmp_path)}} | sft)
        return load_sets(loaded, load_family(model, thinking=False))

    training, held_out = sets(validation=0.3)
    assert (len(training), len(held_out)) == (4, 2)
    (training, _) = sets()
    for n, (segment,) in enumerate(training):
        original = played(n, 1, n, success=True).segments[0]
        assert np.array_equal(segment.ids, original.ids)
        assert np.array_equal(segment.loss_mask, original.loss_mask)
    (last, _) = sets(train_on="last")
    for (segment,), (whole,) in zip(last, training, strict=True):
        assert np.array_equal(segment.loss_mask, whole.loss_mask & (whole.turn == 1))
    with pytest.raises(ConfigError, match="holds no episode"):
        sets(stored={"store": str(tmp_path), "min_reward": 2.0})
    spoil(store, "UPDATE runs SET provenance = ?", json.dumps({"tokenizer": "another"}))
    with pytest.raises(ConfigError, match="another tokenizer than the policy of run r"):
        sets()
    spoil(store, "UPDATE runs SET provenance = NULL, config = ?", json.dumps({"model": {"path": str(model)}}))
    assert len(sets()[0]) == STEPS
    long = replace(played(9, 0, 9, success=True, length=200))
    with store.begin() as connection:
        execute(connection, trajectory_inserts(EpisodeKey("r", 1, 0, 9, 0), long, ended_at=9.0))
    with pytest.raises(ConfigError, match=r"200 tokens exceed model\.max_length 128"):
        sets()
    assert len(sets(overlong="skip")[0]) == STEPS
    with pytest.raises(ValueError, match="either data, a file of conversations, or stored"):
        sets(data="conversations.jsonl")


def test_fine_tuning_learns_stored_successes(store: Store, model: Path, tmp_path: Path) -> None:
    sft = {"stored": {"store": str(tmp_path)}, "batch_size": 6, "validation": 0.2, "validate_every": 1}
    fine_tune(config(model, tmp_path / "sft", sft=sft, trainer={"steps": 8}))
    losses = [line["train/loss"] for line in read_metrics(tmp_path / "sft" / "metrics.jsonl")]
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "sft" / "hf" / "config.json").exists()


# ---- reinforcement learning


def lines(output: Path) -> list[dict[str, float]]:
    timed = ("seconds", "memory/")
    found = read_metrics(output / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not any(word in name for word in timed)} for line in found]


@pytest.mark.slow
def test_offline_run_leaves_and_continues_to_the_same_numbers(store: Store, model: Path, tmp_path: Path) -> None:
    offline = {"store": str(tmp_path), "max_uses": 2, "apart": 2}
    straight, broken = (config(model, tmp_path / name, offline=offline) for name in ("straight", "broken"))
    train_offline(straight)
    whole = lines(straight.output)
    assert [line["step"] for line in whole] == [0, 1, 2, 3]
    assert all(line["train/grad_norm"] > 0 for line in whole)
    assert {line["rollout/reward/mean"] for line in whole} == {0.5}
    assert all(line["rollout/off_policy_level/mean"] > line["step"] for line in whole), (
        "no token is younger than the newest stored"
    )
    with pytest.raises(Preempted):
        train_offline(broken, LeavingAt(3))
    with store.begin() as connection:  # what the store gets meanwhile is no part of the run
        for sample in range(2):
            key, later = EpisodeKey("r", 1, 0, 9, sample), played(9, sample, 9, success=sample == 1)
            execute(connection, trajectory_inserts(key, later, ended_at=99.0))
    train_offline(broken)
    assert lines(broken.output) == whole
    other = config(model, broken.output, offline=offline | {"min_version": 1}, trainer={"steps": 5})
    with pytest.raises(ConfigError, match="not those that this run began with"):
        train_offline(other)
    with pytest.raises(ConfigError, match=r"7 groups, each used at most 1 times .* enough for 3 steps"):
        train_offline(config(model, tmp_path / "few", offline={"store": str(tmp_path)}))


@pytest.mark.slow
def test_recorded_teacher_or_an_error(model: Path, tmp_path: Path) -> None:
    distillation = {"base_url": "http://127.0.0.1:1", "only": True}
    algorithm = {"advantage": "none", "distillation": distillation}
    asked = config(
        model, tmp_path / "out", algorithm=algorithm, trainer={"steps": 1},
        offline={"store": str(tmp_path), "recorded_teacher": True},
    )  # fmt: skip
    with Store.open(tmp_path) as store:
        write_run(store, steps_done=2)
        with pytest.raises(ConfigError, match="no teacher's log-probabilities were stored of group"):
            train_offline(asked)
        algorithm["distillation"] = distillation | {"max_retries": 0}
        silent = config(
            model, tmp_path / "silent", algorithm=algorithm, offline={"store": str(tmp_path), "max_uses": 9}
        )
        with pytest.raises(EngineError, match=r"the teacher at http://127\.0\.0\.1:1"):
            train_offline(silent)
    taught = tmp_path / "taught"
    taught.mkdir()
    with Store.open(taught) as store, store.begin() as connection:
        execute(connection, [Insert(parts.metadata.tables["runs"], [_RUN])])
        for ordinal in range(2):
            for sample in range(2):
                whole = played(ordinal, sample, 0, success=False)
                (segment,) = whole.segments
                told = np.where(segment.loss_mask, np.float32(-0.5), np.float32(0))
                whole.segments = [replace(segment, teacher_logprobs=told)]
                key = EpisodeKey("r", 1, 0, ordinal, sample)
                execute(connection, trajectory_inserts(key, whole, ended_at=1.0))
    offline = {"store": str(taught), "recorded_teacher": True, "max_uses": 6}
    train_offline(config(model, taught / "out", algorithm=algorithm, trainer={"steps": 6}, offline=offline))
    found = [line["train/opd_reverse_kl"] for line in read_metrics(taught / "out" / "metrics.jsonl")]
    # The estimate is taken on fixed samples, where rising towards the teacher's -0.5 is what pulling closer looks like.
    assert found[-1] > found[0]


_RUN = {"id": "r", "output": "", "state": "done", "started_at": 0.0}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"correction": "none"}}, "no gradient depends on how they sampled it"),
        ({"trainer": {"steps": 4, "evaluate_every": 1}}, "trainer.evaluate_every needs engines"),
        (
            {"algorithm": {"correction": "truncate", "refill": {"max_extra_groups": 1}}},
            "algorithm.refill needs engines",
        ),
        ({"offline": {"store": "x", "recorded_teacher": True}}, "needs the section algorithm.distillation"),
    ],
)
def test_configurations_that_cannot_be_meant(model: Path, tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(model, tmp_path, **({"offline": {"store": "x"}} | sections))


def test_every_group_is_trained_so_often_and_no_more(store: Store, model: Path, tmp_path: Path) -> None:
    from mua.trainer.from_store import StoredBatches

    loaded = config(model, tmp_path / "out", offline={"store": str(tmp_path), "max_uses": 2}, trainer={"steps": 6})
    with StoredBatches(loaded) as batches:
        counted = Counter(group.ordinal for step in range(6) for group in batches.read(step))
    assert counted == dict.fromkeys(range(STEPS), 2)
