"""Random conversations: the stream against its own promises, and against the chat templates.

Promises, for any sampled ids whatever: the prefix the engine saw never changes within a segment; the mask marks
exactly the sampled ids; each sampled id stands in exactly one segment; no text of users, tools or system prompts
becomes a control token.

Templates: for turns sampled the way the family writes them, every prompt equals transformers' rendering of
``messages`` by ``apply_chat_template``. Three limits are the subject's, not the test's:

* ids are compared only for content without spelt-out control tokens, because transformers would make control tokens
  of them; with them, text is compared;
* a sampled turn that begins with a line end is left out of the comparison of ids: a full render merges it with the
  line end of the generation prompt, which the engine was sent as a token of its own;
* Qwen3 without thinking is compared with ``preserve_thinking=True``, see ``mua/tokens/qwen.py``; and thinking turns
  have some reasoning, because the official template leaves the empty block out of history.

The templates in the tests are the shipped ones, written after the official ones; test_tokens_family.py holds them
to renderings written out by hand.
"""

import json
import re
import unicodedata
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mua.tokens.chat_family import ChatFamily, apply_template
from mua.tokens.conversation import Conversation
from mua.types import Generation, Json, Provenance, ToolSchema
from tests.tokens_fixtures import chat_family, model_folder
from tests.tokens_fixtures import generation as generated

MODES = [("qwen2.5", False), ("qwen3", False), ("qwen3", True)]
TOOLS = [ToolSchema("look_up", "<tool_call> 查找 è", {"type": "object", "properties": {"k": {"type": "string"}}})]
SPELT = ["<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|endoftext|>"]
WORDS = [
    "hello", " ", "\n", "\n\n", "\r\n", "\t", "12", "é", "🙂", "👩‍👩‍👧", "订单", "<", "|im", "}", ".", "tool_response>",
    "''",
]  # fmt: skip
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=PHASES)


def texts(words: list[str]) -> st.SearchStrategy[str]:
    anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    joined = st.lists(st.sampled_from(words), max_size=6).map("".join)
    return st.one_of(joined, anything).map(lambda text: unicodedata.normalize("NFC", text))


CONTROL = re.compile(r"</?(tool_call|tool_response|think)>|<\|(im_start|im_end|endoftext)\|>")
SAFE, ANY = texts(WORDS).filter(lambda text: not CONTROL.search(text)), texts(WORDS + SPELT)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


def arguments(text: st.SearchStrategy[str]) -> st.SearchStrategy[Json]:
    nested = st.lists(SCALARS | text, max_size=2) | st.dictionaries(text, SCALARS | text, max_size=2)
    return st.dictionaries(text, SCALARS | text | nested, max_size=2)


# Built once: hypothesis validates every new strategy object, which is slow within a composite one.
CALLS = {id(text): st.lists(arguments(text), max_size=2) for text in (SAFE, ANY)}


@dataclass
class Turn:
    """One assistant turn and what follows it: tool results, or a user message."""

    ids: list[int]
    ended: bool
    results: list[str] | None
    user: str


@dataclass
class Episode:
    """Drives a conversation as an engine and an environment would, and remembers what the engine saw."""

    talk: Conversation
    fed: list[Generation] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def play(self, turn: Turn, version: int) -> None:
        prompt = self.talk.prompt_ids().tolist()
        self.prompts.append(prompt)
        n = len(turn.ids)
        finish = "stop" if turn.ended else "length"
        logprobs = -(np.arange(n, dtype=np.float32) + 1) / 7
        generation = replace(generated(turn.ids, finish, version=version), logprobs=logprobs)
        self.fed.append(generation)
        self.talk.add_sampled(generation)
        if turn.results:
            self.talk.add_tool_results(turn.results)
        else:
            self.talk.add_user(turn.user)


@st.composite
def any_turn(draw: st.DrawFn, family: ChatFamily) -> Turn:
    """A turn of whatever ids: well-formed, spelt-out, cut in the middle of a character, or random."""
    kind = draw(st.sampled_from(["written", "cut", "random"]))
    if kind == "random":
        stops = set(family.stop_token_ids)
        vocabulary = st.integers(0, family.codec.vocabulary_size + 3).filter(lambda token: token not in stops)
        ids = draw(st.lists(vocabulary, max_size=12))
    else:
        message = {"role": "assistant", "content": draw(ANY.filter(lambda text: "</think>" not in text))}
        message["tool_calls"] = [{"function": {"name": "f", "arguments": a}} for a in draw(CALLS[id(ANY)])]
        if family.thinking:
            message["reasoning_content"] = draw(ANY)
        ids = family.codec.encode(family.demonstration(message))[0].tolist()[:-1]
        if kind == "cut":
            ids = ids[: draw(st.integers(0, len(ids)))]
    ended = draw(st.booleans())
    ids = [*ids, draw(st.sampled_from(family.stop_token_ids))] if ended else ids
    results = draw(st.none() | st.lists(ANY, min_size=1, max_size=3))
    return Turn(ids, ended, results, draw(ANY))


@pytest.mark.parametrize(("name", "thinking"), MODES)
@given(data=st.data())
@SETTINGS
def test_prefix_mask_and_sampled_ids_of_any_episode(name: str, thinking: bool, data: st.DataObject) -> None:
    family = chat_family(name, thinking)
    system = data.draw(st.none() | ANY)
    tools = data.draw(st.sampled_from([[], TOOLS]))
    turns = data.draw(st.lists(any_turn(family), min_size=1, max_size=5))
    episode = Episode(Conversation.begin(family, system=system, tools=tools, user=data.draw(ANY)))
    for number, turn in enumerate(turns):
        episode.play(turn, version=number)
        if number == len(turns) - 1 and data.draw(st.booleans()):
            episode.talk.prompt_ids()

    segments = episode.talk.segments()
    streams = [segment.ids.tolist() for segment in segments]
    at = [0] * len(segments)
    current = 0
    for number, (prompt, generation) in enumerate(zip(episode.prompts, episode.fed, strict=True)):
        seen = [*prompt, *generation.ids.tolist()]
        if not len(generation.ids):
            continue
        # The engine saw this very prefix, and its answer stands right behind it, masked, with its numbers.
        while streams[current][: len(seen)] != seen:
            assert thinking, "only thinking may start a new segment"
            current += 1
            assert current < len(streams), "what the engine saw is the prefix of no segment"
        segment, here = segments[current], slice(len(prompt), len(seen))
        assert len(prompt) >= at[current]
        at[current] = len(seen)
        assert segment.loss_mask[here].all()
        assert segment.logprobs[here].tolist() == generation.logprobs.tolist()
        assert set(segment.version[here]) == set(segment.turn[here]) == {number}
    everything = [token for segment in segments for token in segment.ids[segment.loss_mask].tolist()]
    assert everything == [token for generation in episode.fed for token in generation.ids.tolist()]
    for segment in segments:
        assert not segment.logprobs[~segment.loss_mask].any()
        assert set(segment.version[~segment.loss_mask]) <= {-1}
        outsiders = np.isin(segment.provenance, [Provenance.USER, Provenance.TOOL, Provenance.SYSTEM])
        assert not set(segment.ids[outsiders].tolist()) & set(family.codec.control.values())


@st.composite
def proper_message(draw: st.DrawFn, family: ChatFamily, text: st.SearchStrategy[str]) -> Json:
    """An assistant message whose canonical tokens, read back, give the message again."""
    said = draw(text.filter(lambda t: not re.match(r"\s*[\r\n]", t) and not re.search("</?(tool_call|think)>", t)))
    message: Json = {"role": "assistant", "content": said}
    calls = draw(CALLS[id(text)])
    if calls:
        message["tool_calls"] = [{"function": {"name": "look_up", "arguments": a}} for a in calls]
    if family.thinking:
        thoughts = draw(text.filter(lambda t: t.strip("\n") and "</think>" not in t))
        message["reasoning_content"] = thoughts
    return message


def template_messages(family: ChatFamily, messages: list[Json]) -> list[Json]:
    """What to hand to apply_chat_template: Qwen2.5's template wants arguments as objects."""
    if family.name != "qwen2.5":
        return messages
    copies = json.loads(json.dumps(messages))
    for call in (call for message in copies for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copies


@cache
def hugging_face_tokenizer(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_folder(name), local_files_only=True)


@pytest.mark.parametrize("spelt", [False, True], ids=["ids", "text"])
@pytest.mark.parametrize(("name", "thinking"), MODES)
@given(data=st.data())
@SETTINGS
def test_every_prompt_is_the_templates_full_render(name: str, thinking: bool, spelt: bool, data: st.DataObject) -> None:
    family = chat_family(name, thinking)
    tokenizer = hugging_face_tokenizer(name)
    text = ANY if spelt else SAFE
    # A description that spells a control token would become one in transformers' ids.
    tools = data.draw(st.sampled_from([[], TOOLS])) if spelt else [ToolSchema("f", "è", {"type": "object"})]
    # Qwen3's template does not take a user message wrapped in tool-response tags for a query.
    asked = text.filter(lambda t: not t.startswith("<tool_response>"))
    talk = Conversation.begin(family, system=data.draw(st.none() | text), tools=tools, user=data.draw(asked))
    for message in data.draw(st.lists(proper_message(family, text), min_size=1, max_size=4)):
        ids = family.codec.encode(family.demonstration(message))[0]
        talk.prompt_ids()
        turn = talk.add_sampled(generated(ids))
        assert [call.arguments for call in turn.tool_calls] == [
            call["function"]["arguments"] for call in message.get("tool_calls", [])
        ]
        if turn.tool_calls:
            talk.add_tool_results(data.draw(st.lists(text, min_size=1, max_size=3)))
        else:
            talk.add_user(data.draw(asked))
        prompt = talk.prompt_ids().tolist()
        options = {"enable_thinking": thinking, **({} if thinking else {"preserve_thinking": True})}
        full = apply_template(tokenizer, template_messages(family, talk.messages), tools, **options)
        assert unicodedata.normalize("NFC", family.decode(prompt)) == unicodedata.normalize("NFC", full)
        if not spelt:
            assert prompt == tokenizer(full, add_special_tokens=False).input_ids


@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize(("name", "thinking"), MODES)
@given(data=st.data())
@SETTINGS
def test_demonstration_equals_the_episode_that_samples_it(
    name: str, thinking: bool, train_on: str, data: st.DataObject
) -> None:
    family = chat_family(name, thinking)
    talk = Conversation.begin(family, system=data.draw(st.none() | ANY), tools=TOOLS, user=data.draw(ANY))
    for message in data.draw(st.lists(proper_message(family, ANY), min_size=1, max_size=4)):
        ids = family.codec.encode(family.demonstration(message))[0]
        talk.prompt_ids()
        talk.add_sampled(generated(ids))
        if message.get("tool_calls"):
            talk.add_tool_results(data.draw(st.lists(ANY, min_size=1, max_size=2)))
        else:
            talk.add_user(data.draw(ANY))
    sampled = talk.segments()
    shown = Conversation.from_messages(family, talk.messages, TOOLS, train_on=train_on).segments()
    kept = sampled if train_on == "all" else sampled[-1:]
    assert [segment.ids.tolist() for segment in shown] == [segment.ids.tolist() for segment in kept]
    if train_on == "all":
        assert [s.provenance.tolist() for s in shown] == [s.provenance.tolist() for s in sampled]
    else:
        last = int(shown[0].turn[shown[0].loss_mask][0])
        assert set(shown[0].turn[shown[0].loss_mask].tolist()) == {last}
        assert last == talk.turns - 1
