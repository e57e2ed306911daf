"""A small transformer that reads messages, in numpy: what a message does and which facts it asks for.

Three layers of a sentence encoder that knows English, taught on labelled messages by ``tools/train_network.py`` of
commit 208dfc67. The linear model (:mod:`environments.kit.language.model`) weighs what the rules see, this one what
words mean. ::

    words ─ pieces ─ vectors + marks ─ layers ─┬─ attention of each act  ─ its log odds
    wish ──────────── first vector ────────────┴─ attention of each fact ─ its log odds
                                                  (drawn to where the fact is named)

The weights are whole numbers of eight bits with one scale a row (``network.npz``), pinned by ``manifest.json``. Layers:
Vaswani et al., "Attention is all you need" (2017), normalised after each part as in BERT (Devlin et al., 2018).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from environments.kit.language.features import END, MONEY, QUESTION, VALUE, Tokens

FILE = Path(__file__).with_name("network.npz")
LONGEST = 300
"""Pieces of a message that are read."""
PIECES = 6
"""Pieces of a word that are read."""
_SPECIAL = {VALUE: "x", MONEY: "$", QUESTION: "?", END: "."}
_UNKNOWN = "[UNK]"
_PART = re.compile(r"[^\W_]+|[\W_]", re.DOTALL)
"""Runs of letters and digits, and each other mark by itself."""
_HEAD = 32
"""Width of an attention head of the encoder."""
_POOLS = 4
"""Attention heads of each question to the encoder's output."""

_NAMES = ("pieces", "marks", "wishes", "facts")
"""Arrays that hold the names of rows. The first wish stands for all that were not taught."""
_SCALE = " scale"

Floats = npt.NDArray[np.float32]
Arrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]


def pieces(word: str, known: Mapping[str, int]) -> list[int]:
    """A word as the longest known beginnings of what is left of it (WordPiece); one unknown piece if there are none."""
    word = _SPECIAL.get(word, word)
    found: list[int] = []
    for part in _PART.findall(word):
        start, mine = 0, []
        while start < len(part):
            head = "##" if start else ""
            end = next((e for e in range(len(part), start, -1) if head + part[start:e] in known), 0)
            if not end:
                mine = [known[_UNKNOWN]]
                break
            mine.append(known[head + part[start:end]])
            start = end
        found += mine
    return found[:PIECES] or [known[_UNKNOWN]]


class Network:
    """The network with its weights; ``arrays`` as :func:`packed` makes them.

    numpy's products run on one thread in a process that has one: a message's matrices are small, and OpenBLAS's threads
    wait for one another spinning, which makes them ten times slower where trainer, engine or other users are busy.
    """

    def __init__(self, arrays: Arrays) -> None:
        ThreadpoolController().select(internal_api="openblas").limit(limits=1)
        self._w = {name: _plain(arrays, name) for name in arrays if name not in _NAMES and not name.endswith(_SCALE)}
        self._pieces, self._marks, self._wishes, self._facts = (_rows(arrays, name) for name in _NAMES)
        self._depth = sum(name.endswith("qkv") for name in self._w)

    def read(self, message: Tokens, wish: str, names: Sequence[str]) -> tuple[Floats, dict[str, float]]:
        """Log odds of each act [acts], and of being asked for of those of the facts ``names`` that it was taught."""
        about = self._w["wish"][self._wishes.get(wish, 0)]
        vectors, owner = self._vectors(message)
        states = self._encoded(np.concatenate([about[None], vectors]))[1:]
        keys, values, mine = self._by("key", states), self._by("value", states), self._by("query", about)
        acts = self._asked(keys, values, self._w["act"] + mine, np.zeros((len(self._w["act"]), len(owner)), np.float32))
        taught = [name for name in names if name in self._facts]
        named = np.array([np.isin(owner, message.mentions.get(name, ())) for name in taught], dtype=np.float32)
        if not taught:
            return acts, {}
        facts = self._asked(keys, values, self._w["fact"][[self._facts[name] for name in taught]] + mine, named)
        return acts, dict(zip(taught, facts.tolist(), strict=True))

    def _by(self, name: str, x: Floats) -> Floats:
        return x @ self._w[name].T + self._w[f"{name}_bias"]

    def _vectors(self, message: Tokens) -> tuple[Floats, npt.NDArray[np.int64]]:
        """[pieces, width] vectors with the marks of their words, and [pieces] each one's word."""
        ids, owner = [], []
        marks = np.zeros((len(message.words), self._w["mark"].shape[1]), np.float32)
        for at, word in enumerate(message.words):
            own = pieces(word, self._pieces)
            ids += own
            owner += [at] * len(own)
            rows = [self._marks[mark] for mark in message.marks[at] if mark in self._marks]
            marks[at] = self._w["mark"][rows].sum(axis=0)
        kept = np.array(owner[:LONGEST])
        return self._by("up", self._w["piece"][ids[:LONGEST]]) + marks[kept], kept

    def _encoded(self, x: Floats) -> Floats:
        """[tokens, width] after all layers."""
        x = self._normed(x + self._w["place"][: len(x)], "first")
        for layer in range(self._depth):
            x = self._normed(x + self._attended(x, f"{layer}."), f"{layer}.a")
            x = self._normed(x + self._by(f"{layer}.down", _gelu(self._by(f"{layer}.wide", x))), f"{layer}.b")
        return x

    def _attended(self, x: Floats, layer: str) -> Floats:
        query, key, value = self._by(f"{layer}qkv", x).reshape(len(x), 3, -1, _HEAD).transpose(1, 2, 0, 3)
        mixed = _softmax(query @ key.transpose(0, 2, 1) / math.sqrt(_HEAD)) @ value
        return self._by(f"{layer}out", mixed.transpose(1, 0, 2).reshape(len(x), -1))

    def _normed(self, x: Floats, name: str) -> Floats:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-12)
        return x * self._w[f"{name}_scale"] + self._w[f"{name}_shift"]

    def _asked(self, keys: Floats, values: Floats, asks: Floats, named: Floats) -> Floats:
        """[asks]: log odds that each of ``asks`` [asks, width] holds; ``named`` [asks, pieces] draws its attention."""
        by_head = (_POOLS, asks.shape[1] // _POOLS)
        score = np.einsum("thd,fhd->fht", keys.reshape(-1, *by_head), asks.reshape(-1, *by_head))
        score = score / math.sqrt(by_head[1]) + self._w["draw"][:, None] * named[:, None]
        seen = np.einsum("fht,thd->fhd", _softmax(score), values.reshape(-1, *by_head)).reshape(asks.shape)
        joint = np.concatenate([seen, asks, seen * asks, named.max(axis=1, keepdims=True)], axis=1)
        return self._by("last", _gelu(self._by("joint", joint)))[:, 0]


def _gelu(x: Floats) -> Floats:
    """Hendrycks and Gimpel (2016), by their approximation with tanh."""
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def _softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _plain(arrays: Arrays, name: str) -> Floats:
    scale = arrays.get(name + _SCALE)
    values = np.asarray(arrays[name], dtype=np.float32)
    return values if scale is None else values * np.asarray(scale, dtype=np.float32)


def _rows(arrays: Arrays, name: str) -> dict[str, int]:
    return {one: row for row, one in enumerate(np.asarray(arrays[name]).tobytes().decode().split("\n"))}


def unpacked(data: bytes) -> Network:
    """The network of a file."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return Network({name: arrays[name] for name in arrays.files})
