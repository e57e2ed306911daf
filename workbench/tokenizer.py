"""A small tokenizer of a family's own kind, for policies too small for a vocabulary of 150,000."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from mua.tokens.chat_family import family_class
from mua.utils.errors import ModelError

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English clitics
    r"| (?=\p{Ll}+[._@]\p{L})"  # the space before an identifier such as ada.cole@inbox.org or gift_card_7
    r"|\p{Lu}[\p{Ll}\p{M}]*"  # a capitalized word or a capital alone: a name is one token in prose and in JSON
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Lu}]]+"  # another word with the one character before it
    r"|\p{N}"  # every digit alone
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation and the line ends behind it
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE_WORDS = ("system\n", "user\n", "assistant\n", "\n\n")
"""What chat templates write around every message; a corpus of messages alone would leave it in pieces."""
_WEIGHT = 1000
_NOT_SPECIAL = ("tool_call>", "tool_response>", "think>")


def train_tokenizer(
    texts: Iterable[str], folder: Path, *, family: str = "qwen3", vocab_size: int, apart: Sequence[str] = ()
) -> None:
    """Train a byte-level BPE tokenizer and save it where ``AutoTokenizer`` finds it.

    It splits text as Qwen's does, except that capitalized words and the first words of identifiers stand alone, so
    that a small policy can copy a name or an identifier from any place to any other without learning how its
    spellings correspond. It has the family's control tokens behind the learnt vocabulary and carries the shipped
    chat template. The same texts in the same order give the same files.

    Args:
        texts: the corpus.
        folder: where tokenizer.json, tokenizer_config.json and chat_template.jinja are written.
        family: ``qwen2.5`` or ``qwen3``.
        vocab_size: most ids in all; a small corpus may yield fewer.
        apart: words that stand alone as well, such as values that tools answer and a policy repeats.

    Raises:
        ModelError: ``vocab_size`` does not hold the 256 bytes and the control tokens, or the family is unknown.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    cls = family_class(family)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learnt = vocab_size - len(cls.control_tokens)
    if learnt < len(alphabet):
        raise ModelError(
            f"vocab_size {vocab_size} is too small: {len(alphabet)} bytes and {len(cls.control_tokens)} control tokens "
            f"need {len(alphabet) + len(cls.control_tokens)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_split(apart)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=learnt, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(chain(_TEMPLATE_WORDS * _WEIGHT, texts), trainer)
    for token in cls.control_tokens:
        special = not token.endswith(_NOT_SPECIAL)
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=cls.end_of_turn,
        pad_token=cls.end_of_text,
        chat_template=cls.shipped_template(),
    ).save_pretrained(folder)


def _split(apart: Sequence[str]) -> str:
    words = "|".join(apart)
    return rf"\b(?:{words})\b| (?=(?:{words})\b)|{_SPLIT}" if apart else _SPLIT
