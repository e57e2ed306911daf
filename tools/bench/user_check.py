"""How well faults of simulated users are found: precision and recall by kind, written to docs/benchmarks/user_check.md.

::

    scripted expert ──► scripted user ──► Watched: every reply as it is        ──► must pass
                                     └──► Planted: one reply, drawn by the seed,
                                          turned into a fault of one kind      ──► must be found, as that kind

    tests/data/users/llm_replies*.jsonl: replies as language models write them, by hand ──► as they are marked

The dialogues are those of all splits of four domains, with customers of all kinds. Run ``python -m
tools.bench.user_check`` (a few minutes); a small version is a test. The faults and the check have one author, so
recall on planted faults says that the check does what it was made for, and the replies by hand say somewhat more.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

import yaml

from environments.kit.demonstrate import play
from mua.environment.domain import Domain, moves_of
from mua.environment.protocol import Split, Task, ToolResult
from mua.environment.registry import get_domain
from mua.environment.user import STOP_SIGNAL, ToolUser, User, UserReply, UserTools
from mua.types import Json, ToolSchema
from mua.users.personas import DEFAULT_PROMPT
from mua.users.task_check import SPLITS, TaskCheck, Vocabulary
from mua.users.utterance_check import LeakCheck, ReplyCheck, with_signal, without_label
from mua.utils.errors import MuaError, Refusal, UserFaultKind
from tools import kit

PAGE = kit.ROOT / "docs" / "benchmarks" / "user_check.md"
_DATA = kit.ROOT / "tests" / "data" / "users"
REPLIES = _DATA / "llm_replies.jsonl"
LOOKED_AT, APART = _DATA / "llm_replies_domains.jsonl", _DATA / "llm_replies_apart.jsonl"
DOMAINS = ("retail", "airline", "telecom", "help_desk")
K = UserFaultKind
KINDS = (
    K.NO_TEXT, K.BROKEN_TEXT, K.TOO_LONG, K.SPEAKS_AS_AGENT, K.TOOL_CALL_IN_TEXT, K.LEAKS_INSTRUCTION,
    K.INVENTS_FACTS, K.CHANGES_WISH, K.ENDS_TOO_EARLY,
)  # fmt: skip
LEAK_WORDS = 12
WORDINGS = yaml.safe_load((_DATA / "planted_faults.yaml").read_text(encoding="utf-8"))
"""What faults are made of."""
_VOCABULARIES: dict[str, Vocabulary] = {}


class _Found(MuaError):
    """The planted reply has been checked; the rest of the dialogue is of no interest."""


@dataclass(frozen=True)
class Scene:
    """What a fault may be made of."""

    domain: Domain
    task: Task
    rng: random.Random
    tools: Sequence[ToolSchema]


class Watched:
    """A user whose replies are checked as they would be if a language model had written them."""

    def __init__(self, inner: User, check: ReplyCheck) -> None:
        self._inner = inner
        self.check = check
        self.tools: _Spied | None = None
        self.replies = 0
        self.refused: list[tuple[str, Refusal]] = []

    def take_tools(self, tools: UserTools) -> None:
        self.tools = _Spied(tools, self.check)
        if isinstance(self._inner, ToolUser):
            self._inner.take_tools(self.tools)

    async def open(self) -> UserReply:
        return self.judged(await self._inner.open())

    async def reply(self, agent_text: str) -> UserReply:
        self.check.heard(agent_text)
        return self.judged(await self._inner.reply(agent_text))

    async def close(self) -> None:
        await self._inner.close()

    def judged(self, reply: UserReply) -> UserReply:
        """``reply``, once it has been looked at."""
        if (refusal := self.find(reply.text)) is not None:
            self.refused.append((reply.text, refusal))
        self.replies += 1
        self.check.said(reply.text)
        return reply

    def find(self, text: str) -> Refusal | None:
        """What is wrong with ``text`` as the next reply."""
        acted = self.tools is not None and self.tools.used()
        return found_in(self.check, text, first=self.replies == 0, acted=acted)


class Planted(Watched):
    """Turns the reply of ``moment`` (from 0; the last one if there are fewer) into a fault and judges that alone."""

    def __init__(self, inner: User, check: ReplyCheck, moment: int, fault: Callable[[str], str]) -> None:
        super().__init__(inner, check)
        self._moment = moment
        self._fault = fault
        self.planted: tuple[str, Refusal | None] | None = None

    def judged(self, reply: UserReply) -> UserReply:
        if self.replies < self._moment:
            if self.tools is not None:
                self.tools.used()
            self.replies += 1
            self.check.said(reply.text)
            return reply
        text = self._fault(reply.text)
        self.planted = text, self.find(text)
        raise _Found


class _Spied:
    """The user's tools, with what they answered kept for the check."""

    def __init__(self, tools: UserTools, check: ReplyCheck) -> None:
        self._tools = tools
        self._check = check
        self._used = False

    def schemas(self) -> Sequence[ToolSchema]:
        return self._tools.schemas()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        result = await self._tools.call(name, arguments)
        self._check.saw(result.text)
        self._used = True
        return result

    def used(self) -> bool:
        """Whether one was used since this was last asked."""
        used, self._used = self._used, False
        return used


def found_in(check: ReplyCheck, text: str, *, first: bool, acted: bool = False) -> Refusal | None:
    """What :class:`mua.users.llm.LlmUser` would find in ``text``."""
    said = with_signal(without_label(text)) if len(text) < 100_000 else text
    return check.form(said, first=first) or check.content(said, acted=acted)


def vocabulary(domain: Domain) -> Vocabulary:
    """Made once a domain."""
    if domain.name not in _VOCABULARIES:
        _VOCABULARIES[domain.name] = Vocabulary(domain)
    return _VOCABULARIES[domain.name]


def check_of(domain: Domain, task: Task) -> ReplyCheck:
    """As the factory of users makes it."""
    facts, rules = vocabulary(domain).of(task), DEFAULT_PROMPT.text("", tools=True)
    return ReplyCheck(LeakCheck(LEAK_WORDS, domain.persona(task), rules=rules, stated=facts.stated), facts)


# ---- faults


def _broken(scene: Scene, text: str) -> str:
    place = scene.rng.randrange(len(text) + 1)
    return text[:place] + scene.rng.choice(("\ud800", "\udfff", "\x00", "\x1b[2J")) + text[place:]


def _worded(kind: UserFaultKind) -> Callable[[Scene, str], str]:
    """One of the wordings of a kind, with what they name filled in."""

    def planted(scene: Scene, text: str) -> str:
        persona = scene.domain.persona(scene.task)
        sentences = [s for s in persona.replace("\n", " ").split(". ") if len(s.split()) > 7]
        tool, arguments = scene.rng.choice(list(scene.tools)).name, {"id": "K7", "confirm": True}
        filled = {
            "text": text, "quoted": scene.rng.choice(sentences or [persona]), "tool": tool,
            "arguments": json.dumps(arguments), "call": json.dumps({"name": tool, "arguments": arguments}),
            "parameters": json.dumps({"function": tool, "parameters": arguments}),
        }  # fmt: skip
        return scene.rng.choice(WORDINGS[kind]).format(**filled)

    return planted


def _invented(scene: Scene, text: str) -> str:
    """A fact of nobody, or one that other tasks of the domain are about and this one is not."""
    rng, own = scene.rng, scene.domain.persona(scene.task).casefold()
    letters = "".join(rng.choice("BCDFGHJKLMNPQRSTVWXZ") for _ in range(3))
    foreign = sorted(name for name in vocabulary(scene.domain).names() if name not in own)
    filled = {"number": rng.randrange(10_000, 99_999), "letters": letters, "foreign": rng.choice(foreign).title()}
    added = rng.choice(WORDINGS[K.INVENTS_FACTS]).format(**filled)
    return f"{text.replace(STOP_SIGNAL, '').strip()} {added}"


def _changed(scene: Scene, text: str) -> str:
    persona = json.dumps(scene.task.data).casefold() + scene.domain.persona(scene.task).casefold()
    free = [
        wording
        for wish in WORDINGS["other_wishes"]
        if not any(word in persona for word in wish["near"])
        for wording in wish["said"]
    ]
    retreats = [] if "change your mind" in persona or '"change"' in persona else WORDINGS["retreats"]
    return scene.rng.choice([*free, *retreats])


_PLANTS: Mapping[UserFaultKind, Callable[[Scene, str], str]] = {
    K.NO_TEXT: lambda scene, text: scene.rng.choice(("", "   ", "\n\n\t", "User:")),
    K.BROKEN_TEXT: _broken,
    K.TOO_LONG: lambda scene, text: f"{text} " * (scene.rng.choice((20_000, 200_000)) // (len(text) + 1) + 1),
    K.SPEAKS_AS_AGENT: _worded(K.SPEAKS_AS_AGENT),
    K.TOOL_CALL_IN_TEXT: _worded(K.TOOL_CALL_IN_TEXT),
    K.LEAKS_INSTRUCTION: _worded(K.LEAKS_INSTRUCTION),
    K.INVENTS_FACTS: _invented,
    K.CHANGES_WISH: _changed,
    K.ENDS_TOO_EARLY: lambda scene, text: scene.rng.choice(WORDINGS[K.ENDS_TOO_EARLY]),
}


# ---- dialogues


@dataclass
class Counts:
    """What came of one kind."""

    planted: int = 0
    found: int = 0
    """Refused, as whatever kind."""
    named: int = 0
    """Refused as this kind."""
    missed: list[str] = field(default_factory=list)


@dataclass
class Result:
    """Of one domain, or of a set of replies."""

    replies: int = 0
    """That are as they should be."""
    refused: Counter[UserFaultKind] = field(default_factory=Counter)
    """Of those."""
    examples: list[str] = field(default_factory=list)
    kinds: dict[UserFaultKind, Counts] = field(default_factory=dict)

    def add(self, more: Result) -> None:
        """Count ``more`` in."""
        self.replies += more.replies
        self.refused += more.refused
        self.examples += more.examples
        for kind, counts in more.kinds.items():
            mine = self.kinds[kind]
            mine.planted, mine.found = mine.planted + counts.planted, mine.found + counts.found
            mine.named += counts.named
            mine.missed += counts.missed


async def watch(domain: Domain, task: Task, seed: int, user: Watched) -> None:
    """Play one dialogue of the domain's expert (its gold moves where it has none) with ``user``."""
    with suppress(_Found):
        await play(domain, task, seed, lambda opening, tools: moves_of(domain, task, seed), user)


async def measure(domain: Domain, tasks: Sequence[Task], seed: int) -> Result:
    """Every reply as it is, and one fault of each kind in each task's dialogue."""
    result = Result(kinds={kind: Counts() for kind in KINDS})
    for number, task in enumerate(tasks):
        clean = Watched(domain.scripted_user(task, seed), check_of(domain, task))
        await watch(domain, task, seed, clean)
        result.replies += clean.replies
        result.refused.update(refusal.kind for _, refusal in clean.refused)
        result.examples += [f"{task.id}: {text!r}: {refusal.reason}" for text, refusal in clean.refused]
        tools = _tools_of(domain, task)
        for kind in KINDS:
            rng = random.Random(f"{seed}/{task.id}/{kind}/{number}")
            last = clean.replies - 1 - (kind is K.ENDS_TOO_EARLY)
            if last < 1:
                continue
            scene = Scene(domain, task, rng, tools)
            fault = lambda text, kind=kind, scene=scene: _PLANTS[kind](scene, text)  # noqa: E731
            user = Planted(domain.scripted_user(task, seed), check_of(domain, task), rng.randint(1, last), fault)
            await watch(domain, task, seed, user)
            if user.planted is not None:
                _count(result.kinds[kind], kind, *user.planted)
    return result


def _tools_of(domain: Domain, task: Task) -> Sequence[ToolSchema]:
    environment = domain.environment()
    environment.reset(task, 0)
    tools = list(environment.tools())
    environment.close()
    return tools


def _count(counts: Counts, kind: UserFaultKind, text: str, refusal: Refusal | None) -> None:
    counts.planted += 1
    counts.found += refusal is not None
    counts.named += refusal is not None and refusal.kind is kind
    if refusal is None or refusal.kind is not kind:
        counts.missed.append(f"{text[:120]!r} -> {refusal.kind if refusal else 'passed'}")


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """``count`` tasks from all of a split, evenly."""
    step = max(1, len(tasks) // count)
    return list(tasks[::step][:count])


# ---- replies by hand


def read_replies(path: Path = REPLIES) -> list[Json]:
    """Each with persona, what the agent said before, the reply, and its fault (null if there is none)."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def judge_reply(record: Json, check: ReplyCheck) -> Refusal | None:
    """What is found in one reply."""
    for said in record["before"]:
        role, text = said
        check.heard(text) if role == "agent" else check.said(text)
    return found_in(check, record["reply"], first=not record["before"])


def check_for(who: Json) -> ReplyCheck:
    """The check of one whom the first records of a file name: by a persona's ``text`` alone, or by a ``task``."""
    if "task" in who:
        return check_of(*_placed(who["task"]))
    leak = LeakCheck(LEAK_WORDS, who["text"], rules=DEFAULT_PROMPT.text("", tools=True))
    return ReplyCheck(leak, TaskCheck(who["text"]))


@cache
def _placed(name: str) -> tuple[Domain, Task]:
    """The task of this id, and its domain."""
    domain = get_domain(name.partition("/")[0])
    return domain, next(task for split in SPLITS for task in domain.tasks(split) if task.id == name)


def measure_replies(path: Path = REPLIES, only: str = "") -> Result:
    """Precision and recall over the replies by hand; ``only``: of those whose persona's name begins so."""
    records = read_replies(path)
    people = {record["name"]: record for record in records if "name" in record}
    result = Result(kinds={kind: Counts() for kind in KINDS})
    for record in records:
        if "reply" not in record or not record["persona"].startswith(only):
            continue
        refusal = judge_reply(record, check_for(people[record["persona"]]))
        if record["fault"] is not None:
            kind = UserFaultKind(record["fault"])
            _count(result.kinds[kind], kind, record["reply"], refusal)
            continue
        result.replies += 1
        if refusal is not None:
            result.refused[refusal.kind] += 1
            result.examples.append(f"{record['persona']}: {record['reply']!r}: {refusal.reason}")
    return result


# ---- the page


def table(results: Mapping[str, Result]) -> str:
    """Markdown: recall by kind, a column each result; precision below."""
    lines = [kit.head("kind", *results)]
    for kind in (kind for kind in KINDS if any(r.kinds[kind].planted for r in results.values())):
        lines.append(kit.row(f"`{kind}`", *(_share(r.kinds[kind]) for r in results.values())))
    refused = [(r, r.refused.total(), sum(counts.found for counts in r.kinds.values())) for r in results.values()]
    lines.append(kit.row("good replies refused", *(f"{wrong} of {r.replies}" for r, wrong, _ in refused)))
    exact = (f"{found / (found + wrong):.3f}" if found + wrong else "-" for _, wrong, found in refused)
    return "\n".join([*lines, kit.row("precision", *exact)])


def _share(of: Counts) -> str:
    if not of.planted:
        return "-"
    other = f", {of.found - of.named} under another name" if of.named < of.found else ""
    return f"{of.found} of {of.planted}{other}"


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--tasks", type=int, default=60, help="of each domain and run")
    parser.add_argument("--runs", nargs="+", default=["test:1", "train:2", "validation:3"], metavar="SPLIT:SEED")
    chosen = parser.parse_args()
    results = {name: asyncio.run(_measured(name, chosen.runs, chosen.tasks)) for name in DOMAINS}
    by_hand = {
        path: {name: measure_replies(path, name) for name in DOMAINS} if path != REPLIES else {"all": measure_replies()}
        for path in (REPLIES, LOOKED_AT, APART)
    }
    parts = [f"`--tasks {chosen.tasks} --runs {' '.join(chosen.runs)}`, each `split:seed`:", table(results)]
    for path, found in by_hand.items():
        parts += [f"### {path.name}", table(found)]
    PAGE.write_text(kit.with_part(PAGE, "figures", "\n\n".join(parts), by=Path(__file__)), encoding="utf-8")
    print(PAGE)


async def _measured(name: str, runs: Sequence[str], count: int) -> Result:
    """All runs of one domain, each named by its split and its seed."""
    domain, whole = get_domain(name), Result(kinds={kind: Counts() for kind in KINDS})
    for run in runs:
        split, _, seed = run.partition(":")
        tasks = spread(domain.tasks(cast(Split, split)), count)
        whole.add(await measure(domain, tasks, int(seed)))
    return whole


if __name__ == "__main__":
    main()
