"""How long the page of ``mua view`` takes: ``python -m tools.bench.view [--trajectories 10000] [--turns 6]``.

A run is written (tools/bench/shop_run.py), served, and opened in a headless Chromium (tools/view_browser.py), each page
in a new context with nothing cached. Per page: the browser's first contentful paint, and when what was asked for stands
on the page. The server is started anew before the first page, and has answered before for the others.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mua.view.html_page import export_page
from mua.view.page_answers import Answers
from mua.view.viewed_runs import opened_runs
from tools.bench.shop_run import write_shop
from tools.view_browser import PATIENCE_MS, chromium
from tools.view_served import served

RUN = "shop-grpo"
_GROUPS, _SIZE = 8, 8
PAGES = {
    "runs": ("", '[data-table="runs"] tbody tr'),
    "run": (f"run/{RUN}", '[data-chart="held-out success"] canvas'),
    "steps": (f"run/{RUN}/steps", '[data-table="steps"] tbody tr'),
    "one step": (f"run/{RUN}/step/7", '[data-table="group"] tbody tr'),
    "trajectories": (f"run/{RUN}/trajectories", '[data-table="trajectories"] tbody tr'),
    "failed of a kind": (f"run/{RUN}/trajectories?success=false&kind=refund", '[data-table="trajectories"] tbody tr'),
    "with a tool error": (f"run/{RUN}/trajectories?tool_error=true", '[data-table="trajectories"] tbody tr'),
    "search in ids": (f"run/{RUN}/trajectories?text=train/17", '[data-table="trajectories"] tbody tr'),
    "search in conversations": (f"run/{RUN}/trajectories?said=order+1234", "[data-total]"),
    "largest gap": (f"run/{RUN}/trajectories?order=gap", '[data-table="trajectories"] tbody tr'),
    "largest gap, again": (f"run/{RUN}/trajectories?order=gap", '[data-table="trajectories"] tbody tr'),
    "suspects": (f"run/{RUN}/trajectories?suspect=any", "[data-total]"),
    "last page": (f"run/{RUN}/trajectories?offset=9500", "[data-total]"),
    "one trajectory": (f"run/{RUN}/t/{RUN}%2F1%2F0%2F80%2F0%2F1", ".segment .token"),
}


def timed(browser: Any, address: str, selector: str, name: str) -> dict[str, Any]:
    """Milliseconds of one page, opened in a context of its own."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    started = time.perf_counter()
    page.goto(address)
    page.locator(selector).first.wait_for()
    shown = time.perf_counter() - started
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null")
    context.close()
    return {"page": name, "first_paint_ms": round(paint or 0), "shown_ms": round(1000 * shown)}


def measured(browser: Any, answers: Answers) -> list[dict[str, Any]]:
    """All of :data:`PAGES` from a server."""
    found = []
    with served(answers) as server:
        base = server.url.partition("?")[0]
        for name, (path, selector) in PAGES.items():
            # The address with the key drops what follows #: by then a reader has the cookie.
            found.append(timed(_Known(browser, server.url), f"{base}#/{path}", selector, name))
    return found


class _Known:
    """A browser whose contexts have the server's cookie."""

    def __init__(self, browser: Any, url: str) -> None:
        self._browser, self._url = browser, url

    def new_context(self, **settings: Any) -> Any:
        context = self._browser.new_context(**settings)
        context.request.get(self._url)
        return context


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the page of mua view.")
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=4, help="exchanges of an episode, of about 80 tokens each")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    tell: Callable[[str], None] = (lambda _: None) if chosen.json else print
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        place, steps = Path(folder) / "shop", chosen.trajectories // (_GROUPS * _SIZE)
        began = time.perf_counter()
        write_shop(place, RUN, step_count=steps, groups=_GROUPS, size=_SIZE, turns=chosen.turns)
        megabytes = (place / "store.sqlite").stat().st_size / 2**20
        with opened_runs([str(place)]) as viewed:
            answers = Answers(viewed)
            count = answers.answer("changes", {"run": RUN})["trajectories"]
            tell(f"{count:,} trajectories, {steps} steps, store of {megabytes:.0f} MiB, "
                 f"written in {time.perf_counter() - began:.0f} s; {platform.machine()}")  # fmt: skip
            rows = measured(browser, answers)
            began = time.perf_counter()
            made = export_page(answers, Path(folder) / "page.html", only={})
            exporting = time.perf_counter() - began
        address = (Path(folder) / "page.html").as_uri()
        rows.append(timed(browser, f"{address}#/run/{RUN}/trajectories", "[data-total]", "the file's trajectories"))
    if chosen.json:
        print(json.dumps({"trajectories": count, "pages": rows, "export_seconds": exporting, "file": made.bytes}))
        return
    print(f"{'page':<26} {'first paint':>12} {'shown':>9}")
    for row in rows:
        print(f"{row['page']:<26} {row['first_paint_ms']:>9} ms {row['shown_ms']:>6} ms")
    print(f"export: {made.trajectories:,} of {made.of:,} trajectories, {made.bytes / 2**20:.1f} MiB, {exporting:.0f} s")


if __name__ == "__main__":
    main()
