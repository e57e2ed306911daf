"""A run of a small shop written into a store: text in its tokens, tools, users, evaluations, faults, a restart, and
hostile text in a tool's result; for tests, screenshots and timings of ``mua view``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from mua.store.blobs import pack_arrays, text_inserts
from mua.store.database import Store
from mua.store.tables import parts, requests, runs, scores, steps, tasks, tool_calls, uses, versions
from mua.store.trajectories import EpisodeKey, trajectory_inserts
from mua.store.writer import Insert, Write, execute
from mua.tokens.codec import Codec, content, fixed
from mua.types import Json, Outcome, Provenance, Segment, Trajectory
from workbench.tokenizer import train_tokenizer

KINDS = ("cancel", "refund", "refuse")
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
"""What a tool of the run answers; a page that takes it for markup sets ``window.hacked``."""
EVERY = 4
"""Steps between two evaluations."""
_BEGAN = 1_790_000_000.0
_HELD_OUT = 12
_ROOT = TemporaryDirectory(prefix="mua-shop-")


@cache
def shop_model() -> tuple[Path, Codec]:
    """A folder with a small tokenizer, gone with the process, and its codec."""
    folder = Path(_ROOT.name)
    said = "Hello, I want to cancel order 1000. Your order is done, answer 12345. Thank you, bye. And what else? "
    called = '<tool_call> {"name": "get_order"} für Zoë 🙂 '
    train_tokenizer([said, called] * 30, folder, family="qwen3", vocab_size=480)
    return folder, Codec(Tokenizer.from_file(str(folder / "tokenizer.json")), folder)


def write_shop(
    folder: Path, run: str = "shop-grpo", *, step_count: int = 12, groups: int = 4, size: int = 4, better: float = 0.0,
    seed: int = 0, turns: int = 2,
) -> Path:  # fmt: skip
    """A whole run in ``folder``: its store and its metrics. ``better`` is added to its chance of success."""
    folder.mkdir(parents=True, exist_ok=True)
    shop = _Shop(run, step_count, groups, size, better, seed, turns)
    with Store.open(folder) as store:
        with store.begin() as connection:
            execute(connection, shop.head(folder))
        for step in range(step_count):
            with store.begin() as connection:
                execute(connection, shop.step(step))
                if step % EVERY == 0:
                    execute(connection, shop.evaluation(step))
        with store.begin() as connection:
            execute(connection, shop.evaluation(step_count))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shop.lines))
    return folder


class _Shop:
    def __init__(self, run: str, step_count: int, groups: int, size: int, better: float, seed: int, turns: int) -> None:
        self.run, self.step_count, self.groups, self.size = run, step_count, groups, size
        self.better, self.turns = better, turns
        self.draw = np.random.default_rng(seed)
        self.lines: list[Json] = []
        self.round = 0
        self._codec = shop_model()[1]
        self._encoded: dict[tuple[str, Provenance, bool], tuple[np.ndarray, np.ndarray]] = {}

    def head(self, folder: Path) -> Iterator[Write]:
        config = {"model": {"path": str(shop_model()[0])}, "evaluation": {"level": 0.95}, "name": "shop"}
        yield Insert(runs, [{
            "id": self.run, "output": str(folder), "name": "shop", "state": "running", "started_at": _BEGAN,
            "config": config, "provenance": {"host": "node-1"},
        }])  # fmt: skip
        yield Insert(parts, [
            {"run_id": self.run, "part": 1, "from_step": 0, "started_at": _BEGAN, "host": "node-1", "pid": 4711},
            {"run_id": self.run, "part": 2, "from_step": self.step_count, "host": "node-2", "pid": 17,
             "started_at": _BEGAN + 60 * self.step_count},
        ])  # fmt: skip

    def step(self, step: int) -> Iterator[Write]:
        began = _BEGAN + 60 * step
        made: list[tuple[EpisodeKey, Trajectory]] = []
        for group in range(self.groups):
            ordinal = step * self.groups + group
            kind = KINDS[ordinal % len(KINDS)]
            yield self._task(0, ordinal, kind, f"shop/train/{ordinal % 40}", "train", began, step)
            for sample in range(self.size):
                key = EpisodeKey(self.run, 1, 0, ordinal, sample)
                made.append((key, self._played(key, kind, f"shop/train/{ordinal % 40}", step)))
                yield from self._rows(*made[-1], began + 1 + sample)
        rewards = [t.reward for _, t in made]
        self.lines.append(self._metrics(step, made))
        yield Insert(steps, [{
            "run_id": self.run, "step": step, "part": 1, "state": "done", "version": step, "started_at": began,
            "ended_at": began + 50, "metrics": {"rollout/reward/mean": float(np.mean(rewards))}, "gradient": "00ff" * 8,
        }])  # fmt: skip
        yield Insert(versions, [{
            "run_id": self.run, "version": step + 1, "part": 1, "synced_at": began + 55,
            "checkpoint": f"step_{step + 1:06d}" if step % EVERY == EVERY - 1 else None,
        }])  # fmt: skip
        yield Insert(uses, [
            row for position, (key, trajectory) in enumerate(made) if trajectory.scored
            for row in self._uses(key, trajectory, step, position, float(np.mean(rewards)))
        ])  # fmt: skip

    def evaluation(self, version: int) -> Iterator[Write]:
        self.round += 1
        at = _BEGAN + 60 * version - 5
        for ordinal in range(_HELD_OUT):
            kind, name = KINDS[ordinal % len(KINDS)], f"shop/validation/{ordinal}"
            yield self._task(self.round, ordinal, kind, name, "validation", at)
            key = EpisodeKey(self.run, 1, self.round, ordinal, 0)
            yield from self._rows(key, self._played(key, kind, name, version, fault=False), at)

    def _task(
        self, round_: int, ordinal: int, kind: str, name: str, split: str, at: float, step: int | None = None
    ) -> Insert:
        return Insert(tasks, [{
            "run_id": self.run, "round": round_, "ordinal": ordinal, "kind": "evaluation" if round_ else "train",
            "domain": "shop", "task_id": name, "size": 1 if round_ else self.size, "split": split,
            "state": "complete" if round_ else "taken", "made_at": at, "ended_at": at,
            "details": {"kind": kind, "difficulty": "easy"}, "taken_step": step,
        }])  # fmt: skip

    def _played(self, key: EpisodeKey, kind: str, task: str, version: int, *, fault: bool = True) -> Trajectory:
        draw = self.draw
        if fault and draw.random() < 0.02:
            return Trajectory(
                task, key.ordinal, key.sample, [], [], 0.0, False, Outcome.ENGINE_ERROR, domain="shop",
                error="engine 0 died while it generated", attempts=3, messages=[{"role": "user", "content": "hello"}],
            )  # fmt: skip
        chance = min(0.95, 0.2 + self.better + 0.6 * version / self.step_count)
        success = bool(draw.random() < chance)
        order = 1000 + key.ordinal
        wanted = {"cancel": "cancel order", "refund": "have the money back for order", "refuse": "return opened order"}
        messages: list[Json] = [
            {
                "role": "system",
                "content": "You are the shop's agent. Cancel and refund by the policy.",
            },
            {"role": "user", "content": f"Hello, I want to {wanted[kind]} {order}."},
        ]
        call = {"name": "get_order", "arguments": {"order": order}}
        result = HOSTILE if key.sample == 1 else f'{{"order": {order}, "status": "sent", "owner": "Zoë 🙂"}}'
        for turn in range(self.turns):
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [
                    {"id": f"call_{turn}", "type": "function",
                     "function": {"name": "get_order", "arguments": json.dumps(call["arguments"])}}]},
                {"role": "tool", "tool_call_id": f"call_{turn}", "content": result},
                {"role": "assistant", "content": f"Your order {order} is done, answer {draw.integers(10**6)}."},
                {"role": "user", "content": "Thank you, bye." if turn == self.turns - 1 else "And what else?"},
            ]  # fmt: skip
        details: Json = {"database": [], "unsaid": [], "untrue": [], "claims_true": 1}
        if not success:
            details["database"] = [f"orders {order}: is ('sent'), should be ('cancelled')"]
            details["unsaid"] = [f"order {order}: deed {kind}"]
        return Trajectory(
            task, key.ordinal, key.sample, [self._segment(messages, version)],
            [0.0] * (2 * self.turns - 1) + [float(success)], float(success), success, Outcome.USER_STOP, messages,
            {"prompt_tokens": 100.0, "seconds/episode": 3.5}, details, domain="shop",
        )  # fmt: skip

    def _segment(self, messages: list[Json], version: int) -> Segment:
        ids, owners, turns, turn = [], [], [], 0
        role_of = {"system": Provenance.SYSTEM, "user": Provenance.USER, "tool": Provenance.TOOL}
        for message in messages:
            sampled = message["role"] == "assistant"
            text = message["content"]
            if calls := message.get("tool_calls"):
                text += f"<tool_call>\n{json.dumps(calls[0]['function'])}\n</tool_call>"
            pieces = [(f"<|im_start|>{message['role']}\n", Provenance.TEMPLATE, True)]
            pieces.append((text, Provenance.SAMPLED if sampled else role_of[message["role"]], sampled))
            pieces.append(("<|im_end|>", Provenance.SAMPLED if sampled else Provenance.TEMPLATE, True))
            pieces.append(("\n", Provenance.TEMPLATE, True))
            for piece in pieces:
                new, own = self._tokens(*piece)
                ids.append(new)
                owners.append(own)
                turns.append(np.full(len(new), turn, np.int32))
            turn += sampled
        provenance = np.concatenate(owners).astype(np.uint8)
        mask = provenance == Provenance.SAMPLED
        count = len(mask)
        logprobs = np.where(mask, -self.draw.exponential(0.4, count), 0).astype(np.float32)
        return Segment(np.concatenate(ids).astype(np.int32), provenance, logprobs,
                       np.where(mask, version, -1).astype(np.int32), np.concatenate(turns))  # fmt: skip

    def _tokens(self, text: str, owner: Provenance, control: bool) -> tuple[np.ndarray, np.ndarray]:
        key = (text, owner, control)
        if key not in self._encoded:
            self._encoded[key] = self._codec.encode([(fixed if control else content)(text, owner)])
        return self._encoded[key]

    def _rows(self, key: EpisodeKey, trajectory: Trajectory, at: float) -> Iterator[Write]:
        name = {"trajectory_id": key.trajectory_id}
        yield from trajectory_inserts(key, trajectory, started_at=at - 3.5, ended_at=at, sampler="node-1")
        calls = [m for m in trajectory.messages if m.get("tool_calls")]
        results = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
        hashes, writes = text_inserts(results)
        yield from writes
        rows = [
            key.columns() | name | {
                "turn": 2 * number, "number": number, "name": call["tool_calls"][0]["function"]["name"],
                "arguments": call["tool_calls"][0]["function"]["arguments"], "result": hashes[number],
                "error": "no such order" if key.sample == 2 and number == 0 else None, "by_user": False,
                "started_at": at - 1, "seconds": 0.02, "reward": 0.0,
            }
            for number, call in enumerate(calls)
        ]  # fmt: skip
        if rows:
            yield Insert(tool_calls, rows)
        told = [{"role": "system", "content": "You play a customer."}, trajectory.messages[-1]]
        hashes, writes = text_inserts([*told, {"content": "bye"}])
        yield from writes
        policy: list[Json] = [
            {"role": "policy", "number": number, "turn": number, "endpoint": "engine 0", "segment": 0,
             "token_start": 3, "token_end": 6, "messages": None, "reply": None}
            for number in range(len(trajectory.turn_rewards))
        ]  # fmt: skip
        user: Json = {"role": "user", "number": 0, "turn": 1, "endpoint": "users", "segment": None, "token_start": None,
                "token_end": None, "messages": hashes[:2], "reply": hashes[2]}  # fmt: skip
        yield Insert(requests, [
            key.columns() | name | row | {"started_at": at - 2, "seconds": 0.3, "completion_tokens": 20}
            for row in [*policy, user]
        ])  # fmt: skip
        if trajectory.scored:
            yield Insert(scores, [name | {
                "scorer": "environment", "value": trajectory.reward, "details": {"success": trajectory.success},
            }])  # fmt: skip

    def _uses(self, key: EpisodeKey, trajectory: Trajectory, step: int, position: int, mean: float) -> Iterator[Json]:
        for number, segment in enumerate(trajectory.segments):
            mask = segment.loss_mask
            noise = self.draw.normal(0, 0.01, len(segment)).astype(np.float32)
            yield {
                "run_id": key.run_id, "step": step, "part": 1, "epoch": 0, "trajectory_id": key.trajectory_id,
                "segment": number, "minibatch": 0, "position": position, "tokens": int(mask.sum()),
                "arrays": pack_arrays({
                    "weights": np.where(mask, np.float32(1 / 4096), np.float32(0)),
                    "advantages": np.where(mask, np.float32(trajectory.reward - mean), np.float32(0)),
                    "old_logprobs": np.where(mask, segment.logprobs + noise, np.float32(0)),
                }),
            }  # fmt: skip

    def _metrics(self, step: int, made: list[tuple[EpisodeKey, Trajectory]]) -> Json:
        draw = self.draw
        return {
            "step": step, "rollout/reward/mean": float(np.mean([t.reward for _, t in made])),
            "rollout/success": float(np.mean([t.success for _, t in made])),
            "train/entropy": 2.0 - step / self.step_count,
            "train/grad_norm": float(1 + draw.random()), "train/train_rollout_kl": float(1e-4 * draw.random()),
            "rollout/response_len/mean": 40.0, "rollout/turns/mean": 4.0, "train/loss": 0.1,
            "time/wait_seconds": 20 + 5 * float(draw.random()), "time/optimizer_seconds": 15.0,
            "time/sync_seconds": 3.0, "time/rest_seconds": 1.0, "time/episode_generating_seconds": 2.0,
            "time/episode_tools_seconds": 0.4, "time/episode_user_seconds": 1.1,
            "engine/restarts": float(step >= self.step_count // 2),
        }  # fmt: skip
