"""The shape of the project in figures: lines of code by room, functions, circles of imports, names that occur twice.

    python -m tools.house [--check]

A line of code is neither blank nor a comment nor part of a docstring. A room is a folder or file of ``mua``, or
another top folder; the core is ``mua`` with ``megatron_bridge``. Imports inside functions and under ``TYPE_CHECKING``
count too.

``--check`` prints what must not be, and the exit status is 1 if there is any: a circle of files or rooms, an import
that points up :data:`FLOORS`, a private name of another project's package outside ``mua/compat``, a class or module
name that occurs twice in the core. Not seen: modules that are found by a text, and attributes of objects.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools import kit

ROOT = Path(__file__).resolve().parents[1]
CORE = ("mua", "megatron_bridge")
CHECKED = (*CORE, "environments", "workbench", "tools")
OF_OTHER_PROCESSES = ("mua/compat/sglang_cpu/shim/", "mua/compat/sglang_keys/plugin/")
"""Plugins of SGLang's servers, whose names SGLang prescribes."""
FLOORS = (
    ("mua", "mua.types", "mua.utils"),
    ("megatron_bridge",),
    ("mua.config", "mua.compat"),
    ("mua.observe", "mua.store", "mua.algorithms"),
    ("mua.environment", "mua.engine", "mua.megatron", "mua.tokens"),
    ("mua.users",),
    ("mua.rollout", "mua.launch"),
    ("mua.trainer",),
    ("mua.view",),
    ("environments", "workbench"),
    ("mua.cli",),
    ("tools",),
    ("tests",),
)
"""From the ground up. A room imports rooms of lower floors only; see docs/architecture.md."""
SIDEWAYS = {
    ("workbench", "environments"): "the workbench writes new domains with the kit of domains",
}
KEPT_FROM = {"environments": ("mua.engine", "mua.launch", "mua.megatron", "mua.launch.plan", "mua.trainer")}
"""What a room does not import although it lies below."""
TWICE: dict[str, str] = {}
"""Class and module names that may occur twice in the core, with the reason."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One file of Python."""

    path: str
    """From the root, with slashes."""
    text: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str:
        return room_of(self.module)

    @property
    def core(self) -> bool:
        return self.path.startswith(tuple(f"{folder}/" for folder in CORE))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))

    @property
    def code(self) -> int:
        """Lines of code."""
        docstrings = {
            line
            for node in self.nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return len({token.start[0] for token in tokens if token.type not in _NO_CODE} - docstrings)

    def imported(self) -> Iterator[tuple[str, str, str]]:
        """Of each import the module, the name taken from it ("" for the module itself) and what it is called here."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, name.name, name.asname or name.name) for name in node.names)
            elif isinstance(node, ast.Import):
                yield from ((name.name, "", name.asname or name.name.partition(".")[0]) for name in node.names)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("mua.") else 1])


def sources(root: Path = ROOT) -> list[Source]:
    """Every file of the rooms and of the tests."""
    paths = (path for folder in (*CHECKED, "tests") for path in sorted((root / folder).rglob("*.py")))
    return [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


# ---- imports


def imports(files: Iterable[Source]) -> dict[str, set[str]]:
    """Module -> the modules among ``files`` that it imports."""
    files = list(files)
    known = {file.module for file in files}
    found: dict[str, set[str]] = {file.module: set() for file in files}
    for file in files:
        for module, name, _ in file.imported():
            found[file.module] |= {f"{module}.{name}" if f"{module}.{name}" in known else module} & known
        found[file.module].discard(file.module)
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups in which everything is reached from everything."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(o for o in reached[n] if n in reached.get(o, ()))) for n in graph if n in reached[n]}
    return sorted(map(list, groups))


def _reached(graph: Mapping[str, Iterable[str]], name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = set(graph.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


def rooms(graph: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """The same arrows between rooms."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in graph.items():
        found[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return dict(found)


def arrows_up(graph: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Imports that :data:`FLOORS` does not allow, in words."""
    floor = {room: number for number, names in enumerate(FLOORS) for room in names}
    for module, others in sorted(graph.items()):
        if (room := room_of(module)) not in floor:
            yield f"{module}: the room {room} has no floor in tools/house.py"
            continue
        for other in sorted(others):
            to = room_of(other)
            if to == room or (room, to) in SIDEWAYS:
                continue
            if floor.get(to, len(FLOORS)) >= floor[room] or to in KEPT_FROM.get(room, ()):
                yield f"{module} imports {other}, which {room} must not"


def private_names(file: Source) -> Iterator[str]:
    """Private modules and names of other projects' packages that a file imports or reaches through what it imports."""
    ours = {*CHECKED, "tests", *sys.stdlib_module_names}
    foreign = [found for found in file.imported() if found[0].partition(".")[0] not in ours]
    for module, name, _ in foreign:
        if any(_is_private(part) for part in (*module.split("."), name)):
            yield f"{file.path}: {module}{f'.{name}' if name else ''} is private"
    called = {alias for _, _, alias in foreign}
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            base: ast.AST = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in called:
                yield f"{file.path}:{node.lineno}: {ast.unparse(node)} is private"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# ---- names


def twice(files: Iterable[Source]) -> dict[str, dict[str, list[str]]]:
    """``modules``, ``classes`` and public ``functions`` of the core whose name occurs in several files, with these."""
    found: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in ("modules", "classes", "functions")}
    for file in files:
        if not file.core or file.path.startswith(OF_OTHER_PROCESSES):
            continue
        if not file.path.endswith("/__init__.py"):
            found["modules"][Path(file.path).stem].append(file.path)
        classes = {node.name.lstrip("_") for node in file.tree.body if isinstance(node, ast.ClassDef)}
        functions = {node.name for node in file.tree.body if isinstance(node, Function)}
        for name in sorted(classes):
            found["classes"][name].append(file.path)
        for name in sorted(name for name in functions if not name.startswith("_")):
            found["functions"][name].append(file.path)
    return {kind: {n: at for n, at in sorted(names.items()) if len(at) > 1} for kind, names in found.items()}


def used_once(file: Source) -> list[Function]:
    """Private functions of a file that it names at most once besides their definition."""
    named = Counter(node.id if isinstance(node, ast.Name) else node.attr
                    for node in file.nodes if isinstance(node, ast.Name | ast.Attribute))  # fmt: skip
    return [function for function in file.functions if _is_private(function.name) and named[function.name] <= 1]


# ---- what is printed


def faults(files: list[Source]) -> list[str]:
    """What ``--check`` finds."""
    graph = imports(file for file in files if file.room != "tests")
    core = {module: others for module, others in graph.items() if room_of(module).startswith(CORE)}
    found = [f"a circle of files: {', '.join(circle)}" for circle in circles(graph)]
    found += [f"a circle of rooms: {', '.join(circle)}" for circle in circles(rooms(core))]
    found += arrows_up(graph)
    for file in files:
        if file.core and file.room != "mua.compat":
            found += private_names(file)
    doubled = twice(files)
    for kind in ("modules", "classes"):
        found += [f"two {kind} {n}: {', '.join(at)}" for n, at in doubled[kind].items() if n not in TWICE]
    return found


def report(files: list[Source]) -> Iterator[str]:
    """The figures, a line each."""
    yield "| room | files | lines of code |\n| --- | --: | --: |"
    count, lines = Counter(file.room for file in files), Counter[str]()
    for file in files:
        lines[file.room] += file.code
    for room in (room for floor in FLOORS for room in floor if count[room]):
        yield f"| {room} | {count[room]} | {lines[room]:,} |"
    core = [file for file in files if file.core]
    yield f"| core | {len(core)} | {sum(file.code for file in core):,} |"
    yield f"| all | {len(files)} | {lines.total():,} |\n"
    functions = [function for file in core for function in file.functions]
    lengths = sorted((function.end_lineno or 0) - function.lineno + 1 for function in functions)
    yield (
        f"functions of the core: {len(lengths)}, of {statistics.median(lengths):.0f} lines in the median, "
        f"{lengths[int(0.95 * len(lengths))]} in the 95th percentile, {lengths[-1]} at most"
    )
    given = [a for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    given = [argument for argument in given if argument.arg not in ("self", "cls")]
    yield f"typed arguments: {sum(a.annotation is not None for a in given) / len(given):.1%}"
    private = sum(_is_private(function.name) for function in functions)
    yield f"private functions used once: {sum(len(used_once(file)) for file in core)} of {private}"
    graph = imports(core)
    yield f"circles: {len(circles(graph))} of files, {len(circles(rooms(graph)))} of rooms"
    for kind, names in twice(core).items():
        yield f"{kind} of one name: {len(names)}{''.join(f'\n  {name}: {", ".join(at)}' for name, at in names.items())}"


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="only what must not be; status 1 if there is any")
    found = sources()
    if not parser.parse_args().check:
        print(*report(found), sep="\n")
    elif wrong := faults(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
