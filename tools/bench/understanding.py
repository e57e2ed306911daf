"""How many labeled messages scripted users understand: docs/benchmarks/understanding.md.

    python -m tools.bench.understanding [--folds 4 | --held-out]

*Held out* are the files of ``tests/data/users/heldout*``, and *confusable* those of ``tests/data/users/confusable``:
nothing was learnt from them. For them also how many messages are read as a proposal, to be agreed to, and are none, and
how many are not understood at all. ``--held-out`` measures these alone and leaves the other table as it is. Three more
figures for each domain are about ``tests/data/users/<domain>.jsonl``, which is learnt from. *Learnt from*: the
package's model. *Linear, left out*: each message read by a linear model, without the network, that learnt from the
others (and not from ``examples/*-after.jsonl``, which were written after some of these messages had failed). *Linear,
other domains*: read by one that learnt from the other domains only. A message counts when the user would react to it
as its label says (:func:`reaction`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from environments.kit.language.acts import FLAGS, Acts, Reader
from environments.kit.language.model import Model
from environments.kit.language.patterns import load
from tools import kit
from tools.train_reader import (
    DOMAINS,
    EXAMPLES,
    LABELLED,
    Line,
    composed,
    domain_of,
    lexicons,
    lines_of,
    seen,
    trained,
)

PAGE = kit.ROOT / "docs/benchmarks/understanding.md"
_LEARNT_HEAD = kit.head("domain", "messages", "learnt from", "linear, left out", "linear, other domains")


def labels(acts: Acts) -> frozenset[str]:
    """What was read, in the words of the labels."""
    found = {name for name, flag in FLAGS.items() if getattr(acts, flag)}
    found |= {f"ask:{fact}" for fact in acts.asks} | {f"instruct:{tool}" for tool in acts.instructs}
    return frozenset(found or {"unclear"})


def reaction(acts: Iterable[str]) -> frozenset[str]:
    """What of a message a user reacts to: to a transfer, else to what is asked, else to a proposal, and so on."""
    found = frozenset(acts)
    asked = frozenset(act for act in found if act.startswith(("ask:", "instruct:")))
    settled = found - asked - {"transfer", "propose", "wait", "offer"}
    for part in (found & {"transfer"}, asked, found & {"propose"}, settled, found & {"offer"}):
        if part:
            return part
    return found


def understood(reader: Reader, lines: Sequence[Line]) -> list[bool]:
    """For each message whether it is read as its label says."""
    return [reaction(labels(reader.read(line.say, line.wish))) == reaction(line.acts) for line in lines]


def wrong_yes(reader: Reader, lines: Sequence[Line]) -> int:
    """Messages that are read as a proposal, to be agreed to, and are none."""
    read = [reaction(labels(reader.read(line.say, line.wish))) for line in lines]
    return sum(got == {"propose"} and "propose" not in line.acts for got, line in zip(read, lines, strict=True))


def not_understood(reader: Reader, lines: Sequence[Line]) -> int:
    """Messages that make sense and of which none is made."""
    return sum(not reader.read(line.say, line.wish).understood for line in lines if "unclear" not in line.acts)


def readers(model: Model | None = None) -> dict[str, Reader]:
    """A reader for each domain."""
    return {domain: Reader(load(kit.ROOT / "environments" / domain / "words.yaml"), model) for domain in DOMAINS}


def labeled() -> dict[str, list[Line]]:
    """The messages that the model has learnt from, by domain; not those written for it alone."""
    return {domain: lines_of(LABELLED / f"{domain}.jsonl", domain) for domain in DOMAINS}


def unseen() -> list[Path]:
    """Labeled files that nothing was learnt from."""
    return sorted(path for path in LABELLED.glob("*/*.jsonl") if path.parent.name.startswith(("heldout", "confusable")))


def _share(parts: Sequence[bool]) -> str:
    return f"{sum(parts) / len(parts):.1%}"


def _without(out: Callable[[Line], bool]) -> dict[str, Reader]:
    """Readers whose model has not learnt from the messages that ``out`` is true of, nor from what these led to."""
    words = lexicons()
    first = [path for path in sorted(EXAMPLES.glob("*.jsonl")) if not path.stem.endswith("-after")]
    written = [line for path in first for line in lines_of(path, domain_of(path))]
    every = [*written, *(line for lines in labeled().values() for line in lines), *composed()]
    return readers(trained([seen(words[line.domain], line) for line in every if not out(line)]))


def left_out(folds: int) -> dict[str, list[bool]]:
    """Each message read by a model that has not learnt from it nor from its fold."""
    found: dict[str, list[bool]] = {domain: [] for domain in DOMAINS}
    lines = [line for lines in labeled().values() for line in lines]
    random.Random(0).shuffle(lines)
    for fold in range(folds):
        part = lines[fold::folds]
        hidden = {(line.domain, line.say) for line in part}
        made = _without(lambda line, hidden=hidden: (line.domain, line.say) in hidden)  # type: ignore[misc]
        for domain in DOMAINS:
            found[domain] += understood(made[domain], [line for line in part if line.domain == domain])
    return found


def other_domains() -> dict[str, list[bool]]:
    """Each domain's messages read by a model that learnt from the other domains."""
    every = labeled()
    return {
        domain: understood(_without(lambda line, domain=domain: line.domain == domain)[domain], every[domain])  # type: ignore[misc]
        for domain in DOMAINS
    }


def _unseen() -> Iterator[str]:
    own = readers()
    every = {f"{path.parent.name}/{path.stem}": lines_of(path, path.stem) for path in unseen()}
    for domain in DOMAINS:
        held = [lines for name, lines in every.items() if name.startswith("heldout") and name.endswith(f"/{domain}")]
        every[f"**all held out/{domain}**"] = [line for lines in held for line in lines]
    yield kit.head("held out", "messages", "understood", "read as a proposal, wrongly", "not understood")
    for name, lines in every.items():
        reader = own[lines[0].domain]
        wrong = (wrong_yes(reader, lines), not_understood(reader, lines))
        yield kit.row(name, len(lines), _share(understood(reader, lines)), *wrong)


def _rows(folds: int) -> Iterator[str]:
    own, every = readers(), labeled()
    crossed, others = left_out(folds), other_domains()
    yield _LEARNT_HEAD
    for domain, lines in every.items():
        shares = (understood(own[domain], lines), crossed[domain], others[domain])
        yield kit.row(domain, len(lines), *map(_share, shares))


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head, _, figures = PAGE.read_text(encoding="utf-8").partition("<!-- figures -->")
    command = f"python -m tools.bench.understanding {'--held-out' if options.held_out else f'--folds {options.folds}'}"
    held_out = f"{datetime.now(UTC):%Y-%m-%d}, `{command}`\n\n" + "\n".join(_unseen())
    rest = figures[figures.index(_LEARNT_HEAD) :].strip() if options.held_out else "\n".join(_rows(options.folds))
    PAGE.write_text(f"{head}<!-- figures -->\n\n{held_out}\n\n{rest}\n", encoding="utf-8")
    print(held_out, rest, sep="\n\n")


if __name__ == "__main__":
    main()
