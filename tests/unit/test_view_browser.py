"""``mua view`` in a real headless Chromium: opened, searched, clicked through to one token, compared, exported and
opened again from the file; text of others stays text. ``MUA_WRITE_TABLES=1`` renews the screenshots of docs/view.md.

Not here: other browsers, how long anything takes, what the answers are (tests/unit/test_view.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mua.store.database import Store
from mua.store.tables import trajectories
from mua.store.writer import Update, execute
from mua.view.html_page import export_page
from mua.view.page_answers import Answers
from mua.view.viewed_runs import opened_runs
from tests.shop_run import write_shop
from tests.view_support import PATIENCE_MS, chromium, served
from tools.debian_packages import PackagesUnavailable

IMAGES = Path(__file__).parents[2] / "docs" / "images"
RUN, OTHER = "shop-grpo", "shop-dapo"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    folder = tmp_path_factory.mktemp("runs")
    write_shop(folder / "a", RUN, step_count=12, groups=3)
    write_shop(folder / "b", OTHER, step_count=12, groups=2, better=0.15, seed=1)
    with opened_runs([str(folder / "a"), str(folder / "b")]) as viewed:
        yield Answers(viewed)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        with chromium() as running:
            yield running
    except PackagesUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[str], Any]]:
    """Opens an address in a context of its own; at the end nothing may have been wrong on any page."""
    wrong: list[str] = []
    contexts = []

    def opened(address: str) -> Any:
        contexts.append(browser.new_context(viewport={"width": 1360, "height": 900}, color_scheme="light"))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def table(page: Any, name: str) -> Any:
    found = page.locator(f'[data-table="{name}"]')
    found.first.wait_for()
    return found


def total(page: Any) -> int:
    return int(page.locator("[data-total]").get_attribute("data-total"))


def wait_total(page: Any, count: int) -> None:
    page.wait_for_selector(f'[data-total="{count}"]')


def shot(page: Any, name: str, **more: Any) -> None:
    if os.environ.get("MUA_WRITE_TABLES"):
        IMAGES.mkdir(exist_ok=True)
        page.screenshot(path=IMAGES / f"view_{name}.png", **more)


def to_one_token(page: Any) -> dict[str, str]:
    """From the list of trajectories on: the newest of training that failed, its third sampled token."""
    table(page, "trajectories").locator("tbody tr").first.click()
    page.locator(".stretch.sampled .token").nth(3).click()
    facts = page.locator("[data-token] .facts tr")
    facts.first.wait_for()
    return dict(row.locator("th, td").all_inner_texts() for row in facts.all())


def test_from_the_runs_to_one_token(answers: Answers, open_page: Callable[[str], Any], tmp_path: Path) -> None:
    with served(answers) as server:
        page = open_page(server.url)
        assert server.key not in page.url
        assert RUN in table(page, "runs").inner_text()
        shot(page, "runs")
        page.get_by_role("link", name=RUN, exact=True).click()
        assert "checkpoint" in table(page, "events").inner_text()
        page.locator('[data-chart="held-out success"] canvas').wait_for()
        shot(page, "run", full_page=True)

        page.keyboard.press("s")
        table(page, "steps")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/step/10$"))
        assert table(page, "group").count() == 3
        page.keyboard.press("l")
        table(page, "trajectories")
        whole = answers.answer("trajectories", {"run": RUN, "step": "10"})["total"]
        wait_total(page, whole)
        page.goto(page.url.split("#")[0] + f"#/run/{RUN}/trajectories")

        everything = answers.answer("trajectories", {"run": RUN})["total"]
        wait_total(page, everything)
        page.select_option('[name="kind"]', "refund")
        wait_total(page, answers.answer("trajectories", {"run": RUN, "kind": "refund"})["total"])
        page.keyboard.press("f")
        given = {"kind": "refund", "success": "false"}
        wait_total(page, answers.answer("trajectories", {"run": RUN, **given})["total"])
        page.select_option('[name="round"]', "0")
        page.select_option('[name="scored"]', "true")
        given |= {"round": "0", "scored": "true"}
        asked = answers.answer("trajectories", {"run": RUN, **given})
        wait_total(page, asked["total"])
        shot(page, "trajectories")
        token = to_one_token(page)
        name = asked["rows"][0]["id"]
        columns = answers.answer("tokens", {"run": RUN, "id": name, "segment": "0"})["columns"]
        at = [n for n, owner in enumerate(columns["provenance"]) if owner == 4][3]
        assert page.locator("[data-token]").get_attribute("data-token") == str(at)
        assert token["who wrote it"].startswith("sampled")
        assert float(token["log-probability, engine"]) == pytest.approx(columns["logprobs"][at], rel=1e-5)
        assert float(token["log-probability, trainer"]) == pytest.approx(columns["old_logprobs"][at], rel=1e-5)
        assert float(token["advantage"]) == pytest.approx(columns["advantages"][at], rel=1e-5)
        assert token["policy version"] == str(columns["version"][at])
        assert {"weight in the loss", "gap, trainer − engine"} <= set(token)
        shot(page, "token")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(f'[data-token="{at + 1}"]')
        page.keyboard.press("Escape")
        page.locator("[data-token]").wait_for(state="detached")
        page.select_option('[name="shade"]', "logprobs")
        page.evaluate("scrollTo(0, 0)")
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        shot(page, "trajectory")
        assert "should be" in page.locator("[data-verdict]").inner_text()
        page.keyboard.press("u")
        wait_total(page, asked["total"])

        page.goto(page.url.split("#")[0] + f"#/run/{RUN}/trajectories?said=window.hacked&round=0")
        wait_total(page, answers.answer("trajectories", {"run": RUN, "said": "window.hacked", "round": "0"})["total"])
        table(page, "trajectories").locator("tbody tr").first.click()
        page.locator(".conversation").wait_for()
        assert "<script>window.hacked=1</script>" in page.locator(".conversation").inner_text()
        assert page.evaluate("window.hacked") is None
        assert page.locator(".conversation img").count() == 0

        page.goto(page.url.split("#")[0] + "#/")
        table(page, "runs")
        page.keyboard.press("c")
        assert "tasks in both" in page.locator("[data-compared]").inner_text()
        assert table(page, "compared").locator("tbody tr").count() == 12
        shot(page, "comparison")


def test_page_in_a_file_is_the_same(answers: Answers, open_page: Callable[[str], Any], tmp_path: Path) -> None:
    out = tmp_path / "a page.html"
    export_page(answers, out, only={})
    page = open_page(out.as_uri())
    assert "This file holds" in page.locator(".note").inner_text()
    assert RUN in table(page, "runs").inner_text()
    base = page.url.split("#")[0]
    for given in (
        {}, {"success": "false"}, {"kind": "cancel", "tool_error": "true"}, {"suspect": "any"}, {"step": "3"},
        {"said": "window.hacked"}, {"text": "VALIDATION/1"}, {"order": "gap"}, {"scored": "false"}, {"round": "2"},
    ):  # fmt: skip
        page.goto(f"{base}#/run/{RUN}/trajectories?{'&'.join(f'{k}={v}' for k, v in given.items())}")
        asked = answers.answer("trajectories", {"run": RUN, **given})
        page.wait_for_selector(f'[data-total="{asked["total"]}"]')
        if asked["rows"]:
            first = page.get_by_role("link", name=asked["rows"][0]["id"], exact=True)
            first.wait_for()
            assert page.locator('[data-table="trajectories"] tbody a').first.inner_text() == asked["rows"][0]["id"]
    page.goto(f"{base}#/run/{RUN}/trajectories?said=window.hacked&round=0&scored=true")
    token = to_one_token(page)
    assert token["who wrote it"].startswith("sampled")
    assert page.evaluate("window.hacked") is None
    page.goto(f"{base}#/run/{RUN}/step/4")
    assert table(page, "group").count() == 3
    page.goto(f"{base}#/compare?a={RUN}&b={OTHER}")
    assert "tasks in both" in page.locator("[data-compared]").inner_text()


def test_page_follows_a_run_that_goes_on(open_page: Callable[[str], Any], tmp_path: Path) -> None:
    write_shop(tmp_path, "live", step_count=2, groups=1)
    with opened_runs([str(tmp_path)]) as viewed:
        answers = Answers(viewed)
        with served(answers) as server:
            page = open_page(server.url)
            table(page, "runs")
            page.goto(page.url.split("#")[0] + "#/run/live/trajectories?success=true")
            page.wait_for_selector("[data-total]")
            before = total(page)
            with page.expect_response(lambda response: "/api/changes" in response.url):
                pass  # it has looked once, and so will see a difference
            with Store.open(tmp_path) as store, store.begin() as connection:
                failed = connection.execute(trajectories.select().where(~trajectories.c.success)).mappings().first()
                assert failed is not None
                won = {"success": True, "ended_at": 1_900_000_000.0}
                execute(connection, [Update(trajectories, {"id": failed["id"]}, won)])
            wait_total(page, before + 1)
