"""Questions and answers: the made-up world, files of questions, and episodes with every kind of scorer but a judge.

Not covered: what a policy learns on it, judges (test_scorers.py), tool servers beside it (test_mcp_servers.py), Parquet
files written by others than pyarrow.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from environments.kit.demonstrate import demonstrate, play, replay_gold
from environments.qa import DOMAIN, QuestionDomain
from environments.qa.episode import LOOKUP, OPEN
from environments.qa.own import PRACTICE_QUESTIONS
from environments.qa.world import COUNTS, SPLITS, world, world_key
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import unanswered
from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Split, Task, Transcript
from mua.environment.selection import Selection
from mua.environment.user import STOP_SIGNAL
from mua.rollout.episode import EpisodeResult
from mua.utils.errors import ConfigError
from tests.desk_support import opened
from tests.tables import cases_of

cases = cases_of("qa")

ALL = [task for split in SPLITS for task in DOMAIN.tasks(split)]


def over(place: Path | None, **config: Any) -> QuestionDomain:
    made = EnvironmentConfig.model_validate({"name": "qa", "data": place, **config})
    domain = DOMAIN.configured(made, Services())
    assert isinstance(domain, QuestionDomain)
    return domain


def written(folder: Path, *rows: Any, name: str = "questions.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


async def said(domain: QuestionDomain, task: Task, *texts: str) -> EpisodeResult:
    """An episode with the domain's user, in which the policy says these."""
    return await play(domain, task, 0, lambda opening, tools: unanswered(texts), domain.scripted_user(task, 0))


# ---- the made-up world


async def test_the_expert_finds_every_answer_by_reading():
    for task in ALL:
        played = await demonstrate(DOMAIN, task, 0)
        assert played.evaluation.success, task.id
        assert sum(len(one.get("tool_calls", ())) for one in played.messages) == 2 * len(task.data["chain"])


async def test_smaller_worlds_ask_the_same_way_about_other_names():
    """Practice worlds and plain names: no name is also a split's, the expert finds every answer, pages are shorter."""
    easy = over(None, options={"practice": 2, "plain_names": 1, "sentences": 0})
    tasks = easy.tasks("train")
    assert len({task.id for task in tasks}) == len(tasks) == 2 * PRACTICE_QUESTIONS
    assert {task.data["world"] for task in tasks} == {world_key(0, plain=True), world_key(1, plain=True)}
    for task in [*tasks[:20], *tasks[-20:], *easy.tasks("test")[:20]]:
        played = await demonstrate(easy, task, 0)
        assert played.evaluation.success, task.id
        results = [one["content"] for one in played.messages if one["role"] == "tool"]
        assert all(len(result) < 400 for result in results[1::2])
    for plain in (False, True):
        keys = [world_key(split, plain=plain) for split in SPLITS]
        held = {name for key in keys for name in world(key)}
        assert len(held) == 3 * sum(COUNTS.values())
        assert not held & {name for number in range(3) for name in world(world_key(number, plain=plain))}
    names = {name for key in (*SPLITS, 0) for name in world(world_key(key, plain=True))}
    assert all(re.fullmatch("([A-Z][a-z]+){2,3}", name) for name in names)
    assert len({word for name in names for word in re.findall("[A-Z][a-z]+", name)}) < 130


def test_tools_answer_what_was_not_meant():
    environment = opened(DOMAIN.tasks("test")[0], DOMAIN)
    name = next(iter(world("test")))
    assert [tool.name for tool in environment.tools()] == ["lookup", "open_page"]
    assert environment.call(OPEN.name, {"title": f"  {name.upper()} "}).text.startswith(name)
    close = environment.call(OPEN.name, {"title": f"{name}x {name}"})
    assert close.error
    assert environment.call(OPEN.name, {"title": "x" * 100_000}).error
    assert "Nothing was found" in environment.call(LOOKUP.name, {"query": "qqqq"}).text
    assert "Nothing was found" in environment.call(LOOKUP.name, {"query": ""}).text
    assert not environment.call(LOOKUP.name, {"query": "a " * 100_000}).error
    assert environment.call(LOOKUP.name, {"query": name, "more": 1}).error
    assert environment.call("search", {"query": name}).error
    assert len(environment.call(LOOKUP.name, {"query": name}).text.splitlines()) == 5
    # Another split's world is out of sight.
    assert not environment.call(OPEN.name, {"title": next(iter(world("train")))}).text.startswith(
        next(iter(world("train")))
    )


async def test_the_asker_wants_an_answer_and_tells_nothing_of_its_worth():
    task = DOMAIN.tasks("test")[0]
    replies = []
    for text in (f"<answer>{task.data['reference']}</answer>", "<answer>wrong</answer>"):
        user = DOMAIN.scripted_user(task, 0)
        await user.open()
        replies.append(await user.reply(text))
    assert replies[0] == replies[1]
    assert replies[0].stop
    user = DOMAIN.scripted_user(task, 1)
    said = [await user.reply("Hm.") for _ in range(3)]
    assert [reply.stop for reply in said] == [False, False, True]
    assert "<answer>" in said[0].text
    assert all((STOP_SIGNAL in reply.text) is reply.stop for reply in said)


async def test_the_last_word_counts():
    task = DOMAIN.tasks("test")[0]
    right = f"<answer>{task.data['reference']}</answer>"
    assert (await said(DOMAIN, task, "Let me see.", right)).evaluation.success
    for moves in (
        ["Let me see.", "<answer>no</answer>", right],
        [f"{right} <answer>other</answer>"],
        [f"<think>{right}"],
    ):
        assert not (await said(DOMAIN, task, *moves)).evaluation.success


# ---- questions from files

ROWS = [
    {"question": "What is 6 times 7?", "answer": "42", "topic": "sums", "level": "easy", "key": "a", "part": "train"},
    {"question": "What is half of one?", "answer": "1/2", "topic": "parts", "level": "hard", "key": "b", "part": "dev"},
    {"question": "What is 10% of 50?", "answer": 5, "topic": "parts", "level": "medium", "key": "c", "part": "test"},
]


async def earned(domain: QuestionDomain, task: Task, *texts: str) -> float:
    return (await said(domain, task, *texts)).reward


async def test_fields_splits_and_a_scorer_by_configuration(tmp_path: Path):
    options = {"split": "part", "id": "key", "kind": "topic", "difficulty": "level"}
    domain = over(written(tmp_path, *ROWS), options=options, scorer={"name": "numeric", "forms": ["boxed"]})
    tasks = {split: domain.tasks(split) for split in SPLITS}
    assert [[task.id for task in tasks[split]] for split in SPLITS] == [
        ["qa/train/a"],
        ["qa/validation/b"],
        ["qa/test/c"],
    ]
    assert [tasks[split][0].data["difficulty"] for split in SPLITS] == ["easy", "hard", "medium"]
    assert tasks["train"][0].data["kind"] == "sums"
    assert await earned(domain, tasks["validation"][0], r"It is \boxed{0.5}.") == 1.0
    assert await earned(domain, tasks["validation"][0], "It is 0.5.", r"\boxed{0.5}") == 1.0
    assert await earned(domain, tasks["test"][0], r"\boxed{5} or \boxed{6}") == 0.0
    assert r"\boxed{}" in domain.system_prompt("short")
    assert domain.environment().tools() == ()
    for split in SPLITS:
        assert (await replay_gold(domain, tasks[split][0])).reward == 1.0
        assert (await demonstrate(domain, tasks[split][0], 0)).reward == 1.0


def test_a_folder_has_a_file_for_each_split(tmp_path: Path):
    written(tmp_path, ROWS[0], name="train.jsonl")
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[1]).encode()))
    domain = over(tmp_path)
    assert [len(domain.tasks(split)) for split in SPLITS] == [1, 0, 1]
    written(tmp_path, ROWS[0], name="more.jsonl")
    with pytest.raises(ConfigError, match=r"more\.jsonl belongs to no split"):
        over(tmp_path)


def test_shares_of_a_single_file_go_by_the_question(tmp_path: Path):
    rows = [{"question": f"What is {n}?", "answer": n} for n in range(400)]
    assert [len(over(written(tmp_path, *rows)).tasks(split)) for split in SPLITS] == [0, 0, 400]
    options = {"validation": 0.1, "test": 0.2}
    dealt = [{t.data["question"] for t in over(written(tmp_path, *rows), options=options).tasks(s)} for s in SPLITS]
    assert [len(one) for one in dealt] == pytest.approx([280, 40, 80], abs=20)
    again = over(written(tmp_path, *reversed(rows), {"question": "One more?", "answer": 1}), options=options)
    for split, before in zip(SPLITS, dealt, strict=True):
        assert before <= {task.data["question"] for task in again.tasks(split)}


async def test_messages_nested_fields_and_markers(tmp_path: Path):
    """Rows as verl's tables and GSM8K have them, in a Parquet file."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "prompt": [{"role": "system", "content": "Reason."}, {"role": "user", "content": f"{n} plus 1?"}],
            "reward_model": {"ground_truth": f"It is {n} + 1 = #### {n + 1}"},
        }
        for n in range(3)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet")
    options = {"question": "prompt", "answer": "reward_model.ground_truth", "answer_after": "####"}
    domain = over(tmp_path, options=options, scorer={"name": "numeric"})
    task = domain.tasks("train")[1]
    assert domain.prompt_for(task, "full") == "Reason."
    assert (task.data["question"], task.data["reference"]) == ("1 plus 1?", "2")
    assert await earned(domain, task, r"\boxed{2}") == 1.0
    (tmp_path / "test.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"test\.parquet: cannot be read as Parquet"):
        over(tmp_path)


async def test_choices_are_shown_with_their_labels(tmp_path: Path):
    row = {"question": "Which is red?", "options": ["grass", "blood"], "answer": "B"}
    domain = over(written(tmp_path, row), options={"choices": "options"}, scorer={"name": "choice"})
    (task,) = domain.tasks("test")
    assert (await domain.scripted_user(task, 0).open()).text == "Which is red?\nA) grass\nB) blood"
    assert await earned(domain, task, "Answer: blood") == 1.0
    assert await earned(domain, task, "A") == 0.0


def test_a_reference_that_is_no_mathematics_is_found_when_the_data_is_read(tmp_path: Path):
    rows = [{"q": f"Question {n}.", "a": answer} for n, answer in enumerate([r"\frac{x}{2}", "7", r"\frac{1}+"])]
    place = written(tmp_path, *rows)
    with pytest.raises(ConfigError, match=r"line 3: scorer 'symbolic' cannot read .*\(field 'a'\)"):
        over(place, options={"question": "q", "answer": "a"}, scorer={"name": "symbolic"})


async def test_a_scorer_with_processes_ends_with_its_domain(tmp_path: Path):
    place = written(tmp_path, {"question": "Simplify.", "answer": r"\frac{x}{2}"})
    config = EnvironmentConfig.model_validate({"name": "qa", "data": place, "scorer": {"name": "symbolic"}})
    domain = Selection.from_config(config).domains["qa"]
    assert isinstance(domain, QuestionDomain)
    (task,) = domain.tasks("test")
    manager = EnvironmentManager(domain, config)
    async with manager.instance(task, 0) as instance:
        said = [{"role": "assistant", "content": r"\boxed{0.5x}"}]
        assert (await instance.evaluate(Transcript(said))).reward == 1.0
    pool = domain.grader.scorer._pool  # type: ignore[attr-defined]
    (process,) = pool._all
    await manager.close()
    assert process.process.poll() is not None


async def test_in_worker_processes_too(tmp_path: Path):
    place = written(tmp_path, *ROWS)
    config = EnvironmentConfig.model_validate(
        {"name": "qa", "data": place, "isolation": "process", "workers": 1, "scorer": {"name": "numeric"}}
    )
    domain = Selection.from_config(config).domains["qa"]
    manager = EnvironmentManager(domain, config)
    async with manager.instance(domain.tasks("test")[0], 0) as instance:
        said = [{"role": "assistant", "content": "42"}]
        assert (await instance.evaluate(Transcript(said))).reward == 1.0
    await manager.close()


GOOD = {"question": "What?", "answer": "x"}


@cases
def test_what_is_wrong_with_a_file_is_one_error(tmp_path: Path, rows: list[Any], options: Any, says: str):
    with pytest.raises(ConfigError, match=says) as error:
        over(written(tmp_path, *rows), options=options)
    assert "\n" not in str(error.value)


def test_a_question_without_end_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="line 1: 'question' has more than 16000 characters"):
        over(written(tmp_path, {"question": "x" * 16_001, "answer": "x"}))


def test_what_cannot_be_had_is_one_error(tmp_path: Path):
    for config, says in (
        ({"data": tmp_path / "none.jsonl"}, r"none\.jsonl"),
        ({"data": tmp_path / "a.txt"}, "is no folder, and no file that ends in"),
        ({"data": tmp_path}, "has no file train, validation or test"),
        ({"options": {"question": "q"}}, r"options.question: says how environment.data is read"),
        ({"scorer": {"name": "numeric"}}, r"qa/train/\d+: the right answer must be a number"),
        ({"scorer": {"name": "judge"}}, r"needs the section judge\.llm"),
        ({"reward": "partial"}, r"environment.reward: 'qa' pays what its scorer says"),
    ):
        made = EnvironmentConfig.model_validate({"name": "qa", **config})
        with pytest.raises(ConfigError, match=says):
            DOMAIN.configured(made, Services())


def test_a_mix_gives_each_domain_its_own(tmp_path: Path):
    (tmp_path / "qa").mkdir()
    written(tmp_path / "qa", GOOD, name="train.jsonl")
    config = EnvironmentConfig.model_validate(
        {
            "mix": {"qa": 1.0, "help_desk": 1.0},
            "data": tmp_path,
            "scorer": {"name": "fuzzy"},
            "options": {"qa.patience": 2},
        }
    )
    domain = Selection.from_config(config).domains["qa"]
    tasks: dict[Split, int] = {split: len(domain.tasks(split)) for split in SPLITS}
    assert tasks == {"train": 1, "validation": 0, "test": 0}


async def test_many_questions_at_once():
    async def one(task: Task) -> bool:
        return (await demonstrate(DOMAIN, task, 1, 0.5)).evaluation.success

    assert all(await asyncio.gather(*(one(task) for task in DOMAIN.tasks("validation")[:40])))
