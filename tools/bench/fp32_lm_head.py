"""How far engine and trainer are apart in a bfloat16 policy, with the output layer in bfloat16 and in float32.

    python -m tools.bench.fp32_lm_head [--prompts 48]

SGLang samples from a random Qwen3 (4 layers, hidden size 256, vocabulary 32,000), the trainer scores what it sampled:
each output layer of the one against each of the other. Two policies: one as drawn, and one whose logits all have about
20 in common, as a trained model's may; a softmax does not see that, but bfloat16 rounds the logits of it to eighths.
Both run on the CPU, whose kernels round elsewhere than a GPU's. One JSON object; differences are of log-probabilities,
in nats, over all sampled tokens.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tools import kit

VOCAB, NEW_TOKENS = 32000, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "initializer_range": 0.1, "eos_token_id": 2, "bos_token_id": None,
}  # fmt: skip


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=48)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for policy, offset in (("as drawn", 0.0), ("with an offset", 30.0)):
            folder = Path(temporary) / policy
            write_policy(folder, offset)
            for engine in (False, True):
                sampled = asyncio.run(sample(folder, options.prompts, engine, Path(temporary)))
                for trainer in (False, True):
                    name = f"{policy}: engine {_name(engine)}, trainer {_name(trainer)}"
                    found[name] = apart(folder, sampled, trainer)
    print(json.dumps({"machine": kit.machine(), "tokens": options.prompts * NEW_TOKENS, "apart": found}, indent=2))


def write_policy(folder: Path, offset: float) -> None:
    """A random model. With ``offset`` all embeddings have a direction in common, which the output layer adds to every
    logit: as the hidden states have other parts too, somewhat less of it."""
    import torch

    model = kit.random_qwen3(folder, 0, **SHAPE)
    with torch.no_grad():
        direction = torch.nn.functional.normalize(torch.randn(SHAPE["hidden_size"]), dim=0)
        size = model.model.embed_tokens.weight.norm(dim=1).mean() * 20
        model.model.embed_tokens.weight += (size if offset else 0.0) * direction
        model.lm_head.weight += offset / SHAPE["hidden_size"] ** 0.5 * direction
    model.save_pretrained(folder)


def _name(fp32: bool) -> str:
    return "float32" if fp32 else "bfloat16"


async def sample(folder: Path, prompts: int, fp32: bool, logs: Path) -> list[tuple[list[int], Any]]:
    """Prompts and what the engine says to them."""
    from mua.config.schema import EngineConfig
    from mua.engine import SamplingParams
    from mua.engine.pool import EnginePool

    random = np.random.default_rng(0)
    asked = [random.integers(5, VOCAB, 24).tolist() for _ in range(prompts)]
    config = EngineConfig(memory_fraction=0.4, max_total_tokens=16384, max_running_requests=prompts)
    made = EnginePool(config, dtype="bfloat16", context_length=512, seed=1, log_folder=logs, fp32_lm_head=fp32)
    async with made as pool:
        await pool.start(folder)
        work = [
            pool.generate(prompt, SamplingParams(1.0, NEW_TOKENS, ()), session=str(index), deadline_s=300)
            for index, prompt in enumerate(asked)
        ]
        return list(zip(asked, await asyncio.gather(*work), strict=True))


def apart(folder: Path, sampled: list[tuple[list[int], Any]], fp32: bool) -> dict[str, float]:
    """Mean and largest absolute difference of the engine's log-probabilities from the trainer's."""
    from mua.types import TrainSequence

    sequences = []
    for prompt, said in sampled:
        ids = np.array([*prompt, *said.ids], dtype=np.int32)
        zeros = np.zeros(len(ids), dtype=np.float32)
        sequences.append(TrainSequence(ids, zeros, zeros, zeros, zeros))
    with kit.bare_learner(folder, 512, dtype="bfloat16", fp32_lm_head=fp32) as learner:
        scored = learner.log_probabilities(sequences, 1.0)
    differences = np.concatenate(
        [np.abs(own[len(prompt) :] - said.logprobs) for (prompt, said), own in zip(sampled, scored, strict=True)]
    )
    return {
        "mean": float(differences.mean()),
        "99th percentile": float(np.quantile(differences, 0.99)),
        "max": float(differences.max()),
        "mean log-probability": float(np.mean([said.logprobs.mean() for _, said in sampled])),
    }


if __name__ == "__main__":
    main()
