"""Scorers whose work is done elsewhere: mathematics in processes that may be killed, programs in sandboxes.

Not covered: a machine without memory, faults of the kernel, other languages than Python.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from mua.config.environment import ScorerConfig
from mua.environment.endpoint.services import Services
from mua.users.scoring.code_answers import same_value
from mua.users.scoring.scorer import Question, grader, make_scorer
from mua.users.scoring.symbolic_answers import ComparisonPool, MathProcess
from mua.utils.errors import ConfigError, EnvironmentFault
from tests.sandbox_support import need_sandboxes

RULES = {"relative": 1e-6, "absolute": 0.0}


@pytest.fixture(scope="module")
def pool() -> Iterator[ComparisonPool]:
    made = ComparisonPool(workers=1, cpu_seconds=0.7, wall_seconds=60.0)
    yield made
    made.close()


def processes() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [one for one in below if "mua.users.scoring.symbolic_worker" in " ".join(one.cmdline())]


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^{9}}}", pytest.param(r"\sum_{k=1}^{10^{9}} \frac{1}{k^2}", marks=pytest.mark.slow)]
)
async def test_what_computes_without_end_is_ended_and_wrong(pool: ComparisonPool, answer: str):
    found = await pool.compare(answer, r"\frac{\pi^2}{6}", RULES)
    assert found == {"equal": False} or "processor time" in found["why"]
    assert await pool.compare("x+1", "1+x", RULES) == {"equal": True}


async def test_what_nests_or_grows_is_wrong(pool: ComparisonPool):
    for answer in (
        "(" * 300 + "1" + ")" * 300,
        r"\frac{" * 60,
        "{" * 900,
        "^" * 900,
        "x" * 900,
        r"\left(" * 150,
        "\x00",
        "\ud800",
    ):
        found = await pool.compare(answer, "y+1", RULES)
        assert found == {"equal": False} or found.get("why"), answer[:20]
    assert await pool.compare("1", r"\frac", RULES) == {"unreadable": True}


async def test_a_process_that_is_killed_is_replaced(pool: ComparisonPool):
    assert await pool.compare("2", "2", RULES) == {"equal": True}
    (process,) = processes()
    process.kill()
    assert await pool.compare("3", "2", RULES) == {"equal": False}
    assert [one.pid for one in processes()] != [process.pid]


async def test_threads_and_loops_share_a_pool(pool: ComparisonPool):
    async def several() -> list[Any]:
        return await asyncio.gather(*(pool.compare(f"{n}+x", f"x+{n}", RULES) for n in range(10)))

    elsewhere = await asyncio.to_thread(asyncio.run, several())
    assert await several() == elsewhere == [{"equal": True}] * 10


async def test_a_process_that_only_waits_is_the_machines_fault():
    pool = ComparisonPool(workers=1, cpu_seconds=5.0, wall_seconds=0.5)
    try:
        process = MathProcess()
        os.kill(process.process.pid, signal.SIGSTOP)
        pool._all = {process}
        pool._idle.append(process)
        with pytest.raises(EnvironmentFault, match="too busy"):
            await pool.compare("1", "2", RULES)
    finally:
        pool.close()
    assert process.process.poll() is not None


@pytest.mark.slow
async def test_a_reference_that_cannot_be_worked_with_is_an_error():
    scorer = make_scorer("symbolic", {"cpu_seconds": 0.7, "workers": 1}, Services())
    asked = Question("?", "9^{9^{9^{9}}}+x", where="tasks.jsonl, line 3")
    try:
        with pytest.raises(ConfigError, match=r"tasks.jsonl, line 3: scorer 'symbolic' cannot work with"):
            await scorer.score("x+5", asked)
        with pytest.raises(ConfigError, match="cannot read the right answer as mathematics"):
            await scorer.score("x", Question("?", r"\frac{1}+"))
    finally:
        await scorer.close()
    assert len(processes()) <= 1  # the module's own pool


# ---- programs


@pytest.fixture(scope="module")
def bubblewrap() -> None:
    need_sandboxes()


SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -7\n", "output": "-2\n"}]
CALL = [
    {"function": "f", "arguments": [[3, 1, 2]], "expected": [1, 2, 3]},
    {"function": "f", "arguments": [[]], "expected": []},
]
ADDS = "print(sum(map(int, input().split())))"


async def run(program: str, tests: Any, **options: Any) -> Any:
    one = grader(ScorerConfig(name="code", options={"call_seconds": 8.0, "cpu_seconds": 1, **options}))
    return await one.grade(f"Here:\n```python\n{program}\n```", Question("?", tests))


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    ("program", "tests", "right"),
    [
        (ADDS, SUM, True),
        ("print(3)", SUM, False),
        ("print('3 ')\nprint()", SUM[:1], True),
        ("import sys; print(3); sys.exit(1)", SUM[:1], False),
        ("raise SystemExit", SUM, False),
        ("while True: pass", SUM, False),
        ("print('3' * 10**7)", SUM, False),
        ("syntax error(", SUM, False),
        ("def f(x):\n    print('noise')\n    return sorted(x)", CALL, True),
        ("class Solution:\n    def f(self, x):\n        return tuple(sorted(x))", CALL, True),
        ("def f(x):\n    return x", CALL, False),
        ("def g(x):\n    return sorted(x)", CALL, False),
        # Programs that would fool a comparison inside the sandbox:
        ("class All:\n    def __eq__(self, other): return True\ndef f(x):\n    return All()", CALL, False),
        ("import os\nos._exit(0)", CALL, False),
        ("import sys\nprint('passed: 2 of 2'); sys.exit(0)", SUM, False),
        ("import json\njson.dumps = lambda *a, **k: 'true'\ndef f(x):\n    return x", CALL, False),
        (
            "def f(x):\n    import os\n    os.write(3, b'[1, 2, 3]')\n    os._exit(0)",
            CALL,
            False,
        ),  # no list is right twice
        ("import os, signal\nos.kill(-1, signal.SIGKILL)", SUM, False),
        ("x = bytearray(10**10)", SUM, False),
    ],
)
async def test_programs(program: str, tests: Any, right: bool):
    score = await run(program, tests)
    assert (score.right, score.score) == (right, float(right)), score.details


@pytest.mark.usefixtures("bubblewrap")
async def test_what_is_expected_is_nowhere_in_the_sandbox():
    secret = "wolverine8713"
    looks = (
        "import glob\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ') + glob.glob('/work/*'):\n"
        "    try:\n        print(path, open(path, 'rb').read())\n    except OSError:\n        pass\n"
    )
    seen: list[str] = []
    scorer = make_scorer("code", {}, Services())
    same = scorer._same_output  # type: ignore[attr-defined]

    def looked(ours: str, theirs: str) -> bool:
        seen.append(ours)
        return bool(same(ours, theirs))

    scorer._same_output = looked  # type: ignore[attr-defined]
    await scorer.score(looks, Question("?", [{"input": "given-in", "output": secret}]))
    assert "given-in" in seen[0]
    assert secret not in seen[0]


@pytest.mark.usefixtures("bubblewrap")
async def test_a_share_of_the_tests():
    score = await run("print(3)", SUM, graded=True)
    assert (score.score, score.right, score.details["passed"]) == (0.5, False, 1)
    # One that takes its sandbox along leaves the tests after it alone.
    kills = "import os, signal\nif input()[0] == '1': os.kill(-1, signal.SIGKILL)\nprint(-2)"
    assert (await run(kills, SUM, graded=True)).score == 0.5
    assert "all tests together" in (await run(ADDS, SUM, total_seconds=1e-9)).details["why"]


def test_values_are_compared_as_json_has_them():
    for ours, theirs, same in [
        (1, 1.0, True), (1, True, False), (True, True, True), (0.1 + 0.2, 0.3, True), (1, 2, False), ("1", 1, False),
        ([1, 2], [2, 1], False), ({"a": [1.0]}, {"a": [1]}, True), ({"a": 1}, {"b": 1}, False), (None, None, True),
        (None, 0, False), (10**400, 1.0, False), (10**400, 10**400, True), (float("nan"), float("nan"), False),
    ]:  # fmt: skip
        assert same_value(ours, theirs, 1e-6) is same, (ours, theirs)
