"""What has been learnt of English messages: weights of features, and the chance of an act or of a fact's being asked.

A sentence does something with chance ``1 / (1 + exp(-sum of its features' weights))``; a message does it unless none of
its sentences does (noisy or). ``tools/train_reader.py`` learns the weights from labelled messages; the file is pinned
by ``manifest.json`` beside it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from environments.kit.language import network
from mua.types import Json
from mua.utils.errors import MuaError

FILE = Path(__file__).with_name("weights.json.gz")
MANIFEST = Path(__file__).with_name("manifest.json")
ACTS = ("ask", "instruct", "propose", "done", "refuse", "inform", "transfer", "offer", "wait")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LONG = 6
"""Letters from which on a word one edit away from a known one is read as that one."""
_WORD = re.compile(rf"(?<![\w$#@.])[a-z]{{{_LONG},}}(?![\w@])")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Weights:
    """Feature -> row, and a weight for each class: ``values`` is [features, classes]."""

    rows: dict[str, int]
    values: Floats

    def chance(self, sentences: Sequence[Iterable[str]]) -> Floats:
        """[classes]: the chance that at least one sentence, given by its features, belongs to a class."""
        none = np.ones(self.values.shape[1], dtype=np.float32)
        for features in sentences:
            rows = sorted(self.rows[name] for name in features if name in self.rows)  # a sum depends on its order
            none *= 1 / (1 + np.exp(np.clip(self.values[rows].sum(axis=0), -30, 30)))
        return 1 - none


class Model:
    """Weights for acts (classes :data:`ACTS`) and for facts (one class: it is asked for), and the network, if any."""

    def __init__(self, acts: Weights, facts: Weights, meanings: network.Network | None = None) -> None:
        self.acts, self.facts, self.network = acts, facts, meanings
        self.known = frozenset(name[3:] for name in acts.rows if name.startswith("w1 "))
        self._spelled = lru_cache(maxsize=4096)(self._spell)

    def repaired(self, text: str) -> str:
        """``text`` with long unknown words that are one edit away from a known one spelled as that one."""
        return _WORD.sub(lambda found: self._spelled(found[0]), text)

    def _spell(self, word: str) -> str:
        if word in self.known:
            return word
        near = {other for other in _edits(word) if other in self.known and len(other) >= _LONG}
        return near.pop() if len(near) == 1 else word


def _edits(word: str) -> Iterable[str]:
    for at in range(len(word) + 1):
        head, tail = word[:at], word[at:]
        yield head + tail[1:]
        yield from (head + letter + tail[1:] for letter in _LETTERS)
        yield from (head + letter + tail for letter in _LETTERS)
        if len(tail) > 1:
            yield head + tail[1] + tail[0] + tail[2:]


def packed(weights: Weights, step: float) -> Json:
    """``weights`` as JSON, in steps of ``step``; features that round to nothing are left out."""
    whole = np.clip(np.round(weights.values / step), -127, 127).astype(np.int8)
    kept = [name for name, row in weights.rows.items() if whole[row].any()]
    values = whole[[weights.rows[name] for name in kept]]
    return {"step": step, "features": "\n".join(kept), "values": base64.b64encode(values.tobytes()).decode()}


def _unpacked(found: Json) -> Weights:
    names = found["features"].split("\n")
    values = np.frombuffer(base64.b64decode(found["values"]), dtype=np.int8).reshape(len(names), -1)
    return Weights({name: row for row, name in enumerate(names)}, values.astype(np.float32) * found["step"])


@lru_cache(maxsize=1)
def learnt() -> Model:
    """The model of this package. Raises :class:`MuaError` when a file is not the one that the manifest pins."""
    found = json.loads(gzip.decompress(_pinned(FILE, "weights")))
    meaning = network.unpacked(_pinned(network.FILE, "network"))
    return Model(_unpacked(found["acts"]), _unpacked(found["facts"]), meaning)


def _pinned(path: Path, key: str) -> bytes:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != json.loads(MANIFEST.read_text(encoding="utf-8"))[key]:
        raise MuaError(f"{path} is not what {MANIFEST.name} pins; restore it")
    return data
