"""Whether stored token ids mean to a policy what they meant to the one that sampled them."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import JsonError, read_file, read_json

FILE = "tokenizer.json"
log = logging.getLogger(__name__)


def tokenizer_digest(folder: Path) -> str | None:
    """32 hexadecimal digits of what a model folder's ids stand for: vocabulary, merges, added tokens.

    None where there is no ``tokenizer.json`` that can be read. Templates and settings do not count.
    """
    try:
        found = read_json(read_file(folder / FILE), strict=False)
        model, added = found["model"], found.get("added_tokens", [])
        what = [model.get("type"), sorted(_vocabulary(model["vocab"])), model.get("merges"),
                sorted((token["id"], token["content"]) for token in added)]  # fmt: skip
    except (OSError, JsonError, KeyError, TypeError, AttributeError):
        return None
    return hashlib.blake2b(json.dumps(what).encode(), digest_size=16).hexdigest()


def check_recorded_tokenizer(model: Path, run: Json) -> None:
    """Compare the tokenizer of the folder ``model`` with that of a recorded run.

    ``run`` has ``id``, ``config`` and ``provenance`` as the store does; the digest is in the last of these, or the
    folder in the second is still there. Where neither is, a warning is logged. Raises :class:`ConfigError` where they
    differ.
    """
    recorded, where = run["provenance"].get("tokenizer"), run["config"].get("model", {}).get("path")
    if recorded is None and where is not None:
        recorded = tokenizer_digest(Path(where))
    if recorded is None:
        log.warning("run %s: nothing tells which tokenizer its tokens are of; that of %s is assumed", run["id"], model)
    elif recorded != tokenizer_digest(model):
        raise ConfigError(
            f"model.path: {model} has another tokenizer than the policy of run {run['id']}"
            f"{'' if where is None else f' ({where})'}, and stored token ids mean something else to it; take a policy "
            "with the same tokenizer"
        )


def _vocabulary(vocab: object) -> list[tuple[int, str]]:
    """As id and token, of the forms that a vocabulary is written in (BPE and WordPiece: a table; Unigram: a list)."""
    if isinstance(vocab, dict):
        return [(number, token) for token, number in vocab.items()]
    assert isinstance(vocab, list)
    return [(number, entry[0]) for number, entry in enumerate(vocab)]
