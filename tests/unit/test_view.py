"""What may be asked of a run's store, who may ask, the page in one file, ``mua show``.

Not here: the page itself in a browser (tests/unit/test_view_browser.py), the time of a first paint
(no test asserts times), PostgreSQL (test_store_verification.py), runs of the trainer.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mua.cli import app
from mua.store.database import Store
from mua.store.faults import StoreError
from mua.store.tables import steps, trajectories
from mua.store.traces import trace_file, write_traces
from mua.store.trajectories import read_trajectories
from mua.store.writer import Insert, Update, execute
from mua.trainer.evaluation.estimators import bootstrap
from mua.types import Json
from mua.utils.errors import MuaError
from mua.view.html_page import STATIC, export_page
from mua.view.page_answers import Answers
from mua.view.trajectory_lists import BadQuestion
from mua.view.viewed_runs import NotThere, TokenTexts, opened_runs
from tests.shop_run import HOSTILE, shop_model, write_shop
from tests.view_support import served

RUN = "shop-grpo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"), step_count=8, groups=3)


@pytest.fixture(scope="module")
def answers(folder: Path) -> Iterator[Answers]:
    with opened_runs([str(folder)]) as viewed:
        yield Answers(viewed)


def listed(answers: Answers, **given: str) -> list[Json]:
    return answers.answer("trajectories", {"run": RUN, "limit": "500", **given})["rows"]


def test_overview_has_every_part_of_a_run(answers: Answers) -> None:
    data = answers.answer("run", {"run": RUN})
    assert [one["version"] for one in data["evaluations"]] == [0, 4, 8]
    newest = data["evaluations"][-1]
    rows = listed(answers, round=str(newest["round"]))
    own = bootstrap([float(row["success"]) for row in rows], level=0.95, resamples=2000, seed=20)
    assert newest["success"] == {"mean": own.mean, "low": own.low, "high": own.high, "tasks": len(rows)}
    assert set(newest["kinds"]) == {"cancel", "refund", "refuse"}
    assert sum(row["episodes"] for row in data["outcomes"]) == len(listed(answers))
    assert data["curves"]["rollout/success"][0] == list(range(8))
    assert "normal: " in data["meanings"]["train/grad_norm"]
    assert set(data["stages"]["trainer"]) >= {"time/wait_seconds", "time/optimizer_seconds"}
    assert "time/episode_tools_seconds" in data["stages"]["episode"]
    kinds = {event["kind"] for event in data["events"]}
    assert {"start", "restart", "checkpoint", "engine"} <= kinds
    assert ("fault" in kinds) == any(not row["scored"] for row in listed(answers))
    assert next(e for e in data["events"] if e["kind"] == "engine")["step"] == 4
    assert data["tools"][0]["errors"] == sum(row["tool_errors"] for row in listed(answers))


def test_from_a_step_to_its_groups_and_trajectories(answers: Answers) -> None:
    data = answers.answer("step", {"run": RUN, "step": "3"})
    assert [len(group["trajectories"]) for group in data["groups"]] == [4, 4, 4]
    assert data["metrics"]["train/grad_norm"] > 0
    names = {t["id"] for group in data["groups"] for t in group["trajectories"] if t["scored"]}
    assert {row["id"] for row in listed(answers, step="3")} == names
    with pytest.raises(NotThere, match="step 99"):
        answers.answer("step", {"run": RUN, "step": "99"})


FILTERS = {
    "failed": ({"success": "false"}, lambda row: not row["success"]),
    "tool error": ({"tool_error": "true"}, lambda row: row["tool_errors"] > 0),
    "text": ({"text": "VALIDATION/3"}, lambda row: "validation/3" in row["task_id"]),
    "a sign of LIKE is itself": ({"text": "100%"}, lambda row: False),
    "two": ({"kind": "cancel", "success": "true"}, lambda row: row["kind"] == "cancel" and row["success"]),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filter_leaves_what_its_words_say(answers: Answers, name: str) -> None:
    given, holds = FILTERS[name]
    assert {row["id"] for row in listed(answers, **given)} == {r["id"] for r in listed(answers) if holds(r)}


def test_pages_of_every_order_are_the_whole_list_once(answers: Answers) -> None:
    total = answers.answer("trajectories", {"run": RUN})["total"]
    for order in ("newest", "oldest", "reward", "tokens", "turns", "seconds"):
        pages = [listed(answers, order=order, limit="50", offset=str(at)) for at in range(0, total, 50)]
        assert len({row["id"] for page in pages for row in page}) == total == sum(map(len, pages))


def test_gap_is_the_largest_of_the_trained_tokens(answers: Answers) -> None:
    rows = listed(answers, order="gap")
    gaps = [row["gap"] for row in rows]
    assert gaps == sorted(gaps, reverse=True)
    columns = answers.answer("tokens", {"run": RUN, "id": rows[0]["id"], "segment": "0"})["columns"]
    assert max(abs(gap) for gap in columns["gap"] if gap is not None) == pytest.approx(gaps[0], rel=1e-6)
    assert {row["id"] for row in rows} == {row["id"] for row in listed(answers) if row["trained"]}


def test_conversations_are_searched(answers: Answers) -> None:
    found = answers.answer("trajectories", {"run": RUN, "said": 'onerror="WINDOW'})
    assert {row["sample"] for row in found["rows"]} == {1}
    assert found["searched"]["read"] == found["searched"]["of"]
    assert {row["sample"] for row in listed(answers, said="zoë 🙂")} == {0, 2, 3}


def test_tokens_say_who_wrote_them_and_what_the_loss_read(answers: Answers, folder: Path) -> None:
    row = next(row for row in listed(answers, round="0", scored="true"))
    data = answers.answer("tokens", {"run": RUN, "id": row["id"], "segment": "0"})
    columns = data["columns"]
    with Store.open(folder, write=False) as store, store.read() as connection:
        segment = next(read_trajectories(connection, [row["id"]])).segments[0]
    assert "".join(columns["texts"]) == shop_model()[1].decode(segment.ids)
    assert columns["provenance"] == segment.provenance.tolist()
    known = np.array([value is not None for value in columns["logprobs"]])
    assert (known == segment.loss_mask).all()
    at = int(np.flatnonzero(segment.loss_mask)[0])
    gap = columns["old_logprobs"][at] - columns["logprobs"][at]
    assert columns["gap"][at] == pytest.approx(gap, abs=1e-6)
    assert (columns["weights"][at], columns["version"][at], data["step"]) == (0.000244140625, row["step"], row["step"])
    with pytest.raises(NotThere, match="no segment 7"):
        answers.answer("tokens", {"run": RUN, "id": row["id"], "segment": "7"})


def test_trajectory_has_verdict_user_and_requests(answers: Answers) -> None:
    row = next(row for row in listed(answers, success="false", round="0", scored="true"))
    data = answers.answer("trajectory", {"run": RUN, "id": row["id"]})
    assert data["details"]["database"][0].startswith("orders")
    assert [s["scorer"] for s in data["scores"]] == ["environment"]
    assert len(data["told_user"]) == 2
    assert all(text.startswith("Your order") for text in data["told_user"])
    user = next(r for r in data["requests"] if r["role"] == "user")
    assert [m["role"] for m in user["messages"]] == ["system", "user"]
    assert len(data["group"]) == 4
    assert [u["step"] for u in data["uses"]] == [row["step"]]


def test_token_text_is_the_tokenizers_own() -> None:
    texts, codec = TokenTexts(shop_model()[0]), shop_model()[1]
    draw = np.random.default_rng(0)
    for _ in range(50):
        ids = draw.integers(0, codec.vocabulary_size, 30).tolist()
        assert texts.decode(ids) == codec.decode(ids)
    assert TokenTexts(Path("/nowhere")).pieces([5, 6]) == ["⟨5⟩", "⟨6⟩"]
    assert "--model" in (TokenTexts(Path("/nowhere")).fault or "")


def test_suspicions_are_found_where_they_were_planted(tmp_path: Path) -> None:
    write_shop(tmp_path, step_count=4, better=1.0)
    with Store.open(tmp_path) as store, store.begin() as connection:
        chosen = [
            row for row in connection.execute(trajectories.select().order_by(trajectories.c.id)).mappings()
            if row["success"] and row["round"] == 0
        ]  # fmt: skip
        first, second, *same = chosen[:5]
        verdict = {"details": {"unsaid": ["the price"]}}
        execute(connection, [
            Update(trajectories, {"id": first["id"]}, verdict),
            Update(trajectories, {"id": second["id"]}, {"sampled_tokens": 3}),
            *(Update(trajectories, {"id": row["id"]}, {"messages": same[0]["messages"], "task_id": f"shop/other/{at}"})
              for at, row in enumerate(same)),
        ])  # fmt: skip
    with opened_runs([str(tmp_path)]) as viewed:
        found = {row["id"]: row["suspect"] for row in listed(Answers(viewed), suspect="any")}
    assert found == {first["id"]: ["verdict"], second["id"]: ["short"]} | {row["id"]: ["repeated"] for row in same}


def test_two_runs_are_compared_on_their_common_tasks(folder: Path, tmp_path: Path) -> None:
    write_shop(tmp_path / "b", "other", step_count=4, better=0.4, seed=3)
    with opened_runs([str(folder), str(tmp_path / "b")]) as viewed:
        answers = Answers(viewed)
        data = answers.answer("compare", {"a": RUN, "b": "other", "ra": "1", "rb": "2"})
        assert (data["common"], data["only_first"], data["only_second"]) == (12, 0, 0)
        assert data["better"] - data["worse"] == round(12 * (data["means"][1] - data["means"][0]))
        assert data["test"]["name"] == "exact McNemar"
        assert [row["key"] for row in answers.answer("runs", {})["runs"]] == [RUN, "other"]


@pytest.mark.parametrize(
    ("path", "given", "says"),
    [
        ("trajectories", {"limit": "0"}, "limit: "),
        ("trajectories", {"offset": "-1"}, "offset: "),
        ("trajectories", {"success": "maybe"}, "success: "),
        ("trajectories", {"suspect": "x"}, "suspect: "),
        ("step", {"step": "٣"}, "step: a whole number"),
        ("secrets", {}, "secrets: nothing"),
    ],
)
def test_wrong_question_is_one_clear_error(answers: Answers, path: str, given: dict[str, str], says: str) -> None:
    with pytest.raises(BadQuestion, match=says):
        answers.answer(path, {"run": RUN, **given})


def test_only_who_knows_the_key_and_names_this_server_is_answered(answers: Answers) -> None:
    with served(answers) as server:

        def status(path: str, **headers: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            body = response.read().decode("utf-8", "replace")
            assert "script-src 'self'" in (response.getheader("Content-Security-Policy") or "")
            cookie = response.getheader("Set-Cookie") or ""
            connection.close()
            return response.status, cookie or body

        moved, cookie = status(f"/?key={server.key}")
        assert moved == 303
        assert "HttpOnly" in cookie
        own = {"Cookie": cookie.split(";")[0]}
        assert status("/api/runs", **own)[0] == 200
        assert status("/api/runs")[0] == 401
        assert status("/?key=wrong")[0] == 401
        assert status("/api/runs", **own, Host="evil.example")[0] == 403
        assert status("/api/runs", **own, Host=f"localhost:{server.port}")[0] == 200
        assert status("/api/runs", **{**own, "Sec-Fetch-Site": "cross-site"})[0] == 403
        assert status("/static/app.js", **own)[0] == 200
        assert status("/static/../web.py", **own)[0] == 404
        assert status("/static/vendor/../../../../setup.py", **own)[0] == 404
        wrong, said = status("/api/run?run=nobody", **own)
        assert (wrong, "not in the stores" in said) == (404, True)
        assert status("/api/trajectories?run=shop-grpo&limit=x", **own)[0] == 400


def blobs(page: str) -> dict[str, Json]:
    found = re.findall(r'data-name="([^"]+)">([A-Za-z0-9+/=]+)</script>', page)
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def test_file_holds_everything_and_no_markup_of_others(answers: Answers, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    made = export_page(answers, out, only={})
    page = out.read_text()
    assert made.trajectories == made.of == len(listed(answers))
    assert HOSTILE not in page
    assert page.count("<script") == page.count("</script>") == made.trajectories + 3
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page), "nothing comes from elsewhere"
    held = blobs(page)
    index = held["index"]["of_run"][RUN]
    assert {row["id"]: row["suspect"] for row in index["rows"]} == {r["id"]: r["suspect"] for r in listed(answers)}
    row = next(row for row in index["rows"] if row["sample"] == 1 and row["scored"])
    whole = held[f"t/{row['key']}"]
    assert HOSTILE in json.dumps(whole["trajectory"]["messages"], ensure_ascii=False).replace("\\", "")
    assert whole["tokens"][0] == answers.answer("tokens", {"run": RUN, "id": row["id"], "segment": "0"})


def test_sample_lies_evenly_over_the_run_and_says_so(answers: Answers, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    made = export_page(answers, out, only={"kind": "cancel", "success": "false"}, most=5)
    index = blobs(out.read_text())["index"]
    rows = index["of_run"][RUN]["rows"]
    assert (made.trajectories, len(rows)) == (5, 5)
    assert all(row["kind"] == "cancel" and not row["success"] for row in rows)
    assert "5 of" in index["note"]
    assert "sample" in index["note"]
    assert len({row["ordinal"] for row in rows if row["round"] == 0}) >= 2
    small = export_page(answers, out, only={}, megabytes=0.02)
    assert 0 < small.trajectories < small.of
    with pytest.raises(BadQuestion, match="order: no filter"):
        export_page(answers, out, only={"order": "gap"})


def test_run_that_goes_on_is_seen(tmp_path: Path) -> None:
    write_shop(tmp_path, step_count=2, groups=1)
    with opened_runs([str(tmp_path)]) as viewed:
        answers = Answers(viewed)
        before = answers.answer("changes", {"run": RUN})
        row = {"run_id": RUN, "step": 2, "part": 2, "state": "done", "version": 2, "started_at": 1.0}
        with Store.open(tmp_path) as store, store.begin() as connection:
            execute(connection, [Insert(steps, [row])])
        (tmp_path / "metrics.jsonl").write_text(
            '{"step": 0, "rollout/success": 0.5}\n{"step": 2, "rollout/success": 0.75}\n{"st'
        )
        after = answers.answer("changes", {"run": RUN})
        assert (before["step"], after["step"]) == (1, 2)
        assert answers.answer("run", {"run": RUN})["curves"]["rollout/success"] == [[0, 2], [0.5, 0.75]]


def test_run_without_a_store_is_read_from_its_traces(folder: Path, tmp_path: Path) -> None:
    with Store.open(folder, write=False) as store, store.read() as connection:
        chosen = connection.execute(trajectories.select().where(trajectories.c.round == 0)).mappings()
        names = [row["id"] for row in chosen if row["scored"] and row["ordinal"] < 3]
        write_traces(trace_file(tmp_path / "traces", 0), read_trajectories(connection, names))
    told: list[str] = []
    with opened_runs([str(tmp_path)], model=shop_model()[0], tell=told.append) as viewed:
        answers = Answers(viewed)
        (run,) = viewed.keys()
        assert "reading its traces" in told[0]
        assert answers.answer("run", {"run": run})["state"]["trajectories"] == len(names)
        (row,) = answers.answer("steps", {"run": run})["steps"]
        assert row["trajectories"] == len(names)
        assert len(answers.answer("step", {"run": run, "step": "0"})["groups"]) == 3
        name = answers.answer("trajectories", {"run": run})["rows"][0]["id"]
        assert answers.answer("tokens", {"run": run, "id": name, "segment": "0"})["columns"]["weights"] is None
    with pytest.raises(StoreError, match="neither a store nor traces"), opened_runs([str(STATIC)]):
        pass
    with pytest.raises(MuaError, match="no store; name"), opened_runs([str(tmp_path / "gone")]):
        pass


def test_show_prints_one_with_mask_advantages_and_verdict(folder: Path) -> None:
    run = CliRunner()
    words = ["show", str(folder), "--only=success=false", "--only=kind=refund", "--only=round=0", "--sample=3"]
    shown = run.invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "no success" in shown.output
    assert "⟦<tool_call>" in shown.output
    assert "trained on" in shown.output
    assert "largest gap of engine and trainer 0.0" in shown.output
    assert "environment" in shown.output
    assert run.invoke(app, words).output == shown.output
    nothing = run.invoke(app, ["show", str(folder), "--only", "kind=unknown"])
    assert (nothing.exit_code, "no trajectory" in nothing.output) == (2, True)
    wrong = run.invoke(app, ["show", str(folder), "--only", "color=red"])
    assert (wrong.exit_code, "color: no filter" in wrong.output) == (2, True)
    exported = run.invoke(app, ["view", str(folder), "--export", str(folder / "page.html"), "--only", "success=false"])
    assert exported.exit_code == 0, exported.output
    assert "trajectories" in exported.output
