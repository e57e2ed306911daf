"""How many labeled messages scripted users understand: docs/benchmarks/understanding.md.

    python -m tools.bench.understanding

*Held out* are the files of ``tests/data/users/heldout*``, and *confusable* those of ``tests/data/users/confusable``:
nothing was learnt from them. Also how many messages are read as a proposal, to be agreed to, and are none, and how many
are not understood at all. A message counts when the user would react to it as its label says (:func:`reaction`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from environments.kit.language.acts import FLAGS, Acts, Reader
from environments.kit.language.model import Model
from environments.kit.language.patterns import load
from tools import kit
from tools.train_reader import (
    DOMAINS,
    LABELLED,
    Line,
    lines_of,
)

PAGE = kit.ROOT / "docs/benchmarks/understanding.md"


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


def unseen() -> list[Path]:
    """Labeled files that nothing was learnt from."""
    return sorted(path for path in LABELLED.glob("*/*.jsonl") if path.parent.name.startswith(("heldout", "confusable")))


def _share(parts: Sequence[bool]) -> str:
    return f"{sum(parts) / len(parts):.1%}"


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


def main() -> None:
    kit.parser(__doc__).parse_args()
    PAGE.write_text(kit.with_part(PAGE, "figures", "\n".join(_unseen()), by=Path(__file__)), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
