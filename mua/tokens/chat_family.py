"""What differs between model families, behind one interface.

A family says how each kind of message is rendered, as a list of :class:`mua.tokens.codec.TextSpan`. Another family
joins with one module that subclasses :class:`ChatFamily` (see ``qwen.py``; a family that writes its tool calls
otherwise brings its own ``parse_text``) and one line in :data:`_FAMILIES`. What it must obey:

* a message starts with a control token and is followed by one, so that it can be encoded alone;
* the end-of-turn token closes the assistant's turn, ``turn_separator`` is what the template adds behind it;
* ``history`` renders whole conversations as the official template does: it is checked against the template in
  the model folder whenever a family is loaded, and is what a new segment starts with.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from megatron_bridge.hf_config import read_hf_config
from mua.tokens.codec import Codec, TextSpan, fixed, plain_text
from mua.tokens.parsing import AssistantTurn
from mua.types import Int32Array, Json, ToolSchema
from mua.utils.errors import ModelError
from mua.utils.hooks import is_hook, load_hook

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mua.config.schema import ModelConfig

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

    def rewrites(self, messages: Sequence[Json], since: int) -> bool:
        """Whether the template now writes an assistant turn at index ``since`` or later otherwise than sampled.

        Called after a message was added; True starts a new segment.
        """
        return False

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


_FAMILIES = {"qwen2.5": "mua.tokens.qwen:Qwen25", "qwen3": "mua.tokens.qwen:Qwen3"}
_MODEL_TYPES = {"qwen2": "qwen2.5", "qwen3": "qwen3", "qwen3_moe": "qwen3"}


def family_class(name: str) -> type[ChatFamily]:
    """The family registered as ``name`` (``qwen2.5``, ``qwen3``), or the hook of that path."""
    if not is_hook(name) and name not in _FAMILIES:
        raise ModelError(f"unknown chat family {name!r}; known: {', '.join(_FAMILIES)}")
    return cast("type[ChatFamily]", load_hook("model.chat_family", _FAMILIES.get(name, name)))


def family_of_folder(folder: Path) -> type[ChatFamily]:
    """The chat family of a Hugging Face model folder, by its config.json alone.

    Raises:
        ModelError: the file cannot be read, or the model type has no family.
    """
    model_type = read_hf_config(folder).get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ModelError(
            f"{folder / 'config.json'}: no chat family for model_type {model_type!r}; known: {', '.join(_MODEL_TYPES)}"
        )
    return family_class(_MODEL_TYPES[model_type])


def has_chat_template(folder: Path) -> bool:
    """Whether a model folder has a chat template in any of the files that transformers takes one from."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return (folder / "additional_chat_templates").is_dir()


def template_advice(folder: Path, family: type[ChatFamily]) -> str:
    """What is missing where a folder has no chat template, and what to do."""
    return (
        f"{folder}: the tokenizer has no chat template; copy that of the instruction-tuned checkpoint, or "
        f"mua/tokens/templates/{family.template}, to {folder / 'chat_template.jinja'}"
    )


def load_family_of(model: ModelConfig) -> ChatFamily:
    """The chat family that the section ``model`` asks for; raises as :func:`load_family`."""
    return load_family(model.path, thinking=model.thinking, name=model.chat_family)


def load_family(folder: Path, *, thinking: bool, name: str | None = None) -> ChatFamily:
    """The chat family of a Hugging Face model folder, or the one called ``name``, bound to its tokenizer.

    Loads local files only and checks that the folder's own chat template renders a conversation with tools
    exactly as the family does.

    Raises:
        ModelError: a file is missing or broken, the model type has no family, a control token is missing, the
            template has no such thinking mode, or it renders otherwise than the family.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    cls = family_of_folder(folder) if name is None else family_class(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises a dozen kinds for a broken folder
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{folder}: cannot load the tokenizer ({reason}); tokenizer.json must be there") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: only fast tokenizers (tokenizer.json) give the offsets provenance is read from")
    codec = Codec(tokenizer.backend_tokenizer, folder)
    if missing := [token for token in cls.control_tokens if token not in codec.control]:
        raise ModelError(
            f"{folder / 'tokenizer.json'}: no added token {', '.join(missing)}, which the family {cls.name} needs; "
            "use the tokenizer of an instruction-tuned checkpoint, or build one with workbench/tokenizer.py"
        )
    if not tokenizer.chat_template:
        raise ModelError(template_advice(folder, cls))
    family = cls(codec, thinking=thinking, opening=cls.opening_of(tokenizer, thinking=thinking, folder=folder))
    # What the folder's template writes otherwise would be trained wrongly.
    unseen = () if thinking else ("reasoning_content",)
    probe = [{key: value for key, value in message.items() if key not in unseen} for message in _PROBE]
    for tools, messages in (([_PROBE_TOOL], probe), ([], probe), ([], probe[1:9]), ([_PROBE_TOOL], probe[1:2])):
        theirs = apply_template(tokenizer, messages, tools, enable_thinking=thinking)
        ours = family.render(messages, tools, generate=True)
        if theirs != ours:
            shorter = min(len(theirs), len(ours))
            at = next((at for at in range(shorter) if theirs[at] != ours[at]), shorter)
            raise ModelError(
                f"{folder}: its chat template is not that of the family {family.name}: it writes "
                f"{theirs[max(0, at - 30) : at + 30]!r} where the family writes {ours[max(0, at - 30) : at + 30]!r}; "
                f"use the official template or mua/tokens/templates/{family.template}"
            )
    return family


_PROBE_TOOL = ToolSchema("look_up", "Probe: è <b>", {"type": "object", "properties": {"key": {"type": "string"}}})


def _probe_call(arguments: Json) -> Json:
    return {"id": "probe", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


_PROBE: list[Json] = [
    {"role": "system", "content": "Probe.\n"},
    {"role": "user", "content": "First"},
    {"role": "assistant", "content": "Text", "tool_calls": [_probe_call({"key": "è"}), _probe_call({})]},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": '{"two": 2}'},
    {"role": "assistant", "content": "", "reasoning_content": "Why", "tool_calls": [_probe_call({"key": 1})]},
    {"role": "tool", "content": "three"},
    {"role": "assistant", "content": "Answer"},
    {"role": "user", "content": "Second"},
    {"role": "assistant", "content": "Last", "reasoning_content": "Because", "tool_calls": [_probe_call({})]},
    {"role": "tool", "content": "four"},
]
