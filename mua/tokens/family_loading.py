"""Which chat families there are, and the one of a model folder, held against the folder's own chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from mua.tokens.chat_family import ChatFamily, apply_template
from mua.tokens.codec import Codec
from mua.tokens.qwen import Qwen3, Qwen25
from mua.types import Json, ToolSchema
from mua.utils.errors import ModelError
from mua.utils.hooks import is_hook, load_hook

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mua.config.schema import ModelConfig

_FAMILIES: dict[str, type[ChatFamily]] = {cls.name: cls for cls in (Qwen25, Qwen3)}
_MODEL_TYPES = {"qwen2": "qwen2.5", "qwen3": "qwen3", "qwen3_moe": "qwen3"}


def family_class(name: str) -> type[ChatFamily]:
    """The family registered as ``name`` (``qwen2.5``, ``qwen3``), or the hook of that path."""
    if is_hook(name):
        found: type[ChatFamily] = load_hook("model.chat_family", name)
        return found
    if name not in _FAMILIES:
        raise ModelError(f"unknown chat family {name!r}; known: {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def family_of_folder(folder: Path) -> type[ChatFamily]:
    """The chat family of a Hugging Face model folder, by its config.json alone.

    Raises:
        ModelError: the file cannot be read, or the model type has no family.
    """
    path = folder / "config.json"
    try:
        model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{path}: cannot read the model's configuration ({error}); model.path must be a model folder"
        ) from error
    if model_type not in _MODEL_TYPES:
        raise ModelError(f"{path}: no chat family for model_type {model_type!r}; known: {', '.join(_MODEL_TYPES)}")
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


def load_family(folder: Path, *, thinking: bool, name: str | None = None) -> ChatFamily:
    """The chat family of a Hugging Face model folder, or the one called ``name``, bound to its tokenizer.

    Loads local files only and checks that the folder's own chat template renders a conversation with tools
    exactly as the family does.

    Raises:
        ModelError: a file is missing or broken, the model type has no family, a control token is missing, the
            template has no such thinking mode, or it renders otherwise than the family.
    """
    folder = Path(folder)
    cls = family_of_folder(folder) if name is None else family_class(name)
    tokenizer = _load_tokenizer(folder)
    codec = Codec(tokenizer.backend_tokenizer, folder)
    if missing := [token for token in cls.control_tokens if token not in codec.control]:
        raise ModelError(
            f"{folder / 'tokenizer.json'}: no added token {', '.join(missing)}, which the family {cls.name} needs; "
            "use the tokenizer of an instruction-tuned checkpoint, or build one with workbench/tokenizer.py"
        )
    if not tokenizer.chat_template:
        raise ModelError(template_advice(folder, cls))
    family = cls(codec, thinking=thinking, opening=cls.opening_of(tokenizer, thinking=thinking, folder=folder))
    _check_template(family, tokenizer, folder)
    return family


def load_family_of(model: ModelConfig) -> ChatFamily:
    """The chat family that the section ``model`` asks for; raises as :func:`load_family`."""
    return load_family(model.path, thinking=model.thinking, name=model.chat_family)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises a dozen kinds for a broken folder
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{folder}: cannot load the tokenizer ({reason}); tokenizer.json must be there") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: only fast tokenizers (tokenizer.json) give the offsets provenance is read from")
    return tokenizer


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


def _check_template(family: ChatFamily, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Compare the folder's template with the family's rendering; what differs would be trained wrongly."""
    unseen = () if family.thinking else ("reasoning_content",)
    probe = [{key: value for key, value in message.items() if key not in unseen} for message in _PROBE]
    for tools, messages in (([_PROBE_TOOL], probe), ([], probe), ([], probe[1:9]), ([_PROBE_TOOL], probe[1:2])):
        theirs = apply_template(tokenizer, messages, tools, enable_thinking=family.thinking)
        ours = family.render(messages, tools, generate=True)
        if theirs != ours:
            at = next(
                (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours))
            )
            raise ModelError(
                f"{folder}: its chat template is not that of the family {family.name}: it writes "
                f"{theirs[max(0, at - 30) : at + 30]!r} where the family writes {ours[max(0, at - 30) : at + 30]!r}; "
                f"use the official template or mua/tokens/templates/{family.template}"
            )
