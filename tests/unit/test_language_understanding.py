"""Labeled messages are read as their labels say, and what is learnt is what the manifest pins.

Not covered: how messages are read that nobody has labeled. ``tests/data/users/<domain>.jsonl`` have been learnt
from, so that their floor only holds the files, words and weights together; the floors of ``heldout*`` are figures
about unseen sentences (docs/benchmarks/understanding.md).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from environments.kit.language import model, network
from environments.kit.language.acts import Acts, Reader
from mua.utils.errors import MuaError
from tests.tables import cases_of, table
from tools.bench.understanding import not_understood, readers, understood, unseen, wrong_yes
from tools.train_reader import DOMAINS, LABELLED, ROOT, domain_of, lines_of, sources

cases = cases_of("language_understanding")
TABLE = table("language_understanding")

FILES = [path for path in sorted(LABELLED.glob("*.jsonl")) if domain_of(path) in DOMAINS]
FLOOR = 0.95
FLOORS = TABLE["FLOORS"]


QUICK = ("heldout2", "heldout4")
"""Sets that every run of the tests reads; the slow ones read all."""


def some(paths: Sequence[Path]) -> Iterator[Any]:
    """Each of ``paths`` as a case, those that take seconds for the slow tests."""
    for path in paths:
        yield pytest.param(path, marks=() if path.parent.name in QUICK else pytest.mark.slow)


@pytest.fixture(scope="module")
def of_domain() -> dict[str, Reader]:
    return readers()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_labeled_messages_are_understood(path: Path, of_domain: dict[str, Reader]) -> None:
    lines = lines_of(path, domain_of(path))
    right = understood(of_domain[domain_of(path)], lines)
    wrong = [line.say for line, one in zip(lines, right, strict=True) if not one]
    assert len(wrong) <= (1 - FLOOR) * len(lines), wrong


@pytest.mark.parametrize("path", some(unseen()), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_messages_that_nothing_was_learnt_from_are_understood(path: Path, of_domain: dict[str, Reader]) -> None:
    reader, lines = of_domain[domain_of(path)], lines_of(path, domain_of(path))
    right = understood(reader, lines)
    assert sum(right) >= FLOORS[path.parent.name][path.stem] * len(lines)
    assert wrong_yes(reader, lines) <= 0.03 * len(lines)
    assert not_understood(reader, lines) <= 0.03 * len(lines)


def test_nothing_is_learnt_from_held_out_messages() -> None:
    learnt_from = json.loads(model.MANIFEST.read_text(encoding="utf-8"))["learnt_from"]
    held = {line.say for path in unseen() for line in lines_of(path, domain_of(path))}
    assert held
    assert not {str(path.relative_to(ROOT)) for path in unseen()} & learnt_from.keys()
    learnt = {line.say for path in sources() for line in lines_of(path, domain_of(path))}
    assert len(held & learnt) <= 0.02 * len(held), sorted(held & learnt)


@pytest.mark.parametrize(
    ("domain", "wish", "say", "acts"),
    [
        ("retail", "return", "I've processed your return request.", Acts(done=True)),
        ("retail", "cancel", "Which of your orders would you like me to cancel?", Acts(asks=frozenset({"order"}))),
        (
            "help_desk",
            "cancel",
            "I was unable to find that order. Could you double-check the number?",
            Acts(asks=frozenset({"order"})),
        ),
    ],
)
def test_cases_from_real_use(domain: str, wish: str, say: str, acts: Acts, of_domain: dict[str, Reader]) -> None:
    assert of_domain[domain].read(say, wish) == acts


def test_an_apology_and_an_offer_to_help_do_not_hide_a_question(of_domain: dict[str, Reader]) -> None:
    read = of_domain["help_desk"].read(
        "I'm sorry to hear that! I can help you cancel it; may I have your name?", "cancel"
    )
    assert read.asks == {"name"}
    assert (read.refuses, read.done, read.proposes) == (False, False, False)


def test_instructions_come_in_order_of_mention(of_domain: dict[str, Reader]) -> None:
    read = of_domain["telecom"].read("Please turn off the VPN, then run a speed test.", "slow_data")
    assert read.instructs == ("set_vpn", "run_speed_test")


def test_a_question_that_repeats_a_value_names_the_fact(of_domain: dict[str, Reader]) -> None:
    read = of_domain["help_desk"].read("Is your order number K7?", "cancel")
    assert (read.proposes, read.confirms) == (True, "order")


@pytest.mark.parametrize(
    "say", ["", "...", "🙂", "asdkj qwe lkj", "你好，请问您的订单号是多少？", "{}", "\n\n", "?" * 50]
)
def test_nonsense_is_not_understood(say: str, of_domain: dict[str, Reader]) -> None:
    assert not of_domain["help_desk"].read(say, "cancel").understood


@pytest.mark.parametrize("part", ["could you please ", "a ", "what is your name and order number ", "? ", "a\n"])
def test_an_endless_message_is_read_in_time(part: str, of_domain: dict[str, Reader]) -> None:
    start = time.process_time()
    of_domain["help_desk"].read(part * 50_000, "cancel")
    assert time.process_time() - start < 3


def test_a_slip_of_the_pen_is_read_over(of_domain: dict[str, Reader]) -> None:
    assert of_domain["retail"].read("Could you plaese give me your adress?", "home").asks == {"address"}


def test_weights_are_what_the_manifest_pins_and_examples_have_not_changed_since() -> None:
    pinned = json.loads(model.MANIFEST.read_text(encoding="utf-8"))
    for file, key in ((model.FILE, "weights"), (network.FILE, "network")):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == pinned[key]
    for name, digest in pinned["learnt_from"].items():
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == digest, f"{name}: run tools.train_reader"


@pytest.mark.parametrize("part", [model, network], ids=["linear", "network"])
def test_changed_weights_are_refused(part: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / part.FILE.name
    other.write_bytes(b"nothing")
    monkeypatch.setattr(part, "FILE", other)
    with pytest.raises(MuaError, match="restore it"):
        model.learnt.__wrapped__()


@cases
def test_a_word_is_split_into_the_longest_known_pieces(word: str, split: list[str]) -> None:
    known = {piece: at for at, piece in enumerate(["[UNK]", "x", "o", "'", "clock", "re", "refund", "##s", "##fund"])}
    assert network.pieces(word, known) == [known[piece] for piece in split]


def test_what_the_network_was_not_taught_is_left_to_the_linear_model() -> None:
    words = {"facts": {"shoe_size": {"named": ["shoe size"]}}, "deeds": {"fit": ["<fit>"]}, "values": ["\\d+"]}
    assert Reader(words).read("Could you please tell me your shoe size?", "fit").asks == {"shoe_size"}
