"""Learn what messages do from labeled ones, and pin the result (environments/kit/language/weights.json.gz,
manifest.json).

    python -m tools.train_reader

Labeled messages are those of ``environments/kit/language/examples/*.jsonl`` and of ``tests/data/users/<domain>.jsonl``
for the four domains, and sentences made of ``frames.yaml`` and ``slots.yaml`` (frames of requests, proposals, refusals,
... filled with each domain's facts and deeds). Other files under ``tests/data/users`` are never read here: they
measure.

The loss is the cross entropy of a noisy or over a message's sentences plus a quadratic penalty, minimized by L-BFGS
from zero, so that a run gives the same weights again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from environments.kit.language.features import act_features, fact_features, in_question, read
from environments.kit.language.lexicon import Lexicon
from environments.kit.language.model import ACTS, FILE, MANIFEST, Model, Weights, packed
from environments.kit.language.patterns import load
from environments.kit.language.rules import Rules
from environments.kit.language.text import sentences
from tools.kit import ROOT

DOMAINS = ("help_desk", "retail", "airline", "telecom")
EXAMPLES = ROOT / "environments/kit/language/examples"
LABELLED = ROOT / "tests/data/users"
PENALTY = 0.3
STEPS = 30
STEP = 0.02
"""Resolution of the weights in the file."""
_MARK = "| "
_SICK = ("no_service", "no_data", "slow_data", "no_mms")
"""Wishes of those whose phone is to be repaired."""

Features = list[set[str]]
"""Of each sentence of one message."""


@dataclass(frozen=True, slots=True)
class Line:
    """One labeled message."""

    domain: str
    say: str
    wish: str
    acts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Seen:
    """A labeled message as features."""

    line: Line
    acts: Features
    facts: dict[str, Features]


def lines_of(path: Path, domain: str) -> list[Line]:
    """The labeled messages of a file."""
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
    return [Line(domain, row["say"], row["wish"], frozenset(row["acts"])) for row in rows]


def sources() -> list[Path]:
    """The files that are learnt from."""
    written = sorted(EXAMPLES.glob("*.jsonl"))
    return [*written, *(path for path in (LABELLED / f"{domain}.jsonl" for domain in DOMAINS) if path.exists())]


def domain_of(path: Path) -> str:
    """The domain that a file of messages is named after, alone, before or behind who wrote it."""
    return next((domain for domain in DOMAINS if domain in path.stem), "")


def composed() -> Iterator[Line]:
    """Sentences made of frames, the same at every call."""
    rng = random.Random(0)
    frames, slots = load(EXAMPLES / "frames.yaml"), load(EXAMPLES / "slots.yaml")
    for domain, slot in slots.items():
        for kind, texts in frames.items():
            if "tool" in kind:
                yield from _told(rng, domain, slot, kind, texts)
                continue
            for text in texts:
                for _ in range(1 + (kind == "ask")):
                    yield _filled(rng, domain, slot, kind, text)


def _told(rng: random.Random, domain: str, slots: Any, kind: str, frames: Sequence[str]) -> Iterator[Line]:
    """Sentences that ask for something on the phone; wordings that begin with "?" are questions as they stand."""
    tools = slots.get("tools", {})
    done = {"done"} if kind.startswith("done") else set()
    for frame in frames if tools else ():
        for _ in range(8):
            names = rng.sample(sorted(tools), 2 if "{T2}" in frame else 1)
            say = frame
            for place, name in zip(("T1", "T2") if len(names) > 1 else ("T",), names, strict=True):
                say = say.replace(f"{{{place}}}", rng.choice([text for text in tools[name] if text[0] != "?"]))
            acts = frozenset(f"instruct:{name}" for name in names) | done
            yield Line(domain, say[:1].upper() + say[1:], rng.choice(_SICK), acts)
    for name, texts in tools.items() if kind == "tool" else ():
        for text in texts:
            if text[0] == "?":
                yield Line(domain, f"{text[2:]}?", rng.choice(_SICK), frozenset({f"instruct:{name}"}))


def _filled(rng: random.Random, domain: str, slots: Any, kind: str, frame: str) -> Line:
    wish = rng.choice(list(slots["deeds"]))
    values = dict(zip("VGSPN", slots["deeds"][wish], strict=True))
    usable = [name for name, words in slots["facts"].items() if _fits(frame, words)]
    names = rng.sample(usable, 2) if kind == "ask2" else [rng.choice(usable)]
    for place, name in enumerate(names, 1):
        nouns, clauses = _nouns(slots["facts"][name]), _clauses(slots["facts"][name])
        number = str(place) if kind == "ask2" else ""
        values |= {f"F{number}": rng.choice(nouns or [""]), f"W{number}": rng.choice(clauses or [""])}
    say = frame
    for slot, value in values.items():
        say = say.replace(f"{{{slot}}}", value)
    acts = frozenset(f"ask:{name}" for name in names) if kind.startswith("ask") else frozenset({kind})
    return Line(domain, say[:1].upper() + say[1:] if frame[0] == "{" else say, wish, acts)


def _fits(frame: str, words: Sequence[str]) -> bool:
    """Whether the fact has what the frame asks for."""
    return ("{F" not in frame or bool(_nouns(words))) and ("{W" not in frame or bool(_clauses(words)))


def _nouns(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith(_MARK)]


def _clauses(words: Sequence[str]) -> list[str]:
    return [word.removeprefix(_MARK) for word in words if word.startswith(_MARK)]


def lexicons() -> dict[str, Lexicon]:
    """Each domain's words."""
    return {domain: Lexicon(load(ROOT / "environments" / domain / "words.yaml")) for domain in DOMAINS}


def seen(lexicon: Lexicon, line: Line) -> Seen:
    """The features of one message."""
    found = read(lexicon, Rules(lexicon), sentences(line.say), line.wish)
    names = in_question(lexicon, found)
    facts = {name: [fact_features(lexicon, one, line.wish, name) for one in found] for name in names}
    return Seen(line, [act_features(lexicon, one, line.wish) for one in found], facts)


def trained(messages: Sequence[Seen]) -> Model:
    """The model that these messages teach."""
    does = [[float(any(a.split(":")[0] == act for a in one.line.acts)) for act in ACTS] for one in messages]
    pairs = [(one, name, features) for one in messages for name, features in one.facts.items()]
    asked = [[float(bool({f"ask:{name}", f"instruct:{name}"} & one.line.acts))] for one, name, _ in pairs]
    return Model(fitted([one.acts for one in messages], does), fitted([features for _, _, features in pairs], asked))


def fitted(messages: Sequence[Features], labels: Sequence[Sequence[float]]) -> Weights:
    """Weights of the features that occur in at least two messages; ``labels`` is [messages, classes]."""
    count = Counter(name for message in messages for name in set().union(*message))
    rows = {name: row for row, name in enumerate(sorted(name for name, times in count.items() if times > 1))}
    bags = [(at, [rows[name] for name in sorted(f) if name in rows]) for at, m in enumerate(messages) for f in m]
    starts = torch.tensor(np.cumsum([0, *(len(bag) for _, bag in bags[:-1])]))
    names = torch.tensor([row for _, bag in bags for row in bag])
    owner, target = torch.tensor([at for at, _ in bags]), torch.tensor(labels)
    weights = torch.zeros(len(rows), target.shape[1], requires_grad=True)
    search = torch.optim.LBFGS([weights], max_iter=STEPS, history_size=8, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        score = torch.nn.functional.embedding_bag(names, weights, starts, mode="sum")
        none = torch.zeros_like(target).index_add(0, owner, torch.nn.functional.logsigmoid(-score)).clamp(max=-1e-6)
        some = torch.log(-torch.expm1(none))
        value = -(target * some + (1 - target) * none).sum() + PENALTY * (weights * weights).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(loss)  # type: ignore[no-untyped-call]
    return Weights(rows, weights.detach().numpy())


def main() -> None:
    torch.set_num_threads(1)
    words = lexicons()
    lines = [line for path in sources() for line in lines_of(path, domain_of(path))] + list(composed())
    model = trained([seen(words[line.domain], line) for line in lines])
    text = json.dumps({"acts": packed(model.acts, STEP), "facts": packed(model.facts, STEP)})
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    learnt_from = {str(p.relative_to(ROOT)): _digest(p) for p in [*sources(), *sorted(EXAMPLES.glob("*.yaml"))]}
    pinned = json.loads(MANIFEST.read_text(encoding="utf-8"))
    pinned |= {"weights": _digest(FILE), "messages": len(lines), "learnt_from": learnt_from}
    MANIFEST.write_text(json.dumps(pinned, indent=2) + "\n", encoding="utf-8")
    sizes = f"{len(model.acts.rows)} + {len(model.facts.rows)} features, {FILE.stat().st_size:,} bytes"
    print(f"{len(lines)} messages, {sizes}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
