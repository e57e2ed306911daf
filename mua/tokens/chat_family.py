"""What differs between model families, behind one interface.

A family says how each kind of message is rendered, as a list of :class:`mua.tokens.codec.TextSpan`. Another family
joins with one module that subclasses :class:`ChatFamily` (see ``qwen.py``; a family that writes its tool calls
otherwise brings its own ``parse_text``) and one line in ``family_loading.py``. What it must obey:

* a message starts with a control token and is followed by one, so that it can be encoded alone;
* the end-of-turn token closes the assistant's turn, ``turn_separator`` is what the template adds behind it;
* ``history`` renders whole conversations as the official template does: it is checked against the template in
  the model folder whenever a family is loaded, and is what a new segment starts with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mua.tokens.codec import Codec, TextSpan, fixed, plain_text
from mua.tokens.parsing import AssistantTurn
from mua.types import Int32Array, Json, ToolSchema
from mua.utils.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(__file__).parent / "templates"


class ChatFamily(ABC):
    """One model family's way of writing a conversation, bound to one tokenizer."""

    name: ClassVar[str]
    control_tokens: ClassVar[tuple[str, ...]]
    """Tokens the rendering or the parser needs; the tokenizer must have each as one added token."""
    template: ClassVar[str]
    """File name of the shipped chat template under ``templates/``."""
    end_of_turn: ClassVar[str]
    end_of_text: ClassVar[str]
    turn_separator: ClassVar[str]

    def __init__(self, codec: Codec, *, thinking: bool, opening: str = "") -> None:
        """Bind the family to a tokenizer.

        Args:
            codec: the tokenizer.
            thinking: whether the policy may reason before it answers.
            opening: what the generation prompt holds behind the assistant's header: empty, an empty think
                block (a hybrid model told not to think) or an open one (a model that always thinks).
        """
        self.codec = codec
        self.thinking = thinking
        self.opening = opening
        self._end_ids = frozenset(self.stop_token_ids)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sampled turn, the end-of-turn token first."""
        return self.codec.control[self.end_of_turn], self.codec.control[self.end_of_text]

    def ended(self, ids: Int32Array) -> bool:
        """Whether sampled ``ids`` end with a stop token."""
        return len(ids) > 0 and int(ids[-1]) in self._end_ids

    def decode(self, ids: Sequence[int] | Int32Array) -> str:
        """Text of ``ids``, control tokens spelt out."""
        return self.codec.decode(ids)

    def parse(self, ids: Sequence[int] | Int32Array, *, turn: int = 0) -> AssistantTurn:
        """Read the sampled ids of one assistant turn; without a stop token at the end it is ``truncated``."""
        sampled = np.asarray(ids, dtype=np.int32)
        ended = self.ended(sampled)
        text = self.decode(sampled[:-1] if ended else sampled)
        return self.parse_text(text, turn=turn, truncated=not ended)

    def render(self, messages: Sequence[Json], tools: Sequence[ToolSchema], *, generate: bool) -> str:
        """Text of a whole conversation as the official template writes it."""
        spans = self.history(messages, tools)
        return plain_text([*spans, *self.generation_prompt()] if generate else spans)

    @abstractmethod
    def parse_text(self, text: str, *, turn: int = 0, truncated: bool = False) -> AssistantTurn:
        """Read the text of one assistant turn, end-of-turn token excluded."""

    @abstractmethod
    def system(self, system: str | None, tools: Sequence[ToolSchema]) -> list[TextSpan]:
        """The head of the conversation; empty if there is nothing to say."""

    @abstractmethod
    def user(self, text: str) -> list[TextSpan]:
        """One user message."""

    @abstractmethod
    def instruction(self, text: str) -> list[TextSpan]:
        """A system message behind the first message."""

    @abstractmethod
    def tool_results(self, results: Sequence[str]) -> list[TextSpan]:
        """All tool results between two assistant turns, in the template's folded form."""

    @abstractmethod
    def generation_prompt(self) -> list[TextSpan]:
        """What makes the model write an assistant turn."""

    @abstractmethod
    def demonstration(self, message: Json) -> list[TextSpan]:
        """What a demonstrator would have sampled behind the generation prompt, end-of-turn token included.

        All spans are ``SAMPLED``. Raises :class:`mua.tokens.codec.ConversationError` for a message this
        family cannot have sampled.
        """

    @abstractmethod
    def history(self, messages: Sequence[Json], tools: Sequence[ToolSchema]) -> list[TextSpan]:
        """A whole conversation as the official template writes it, assistant turns as ``TEMPLATE``."""

    @abstractmethod
    def rewrites(self, messages: Sequence[Json], since: int) -> bool:
        """Whether the template now writes an assistant turn at index ``since`` or later otherwise than sampled.

        Called after a message was added; True starts a new segment.
        """

    def closing(self, ids: Int32Array) -> list[TextSpan]:
        """What stands between the assistant turn of ``ids`` and the next message."""
        whole = len(ids) > 0 and int(ids[-1]) == self.codec.control[self.end_of_turn]
        return [fixed(self.turn_separator if whole else self.end_of_turn + self.turn_separator)]

    @classmethod
    def shipped_template(cls) -> str:
        """The chat template this project ships for tokenizers it builds itself."""
        return (TEMPLATES / cls.template).read_text(encoding="utf-8")

    @classmethod
    @abstractmethod
    def opening_of(cls, tokenizer: PreTrainedTokenizerBase, *, thinking: bool, folder: Path) -> str:
        """``opening`` for this tokenizer's template. Raises ModelError if it does not know the mode."""


def apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Json], tools: Sequence[ToolSchema], **options: Any
) -> str:
    """Text of ``messages`` and the generation prompt by the tokenizer's own chat template.

    Raises:
        ModelError: the template is broken or refuses the messages.
    """
    from jinja2 import TemplateError

    schemas = [tool.openai() for tool in tools] or None
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=schemas, tokenize=False, add_generation_prompt=True, **options
        )
    except TemplateError as error:
        raise ModelError(
            f"{tokenizer.name_or_path}: its chat template cannot render a conversation: {error}"
        ) from error
    return str(text)
