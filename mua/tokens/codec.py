"""From spans of text to token ids with provenance, and back.

A chat template's own text (:func:`fixed`) may hold control tokens; everything else (:func:`content`) may not.
Neighboring spans between two control tokens are encoded as one text, because byte-level BPE merges across
their joint: ``"user\n" + "\nhello"`` holds one token ``"\n\n"``, and encoding the two parts alone would give ids
that no full render gives. Who a token belongs to is read from its character offsets; a token that spans content
and template belongs to the content.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mua.types import Int32Array, Json, Provenance, UInt8Array
from mua.utils.errors import ConfigError, ModelError, MuaError
from mua.utils.strict_json import JsonError, read_file, read_json, unpaired_surrogate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REMEMBERED_CHARACTERS = 1000
"""Texts from this length on are encoded once and remembered: instructions and tool schemas, with which every episode of
a domain begins. Encoding them took more of the rollout loop's time than all else. So are the template's own texts,
which stand around every message."""


class ConversationError(MuaError):
    """A message that cannot be rendered: a wrong role or order, or text that UTF-8 cannot hold."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A stretch of rendered text. Control tokens are recognized in it only if it is ``fixed``."""

    text: str
    provenance: Provenance
    fixed: bool


def fixed(text: str, provenance: Provenance = Provenance.TEMPLATE) -> TextSpan:
    """Text of the chat template itself; control tokens in it are control tokens."""
    return TextSpan(text, provenance, True)


def content(text: str, provenance: Provenance) -> TextSpan:
    """Text somebody else wrote; control tokens spelt out in it stay plain text."""
    return TextSpan(text, provenance, False)


def plain_text(spans: Iterable[TextSpan]) -> str:
    """The rendered text of the spans."""
    return "".join(span.text for span in spans)


class Codec:
    """A fast tokenizer and its twin that knows no control tokens.

    The twin is what makes ``<|im_end|>`` in a user's text harmless. transformers' ``split_special_tokens`` is
    not enough: it leaves the added tokens that are not marked special (``<tool_call>``, ``<think>``) alone.
    """

    def __init__(self, backend: Tokenizer, source: Path | str) -> None:
        """Wrap ``backend``; ``source`` is named in errors.

        Raises:
            ModelError: a control token swallows its neighbors' whitespace, is normalized, or can be produced
                by plain text.
        """
        from tokenizers import Tokenizer

        specification: dict[str, Any] = json.loads(backend.to_str())
        added = specification["added_tokens"]
        for token in added:
            if any(token[flag] for flag in ("lstrip", "rstrip", "single_word", "normalized")):
                raise ModelError(
                    f"{source}: added token {token['content']!r} strips or normalizes its surroundings, so messages "
                    "cannot be encoded one at a time; set lstrip, rstrip, single_word and normalized to false"
                )
        specification["added_tokens"] = []
        # A post-processor only adds begin/end tokens or trims offsets: neither may happen inside a conversation.
        specification["post_processor"] = None
        self._backend = backend
        self._plain = Tokenizer.from_str(json.dumps(specification))
        self.control: dict[str, int] = {token["content"]: int(token["id"]) for token in added}
        longest_first = sorted(self.control, key=len, reverse=True)
        control_tokens = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

        @lru_cache(maxsize=1024)
        def split_fixed(span: TextSpan) -> list[TextSpan | int]:
            """The text between control tokens, and the ids of these."""
            # An odd position of re.split with one group is a match of the group: a control token.
            texts = enumerate(control_tokens.split(span.text))
            return [
                self.control[text] if at % 2 else TextSpan(text, span.provenance, True) for at, text in texts if text
            ]

        self._parts = split_fixed
        self._remembered = lru_cache(maxsize=1024)(self._encoded)
        control_ids = set(self.control.values())
        for text in self.control:
            if control_ids.intersection(self._plain.encode(text, add_special_tokens=False).ids):
                raise ModelError(
                    f"{source}: the tokenizer's own merges spell the control token {text!r}, so text from users and "
                    "tools could forge it; train the tokenizer without control tokens in its vocabulary"
                )

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, control tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, spans: Iterable[TextSpan]) -> tuple[Int32Array, UInt8Array]:
        """Ids and provenance of the spans, each ``[T]``.

        Raises:
            ConversationError: a span holds an unpaired surrogate, which UTF-8 cannot express.
        """
        ids, owners = array("i"), bytearray()
        run: list[TextSpan] = []
        for span in spans:
            for part in self._parts(span) if span.fixed else [span]:
                if not isinstance(part, int):
                    run += [part] if part.text else []
                else:
                    self._encode_run(run, ids, owners)
                    run = []
                    ids.append(part)
                    owners.append(span.provenance)
        self._encode_run(run, ids, owners)
        return np.frombuffer(ids, dtype=np.int32), np.frombuffer(owners, dtype=np.uint8)

    def _encode_run(self, run: Sequence[TextSpan], ids: array[int], owners: bytearray) -> None:
        if not run:
            return
        again = all(span.fixed for span in run) or sum(len(span.text) for span in run) >= REMEMBERED_CHARACTERS
        run_ids, run_owners = (self._remembered if again else self._encoded)(tuple(run))
        ids.extend(run_ids)
        owners.extend(run_owners)

    def _encoded(self, run: tuple[TextSpan, ...]) -> tuple[array[int], bytes]:
        """Ids and provenance of what stands between two control tokens: a function of ``run`` alone."""
        text = plain_text(run)
        if (at := unpaired_surrogate(text)) is not None:
            raise ConversationError(
                f"text holds an unpaired surrogate at character {at} near "
                f"{text[max(0, at - 20) : at]!r}; decode it properly before it becomes a message"
            )
        encoding = self._plain.encode(text, add_special_tokens=False)
        if len(run) == 1:
            return array("i", encoding.ids), bytes([run[0].provenance]) * len(encoding.ids)
        ends = list(accumulate(len(span.text) for span in run))
        owners = bytearray()
        for start, stop in encoding.offsets:  # whose a token is, its characters say
            spans = run[bisect_right(ends, start) : bisect_right(ends, max(start, stop - 1)) + 1]
            # Of a token that spans several, content owns it before the template does.
            owner = next((span for span in spans if not span.fixed), spans[0])
            owners.append(owner.provenance)
        return array("i", encoding.ids), bytes(owners)

    def decode(self, ids: Iterable[int] | Int32Array) -> str:
        """The text of ``ids``, control tokens spelt out; bytes that are no UTF-8 become U+FFFD.

        Ids beyond the vocabulary (rows a checkpoint pads its embedding with) have no text and are left out.
        """
        listed = ids.tolist() if isinstance(ids, np.ndarray) else list(map(int, ids))
        return str(self._backend.decode(listed, skip_special_tokens=False))


FILE = "tokenizer.json"
log = logging.getLogger(__name__)


def tokenizer_digest(folder: Path) -> str | None:
    """32 hexadecimal digits of what a model folder's ids stand for: vocabulary, merges, added tokens.

    None where there is no ``tokenizer.json`` that can be read. Templates and settings do not count.
    """
    try:
        found = read_json(read_file(folder / FILE), strict=False)
        model, added = found["model"], found.get("added_tokens", [])
        # BPE and WordPiece write a table, Unigram a list of pairs.
        vocab = model["vocab"]
        tokens = vocab.items() if isinstance(vocab, dict) else ((entry[0], at) for at, entry in enumerate(vocab))
        vocabulary = sorted((number, token) for token, number in tokens)
        what = [model.get("type"), vocabulary, model.get("merges"),
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
