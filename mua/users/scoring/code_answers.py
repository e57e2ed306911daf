"""Answers that are programs: run on one test after the other in a sandbox, and compared outside of it.

A program has the rights of the process that runs it, and can forge whatever that reports. So nothing inside knows what
is right: a test's input goes in, what comes out is compared here, and forging an output is no easier than computing
it. What remains: a program may know its tests by heart (keep them out of the prompt), and one of a few possible outputs
is hit by guessing, so that all tests have to pass.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from mua.config.environment import AnswerForm
from mua.config.section import NonNegativeFloat, Positive, PositiveFloat, Section
from mua.environment.endpoint.services import Services
from mua.users.scoring.sandbox import Sandbox, SandboxLimits, SandboxResult
from mua.users.scoring.scorer import AnswerScore, Question, Scorer, options_of
from mua.utils.errors import EnvironmentFault
from mua.utils.strict_json import JsonError, is_number, read_json

MOST_TESTS = 1_000
LONGEST_DATA = 1_000_000
"""Characters of one test's input."""
LONGEST_OUTPUT = 90_000
"""Characters of one test's output: of each, four bytes at most, the longest output of a sandbox."""
_CHUNK = 60_000
_CALLER = r"""
import json, os, sys
result, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)
call = json.load(sys.stdin)
space = {"__name__": "program"}
exec(compile(open("/work/program.py").read(), "program.py", "exec"), space)
function = space.get(call["function"])
if function is None and "Solution" in space:
    function = getattr(space["Solution"](), call["function"])
def plain(value):
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return list(value)
os.write(result, json.dumps(function(*call["arguments"]), default=plain).encode())
"""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: what goes in, and what has to come out."""

    given: str
    expected: Any
    function: str | None = None
    """Called with the arguments in ``given`` (JSON); None: the program is run with ``given`` on standard input."""


class CodeOptions(Section):
    """Options of scorer ``code``."""

    stdout: Literal["trimmed", "exact", "words"] = "trimmed"
    """How standard output is compared: without white space at the ends of lines and of the text; as it is; or word by
    word."""
    relative: NonNegativeFloat = 1e-6
    """Largest difference of two numbers in results of functions, and in words, as a share of the expected one; 0:
    none. Whole numbers must be equal."""
    graded: bool = False
    """Pay the share of tests that pass, in place of 1 for all of them."""
    cpu_seconds: Positive = 5
    """Processor time of each process of a test."""
    call_seconds: PositiveFloat = 15.0
    """Time of one test by the clock."""
    total_seconds: PositiveFloat = 45.0
    """Time of all tests by the clock; below ``environment.reset_seconds``."""
    memory_mib: Positive = 512
    """Memory of a program."""
    sandboxes: Positive = 4
    """Sandboxes at once; other answers wait."""


class CodeScorer(Scorer):
    """A Python program."""

    forms: ClassVar[Sequence[AnswerForm]] = ("code",)

    def __init__(self, options: Mapping[str, Any], _services: Services) -> None:
        self._options = options_of(CodeOptions, options, "code")
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def check(self, question: Question) -> None:
        tests_of(question)

    def correct(self, question: Question) -> str:
        given = question.reference
        solution = given.get("solution") if isinstance(given, dict) else None
        return f"```python\n{solution}\n```" if isinstance(solution, str) else ""

    async def score(self, answer: str, question: Question) -> AnswerScore:
        tests = tests_of(question)
        loop = asyncio.get_running_loop()
        async with self._free.setdefault(loop, asyncio.Semaphore(self._options.sandboxes)):
            passed, why = await self._passed(answer, tests)
        right = passed == len(tests)
        score = passed / len(tests) if self._options.graded else float(right)
        return AnswerScore(score, right, {"passed": passed, "tests": len(tests)} | ({"why": why} if why else {}))

    async def _passed(self, program: str, tests: Sequence[CodeTest]) -> tuple[int, str]:
        """How many tests pass, and why the first one fails that does. Ends there, unless the share counts."""
        options = self._options
        end, passed, first = monotonic() + options.total_seconds, 0, ""
        limits = SandboxLimits(
            call_seconds=options.call_seconds, cpu_seconds=options.cpu_seconds, memory_mib=options.memory_mib,
            output_bytes=4 * max(len(_text(test.expected)) for test in tests) + 4_000,
        )  # fmt: skip
        async with AsyncExitStack() as boxes:
            box: Sandbox | None = None
            for number, test in enumerate(tests, 1):
                if monotonic() > end:
                    return passed, first or f"all tests together take more than {options.total_seconds:g} s"
                if box is None:
                    box = Sandbox(limits)
                    boxes.push_async_callback(box.close)
                    await box.start()
                    await _write(box, "program.py", program)
                    await _write(box, "caller.py", _CALLER)
                name = "program.py" if test.function is None else "caller.py"
                try:
                    await _write(box, "given", test.given)
                    result = await box.shell(
                        f"cd /work && exec /usr/bin/python3 /work/{name} < /work/given 2> /dev/null"
                    )
                except EnvironmentFault as fault:  # what ends a sandbox here is the program's doing
                    result = SandboxResult("", None, str(fault))
                why = self._wrong(test, result)
                passed += not why
                first = first or (f"test {number}: {why}" if why else "")
                if why and not options.graded:
                    break
                if result.code is None:  # it may have taken the sandbox with it
                    await boxes.aclose()
                    box = None
        return passed, first

    def _wrong(self, test: CodeTest, result: SandboxResult) -> str:
        """Why a test fails; empty where it passes."""
        if result.code is None:
            return result.fault
        if result.code != 0:
            return f"exit status {result.code}"
        if test.function is None:
            return "" if self._same_output(result.output, test.expected) else "another output"
        try:
            value = read_json(result.output)
        except JsonError:
            return "no result"
        return "" if same_value(value, test.expected, self._options.relative) else "another result"

    def _same_output(self, ours: str, theirs: str) -> bool:
        if self._options.stdout == "exact":
            return ours == theirs
        if self._options.stdout == "trimmed":
            return _trimmed(ours) == _trimmed(theirs)
        given, wanted = ours.split(), theirs.split()
        return len(given) == len(wanted) and all(map(self._near_words, given, wanted))

    def _near_words(self, one: str, other: str) -> bool:
        try:
            return one == other or same_value(read_json(one), read_json(other), self._options.relative)
        except JsonError:
            return False


def tests_of(question: Question) -> list[CodeTest]:
    """The tests of a reference: a list of them, or an object with ``tests`` (and perhaps a ``solution``).

    One is ``{"input": text, "output": text}`` or ``{"function": name, "arguments": list, "expected": value}``. An
    object with ``inputs``, ``outputs`` and perhaps ``fn_name``, as APPS has it, is read too.
    """
    given = question.reference
    if isinstance(given, dict) and "tests" in given:
        given = given["tests"]
    if isinstance(given, dict) and isinstance(given.get("inputs"), list) and isinstance(given.get("outputs"), list):
        if len(given["inputs"]) != len(given["outputs"]):
            raise question.wrong("'inputs' and 'outputs' must be as many")
        function, pairs = given.get("fn_name"), zip(given["inputs"], given["outputs"], strict=True)
        given = [
            {"input": one, "output": other} if function is None
            else {"function": function, "arguments": one, "expected": other}
            for one, other in pairs
        ]  # fmt: skip
    if not isinstance(given, list) or not 0 < len(given) <= MOST_TESTS:
        raise question.wrong(f"the right answer must be a list of 1 to {MOST_TESTS} tests for scorer 'code'")
    tests = []
    for number, one in enumerate(given, 1):
        match one:
            case {"input": str() as text, "output": str() as output}:
                test = CodeTest(text, output)
            case {"function": str() as name, "arguments": list() as arguments, "expected": expected} if re.fullmatch(
                r"[A-Za-z_]\w*", name
            ):
                test = CodeTest(json.dumps({"function": name, "arguments": arguments}), expected, name)
            case _:
                raise question.wrong(
                    f'test {number} must be {{"input": text, "output": text}} or {{"function": name, '
                    '"arguments": list, "expected": value}'
                )
        if len(test.given) > LONGEST_DATA or len(_text(test.expected)) > LONGEST_OUTPUT:
            raise question.wrong(
                f"test {number} has an input of more than {LONGEST_DATA} characters, or an output of more than "
                f"{LONGEST_OUTPUT}"
            )
        tests.append(test)
    return tests


async def _write(box: Sandbox, name: str, text: str) -> None:
    """A file in the sandbox's folder; in parts, since a command has a longest length."""
    data = base64.b64encode(text.encode("utf-8", "replace")).decode()
    for begin in range(0, max(1, len(data)), _CHUNK):
        sign = ">" if begin == 0 else ">>"
        result = await box.shell(f"printf %s '{data[begin : begin + _CHUNK]}' | base64 -d {sign} /work/{name}")
        if result.code != 0:
            raise EnvironmentFault(f"scorer 'code': cannot write {name}: {result.fault or result.output}")


def _text(expected: Any) -> str:
    return expected if isinstance(expected, str) else json.dumps(expected)


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")


def same_value(ours: Any, theirs: Any, relative: float) -> bool:
    """Whether two JSON values are the same; of two numbers with a fraction, whether they are near. True is not 1."""
    match ours, theirs:
        case (bool(), _) | (_, bool()):
            return ours is theirs
        case int(), int():
            return ours == theirs
        case int() | float(), int() | float():
            comparable = is_number(ours) and is_number(theirs)
            return ours == theirs or (comparable and bool(abs(ours - theirs) <= relative * abs(theirs)))
        case list(), list():
            pairs = zip(ours, theirs, strict=False)
            return len(ours) == len(theirs) and all(same_value(one, other, relative) for one, other in pairs)
        case dict(), dict():
            return ours.keys() == theirs.keys() and all(same_value(ours[key], theirs[key], relative) for key in theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)
