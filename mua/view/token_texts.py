"""The text of single tokens, so that all of them together read as the engine's text."""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class TokenTexts:
    """Texts of ids by the tokenizer of a folder; without one, every id stands for itself. Safe in threads."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    @property
    def fault(self) -> str | None:
        """Why there is no text, or None."""
        with self._lock:
            return self._loaded[1]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text a token. A character of several tokens belongs to the last of them; bytes that are no UTF-8 become
        U+FFFD, as in the engine's text."""
        with self._lock:
            bytes_of, fault = self._loaded
        if fault is not None:
            return [f"⟨{number}⟩" for number in ids]
        decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), []
        for number in ids:
            found.append(decoder.decode(bytes_of.get(int(number), b"")))
        if rest := decoder.decode(b"", final=True):
            found[-1] += rest
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return "".join(self.pieces(ids))

    @cached_property
    def _loaded(self) -> tuple[dict[int, bytes], str | None]:
        if self.folder is None:
            return {}, "the run says no model.path; name the tokenizer's folder with --model"
        path = self.folder / "tokenizer.json"
        try:
            return _byte_vocabulary(json.loads(path.read_text(encoding="utf-8"))), None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
            return {}, f"{path}: no tokenizer ({why}); name its folder with --model"


def _byte_vocabulary(specification: dict[str, Any]) -> dict[int, bytes]:
    """Bytes by id. Raises ValueError for a tokenizer whose vocabulary is not written in the bytes of byte-level BPE."""
    kinds = json.dumps([specification.get("decoder"), specification.get("pre_tokenizer")])
    if '"ByteLevel"' not in kinds:
        raise ValueError("its tokens are no bytes (ByteLevel)")
    byte_of = _byte_characters()
    found = {
        int(number): bytes(byte_of[character] for character in token)
        for token, number in specification["model"]["vocab"].items()
        if all(character in byte_of for character in token)
    }
    for token in specification["added_tokens"]:
        found[int(token["id"])] = token["content"].encode("utf-8", "replace")
    return found


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (Radford et al. 2019, GPT-2's ``encoder.py``):
    printable Latin-1 stands for itself, every other byte for the next character from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
