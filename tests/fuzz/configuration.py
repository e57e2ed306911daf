"""Configuration files and overrides: each loads, or is refused in lines that name the right file, line and key.

What loads must survive being written and read again. Not covered: depth, aliases that multiply, size and encodings
(tests/unit/test_config_errors.py), and what a run finds wrong in a configuration that loads.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mua.config.load import dump_config, load_config
from mua.config.schema import ExperimentConfig
from mua.utils.errors import ConfigError
from tests.fuzz._mutate import drawn, mutated_bytes, outcome, scratch

CASES = 1000
CONFIGS = Path(__file__).parents[2] / "configs"
_KEY = re.compile(r"(?P<indent> *)(?P<name>[a-z_][a-z_0-9]*):(?P<value> [^#\n]*)?(?: *#.*)?$")
_PLACED = re.compile(r"(?P<file>.+?\.yaml):(?P<line>\d+): (?:(?P<key>[^ :]+): )?")
_FREE = {"options", "extra", "mix", "stages"}
_TOKENS = (
    "&a ", "*a", "*zz", "!!int ", "!!str ", "!!float ", "!!bool ", "!!null ", "!!map ", "!!seq ", "!!binary ",
    "!!set ", "!!timestamp ", "!!python/object:os.system ", "!foo ", "!<tag:a%0Ab> ", "<<: ", "<<: *a", "- ", "? ",
    ": ", "{", "}", "[", "]", "{a: 1}", "[1, 2]", "|\n", ">\n", "|9\n", "'", '"', '"\\ud800"', '"\\U00110000"',
    '"\\UFFFFFFFF"', '"\\0"', '"\\x"', '"a\\nb"', "%YAML 1.2\n---\n", "%YAML 9.9\n", f"%YAML {'9' * 5000}.1\n---\n",
    "%FOO\n", "\n---\n", "\n...\n", "9" * 30, "9" * 5000, "0x"+"f" * 5000, "1e999", ".inf", ".nan", "-.inf", "~",
    "null", "true", "2024-01-01", "1:30", "${", "${HOME}", "${NO_SUCH_VARIABLE}", "${A:-b}", "\t", " ", "  ", "\n",
    "#", "@", "`", "\u2028", "\x85", "\ufeff", "é", "🙂", "\x00", "\x1b", "=", "x" * 3000, "\ud7ff", "\ufffe",
)  # fmt: skip


@dataclass
class Case:
    """Files to write, what is loaded, and what must come of it."""

    folder: Path
    main: str
    files: dict[str, bytes]
    overrides: list[str] = field(default_factory=list)
    wrong_at: tuple[str, int, str] | None = None
    """File, line and key that must be reported."""
    refused: bool = False
    foreign: list[str] = field(default_factory=list)
    """How messages may begin besides with the name of a file in ``folder``."""
    note: str = ""


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` cases, one line each."""
    failures = []
    for number, rng in drawn("configuration", cases, seed):
        with scratch() as folder:
            case = _drawn(folder, rng)
            failures += [f"{number} ({case.note}): {fault}" for fault in _faults(case)]
    return failures


@cache
def _originals() -> dict[str, bytes]:
    """All configurations by file name."""
    return {path.name: path.read_bytes() for path in sorted(CONFIGS.rglob("*.yaml"))}


def _drawn(folder: Path, rng: random.Random) -> Case:
    files = dict(_originals())
    main = rng.choice(sorted(files))
    case = Case(folder, main, files)
    target = rng.choice(_chain(files, main))
    mutate = rng.choices(list(_MUTATIONS), weights=list(_MUTATIONS.values()))[0]
    mutate(case, target, rng)
    case.note = f"{mutate.__name__[1:]} of {target} in {main}" + (f"; {case.note}" if case.note else "")
    return case


def _chain(files: dict[str, bytes], name: str) -> list[str]:
    """A file and those it extends."""
    found = re.search(rb"^extends: (\S+)", files[name], re.MULTILINE)
    return [name, *(_chain(files, found[1].decode()) if found else [])]


def _faults(case: Case) -> list[str]:
    for name, data in case.files.items():
        (case.folder / name).write_bytes(data)
    path = case.folder / case.main
    config, error, faults = outcome(lambda: load_config(path, case.overrides), (ConfigError,))
    if faults:
        return faults
    if error is not None:
        return _judged(case, str(error).split("\n"))
    if case.wrong_at or case.refused:
        return ["it loads and should not"]
    return _round_trip(case.folder, config)


def _judged(case: Case, lines: list[str]) -> list[str]:
    """Whether every line of the error begins with a place, and the places are right."""
    faults = []
    begins = (f"{case.folder}/", "command line: ", *case.foreign)
    for line in lines:
        if not line.startswith(begins):
            faults.append(f"names no file: {line[:200]!a}")
        elif (found := _PLACED.match(line)) and (fault := _misplaced(case, found, line)):
            faults.append(f"{fault}: {line[:300]!a}")
    if case.wrong_at:
        file, number, key = case.wrong_at
        place = f"{case.folder / file}:{number}: {key}"
        if not any(line.startswith((f"{place}:", f"{place}.")) for line in lines):
            faults.append(f"{file}:{number}: {key} is not among the places named: {lines[0][:300]!a}")
    return faults


def _misplaced(case: Case, found: re.Match[str], line: str) -> str | None:
    path, number, key = Path(found["file"]), int(found["line"]), found["key"]
    if not path.is_file():
        return None
    # As an editor shows it, and PyYAML in a file that holds a lone carriage return.
    text = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not 1 <= number <= len(text):
        return f"a line that {path.name} of {len(text)} lines does not have"
    at_no_key = ("not valid YAML", "not UTF-8", "a key must be a plain name")
    if any(words in line for words in at_no_key) or number == 1 or key is None:
        return None
    # A rule over several keys is placed at the first of them that is written somewhere; its text names them all.
    if any(words in line for words in ("64 bits", "its YAML tag", "is not supported here", "the text holds")):
        return None  # placed where the value begins, which may be a line below its key
    words = key.split(".")[-1:] if "unknown key" in line else re.findall(r"\w+|<<", line[found.start("key") :])
    return None if any(word in text[number - 1] for word in words) else f"the line holds nothing of {key}"


def _round_trip(folder: Path, config: ExperimentConfig) -> list[str]:
    if "${" in (text := dump_config(config)):
        return []  # a study's lists are keyed by an alias, and it is never written
    (folder / "again.yaml").write_text(text, encoding="utf-8")
    again, error, faults = outcome(lambda: load_config(folder / "again.yaml"), (ConfigError,))
    if faults or error is not None:
        return faults or [f"what was loaded cannot be read again: {error}"]
    return [] if dump_config(again) == text else ["read again it is another configuration"]


# ---- mutations


def _bytes(case: Case, target: str, rng: random.Random) -> None:
    case.files[target] = mutated_bytes(case.files[target], rng)


def _tokens(case: Case, target: str, rng: random.Random) -> None:
    text = case.files[target].decode()
    for _ in range(rng.randint(1, 2)):
        # At the beginning of a value, of a line, or anywhere.
        places = [m.end() for m in re.finditer(rng.choice((r": ", r"\n", r"\n +", r"")), text)] or [0]
        at = rng.choice(places)
        token = rng.choice(_TOKENS)
        case.note += f" {token[:20]!a}"
        if rng.random() < 0.5:
            text = text[:at] + token + text[at:]
        else:
            end = text.find("\n", at)
            text = text[:at] + token + (text[end:] if end >= 0 else "")
    case.files[target] = text.encode("utf-8", "surrogatepass")


Key = tuple[int, int, tuple[str, ...], str]
"""Line (from 0), indentation, path and what stands behind it."""
Place = tuple[int, tuple[str, ...]] | None
Change = Callable[[list[str], Key], Place]


def _keys(text: str) -> list[Key]:
    """Every key in block style."""
    found: list[Key] = []
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n")):
        if match := _KEY.match(line):
            indent = len(match["indent"])
            above = [(depth, name) for depth, name in above if depth < indent] + [(indent, match["name"])]
            found.append((number, indent, tuple(name for _, name in above), (match["value"] or "").strip()))
    return [key for key in found if not _FREE & set(key[2])]


def _at_a_key(
    case: Case,
    target: str,
    rng: random.Random,
    fits: Callable[[Key], object],
    change: Callable[[list[str], Key], Place],
) -> None:
    """Change the lines of a file at a drawn key that ``fits``; ``change`` says which line and key must be reported."""
    lines = case.files[target].decode().split("\n")
    keys = _keys("\n".join(lines))
    place = change(lines, rng.choice([key for key in keys if fits(key)] or keys))
    case.files[target] = "\n".join(lines).encode()
    case.wrong_at = place and (target, place[0], ".".join(place[1]))


def _unknown_key(case: Case, target: str, rng: random.Random) -> None:
    def change(lines: list[str], key: Key) -> Place:
        number, indent, path, _ = key
        lines.insert(number, f"{' ' * indent}zzq: {rng.choice(('1', 'x', '[1]', '{a: 1}', '', 'null'))}")
        if comment := rng.choice(("", "", "# one\u2028two", "# one\x85two", "# \u2029")):
            # White space that only PyYAML takes for the end of a line; it stands where the rest is a comment again.
            lines.insert(number, comment.replace("two", "# two"))
            number += 1
        return number + 1, (*path[:-1], "zzq")

    _at_a_key(case, target, rng, lambda key: True, change)


def _key_twice(case: Case, target: str, rng: random.Random) -> None:
    def change(lines: list[str], key: Key) -> Place:
        lines.insert(key[0] + 1, lines[key[0]])
        return key[0] + 2, key[2]

    _at_a_key(case, target, rng, lambda key: key[3], change)


def _misspelt_key(case: Case, target: str, rng: random.Random) -> None:
    def change(lines: list[str], key: Key) -> Place:
        number, indent, path, value = key
        name = path[-1] + rng.choice(("s", "_", "x9", "q"))
        lines[number] = f"{' ' * indent}{name}: {value}" if value else f"{' ' * indent}{name}:"
        return number + 1, (*path[:-1], name)

    _at_a_key(case, target, rng, lambda key: key[2][-1] != "extends", change)


def _wrong_type(case: Case, target: str, rng: random.Random) -> None:
    def change(lines: list[str], key: Key) -> Place:
        number, indent, path, _ = key
        lines[number] = f"{' ' * indent}{path[-1]}: " + rng.choice(("{zzq: [[1]]}", "[{zzq: 1}]"))
        return number + 1, path

    _at_a_key(case, case.main, rng, lambda key: key[3], change)  # the file that is loaded has the last word


def _tab(case: Case, target: str, rng: random.Random) -> None:
    def change(lines: list[str], key: Key) -> Place:
        lines[key[0]] = "\t" + lines[key[0]].lstrip()
        return None

    _at_a_key(case, target, rng, lambda key: key[1], change)


def _extends(case: Case, target: str, rng: random.Random) -> None:
    folder, text = case.folder, re.sub(r"(?m)^extends: .*\n", "", case.files[target].decode())
    named = rng.choice(_EXTENDED)
    if make := _MADE.get(named):
        make(case)
    value = named.replace("THIS", target).replace("FOLDER", str(folder))
    case.files[target] = f"extends: {value}\n{text}".encode()
    case.foreign = ["/dev/", "/proc/", str(folder)]
    case.note = f"extends: {value[:60]!a}"
    case.refused = True


def _link_loop(case: Case) -> None:
    (case.folder / "loop.yaml").symlink_to("loop2.yaml")
    (case.folder / "loop2.yaml").symlink_to("loop.yaml")


def _circle(case: Case) -> None:
    case.files |= {f"c{n}.yaml": f"extends: c{(n + 1) % 3}.yaml\nname: x\n".encode() for n in range(3)}


def _diamonds(case: Case) -> None:
    case.files |= {f"d{n}.yaml": f"extends: [d{n + 1}.yaml, d{n + 1}.yaml]\n".encode() for n in range(40)}
    case.files["d40.yaml"] = b"name: x\n"


def _long_chain(case: Case) -> None:
    case.files |= {f"l{n}.yaml": f"extends: l{n + 1}.yaml\n".encode() for n in range(2000)}
    case.files["l2000.yaml"] = b"name: x\n"


def _unreadable(case: Case) -> None:
    (case.folder / "sub").mkdir()
    case.files["text.yaml"] = b"just text\n"


_MADE: dict[str, Callable[[Case], None]] = {
    "sub": _unreadable, "text.yaml": _unreadable, "fifo.yaml": lambda case: os.mkfifo(case.folder / "fifo.yaml"),
    "loop.yaml": _link_loop, "c0.yaml": _circle, "d0.yaml": _diamonds, "l0.yaml": _long_chain,
}  # fmt: skip
_EXTENDED = (
    "THIS", "[THIS]", "../gone.yaml", "gone.yaml", "''", ".", "..", "FOLDER", *_MADE, "/dev/zero", "/dev/null",
    "/proc/self/mem", '"a\\0b.yaml"', '"a\\nb.yaml"', '"\\ud800.yaml"', "x" * 5000, "a/" * 2000, "{a: 1}", "[1]",
    "[[THIS]]", "7", "true", "null", "${NO_SUCH_VARIABLE}", "${", "|",
)  # fmt: skip


def _override(case: Case, target: str, rng: random.Random) -> None:
    keys = [".".join(path) for _, _, path, _ in _keys(_originals()[case.main].decode())] or ["name"]
    key = rng.choice((rng.choice(keys), *_ODD_KEYS))
    value = rng.choice(("1", "x", "", "[1]", "{a: 1}", *_TOKENS, "[" * 5000, "{a: " * 60 + "1" + "}" * 60))
    text = rng.choice((f"{key}={value}", f"{key}={value}", f"{key}={value}", key, "", "=", "==", f" {key} = {value}"))
    case.overrides = [text] if rng.random() < 0.7 else [text, rng.choice(keys) + ".zzq=1"]
    case.note = f"{text[:60]!a}"


_ODD_KEYS = (
    "", ".", "a.", ".a", "a..b", "zzq", "a." * 100_000 + "a", "a." * 60 + "a", "name.a", "model.path.a", "sft.data",
    "user.llm.extra.a.b.c", "model.0", "evaluation.domains.0", "environment.mix.retail", "\x00", "a\nb", "\ud800",
    "x" * 10_000, "extends", "<<", "model.\x1b[2J", "environment.options.a",
)  # fmt: skip


_MUTATIONS: dict[Callable[[Case, str, random.Random], None], int] = {
    _bytes: 25, _tokens: 25, _unknown_key: 12, _key_twice: 6, _misspelt_key: 8, _wrong_type: 8, _tab: 4, _extends: 14,
    _override: 20,
}  # fmt: skip
