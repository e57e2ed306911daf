"""Make the base policy of the demonstration, ``tools/base``: a tokenizer and two million weights.

What every published language model brings along, keeping to the form of a conversation and copying what was said to
where it is needed, a policy of this size learns from conversations about nothing (:mod:`tools.nothing`); then
``make demo`` can begin where post-training begins. No rule or tool of a domain is in what it reads; its tokenizer has
seen the help desk's sentences, and it has read the words of the shop, as any language model has, in other meanings.
The weights in the repository were made by this command with ``megatron.threads=2``, 32 minutes on two cores.

    python -m tools.pretrain [--steps 1800] [--folder tools/base]
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from environments.kit.demonstrate import write_conversations
from mua.types import Json
from tools import kit
from tools.nothing import STATES, conversations
from tools.tiny import build_policy
from workbench.commands import mua, say

BASE = Path(__file__).parent / "base"
CONFIG = "configs/demo-base.yaml"
BATCH = 32
VOCABULARY = 896
_READ = 600
"""Conversations of each kind that the tokenizer is trained on."""


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--folder", type=Path, default=BASE)
    parser.add_argument("overrides", nargs="*", help=f"overrides of {CONFIG}, key=value")
    arguments = parser.parse_args()
    work = Path("runs/base")
    shutil.rmtree(work, ignore_errors=True)
    say("a tokenizer, random weights, conversations about nothing")
    build_policy(work / "init", [*_shop(), *conversations(_READ, 2)], 1, VOCABULARY, apart=STATES)
    write_conversations(work / "nothing.jsonl", conversations(arguments.steps * BATCH, 1))
    say(f"{arguments.steps} steps on {arguments.steps * BATCH:,} of them")
    where = [f"model.path={work}/init", f"sft.data={work}/nothing.jsonl", f"output={work}/sft"]
    mua("sft", CONFIG, *where, f"trainer.steps={arguments.steps}", *arguments.overrides)
    _keep(work / "sft" / "hf", arguments.folder)


def _keep(policy: Path, folder: Path) -> None:
    """The policy with its tokenizer, in bfloat16: half the bytes for the repository."""
    import torch
    from transformers import AutoModelForCausalLM

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(policy, folder, ignore=shutil.ignore_patterns("*.safetensors", "checksums.jsonl"))
    AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(folder)


def _shop() -> Iterator[list[Json]]:
    """What is said at the help desk, without numbers, so that these stay single digits."""
    from environments.help_desk.demonstrations import demonstrations

    for messages in demonstrations(_READ, 2, "You are the help desk.", ["brief"]):
        yield json.loads(re.sub(r"\b\d{4}\b", "", json.dumps(messages)))


if __name__ == "__main__":
    main()
