"""The page: its modules and style, put together for the server (links) or for a file (all inside)."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from pathlib import Path

STATIC = Path(__file__).with_name("static")
MODULES = {
    "preact": "vendor/preact.mjs",
    "preact/hooks": "vendor/preact_hooks.mjs",
    "htm": "vendor/htm.mjs",
    "uplot": "vendor/uplot.mjs",
    **{f"view/{name}": f"{name}.js" for name in (
        "app", "api", "charts", "compare", "embedded", "list", "overview", "steps", "trajectory", "ui",
    )},
}  # fmt: skip
"""What modules import each other as, and the file of each: the browser's import map, so nothing has to be built."""
STYLES = ("vendor/uplot.css", "style.css")
_START = 'import "view/app";'


def served_page() -> tuple[str, str]:
    """The page of a server, and its Content-Security-Policy: only its own files, no script but these."""
    imports = json.dumps({"imports": {name: f"/static/{file}" for name, file in MODULES.items()}})
    styles = "".join(f'<link rel="stylesheet" href="/static/{file}">' for file in STYLES)
    policy = (
        f"default-src 'none'; script-src 'self' {_digest(imports)} {_digest(_START)}; style-src 'self'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _page("mua view", styles, imports, ""), policy


def whole_page(title: str, blobs: Iterable[tuple[str, bytes]], lead: str = "") -> Iterable[str]:
    """The pieces of a page that needs nothing else; ``blobs`` are bytes by name, which its modules find there.

    The bytes stand in it as base64, in which no markup can occur. ``lead`` is HTML that stands before the list of runs.
    """
    sources = {name: (STATIC / file).read_bytes() for name, file in MODULES.items()}
    imports = json.dumps({
        "imports": {
            name: f"data:text/javascript;base64,{base64.b64encode(source).decode()}" for name, source in sources.items()
        }
    })  # fmt: skip
    styles = "".join(f"<style>{(STATIC / file).read_text(encoding='utf-8')}</style>" for file in STYLES)
    policy = (
        f"default-src 'none'; script-src data: {_digest(imports)} {_digest(_START)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    before, after = _page(
        title, styles, imports, f'<meta http-equiv="Content-Security-Policy" content="{policy}">', lead
    ).split("<!-- data -->")
    yield before
    for name, content in blobs:
        text = base64.b64encode(content).decode()
        yield f'<script type="application/octet-stream" data-name="{html.escape(name)}">{text}</script>\n'
    yield after


def _page(title: str, styles: str, imports: str, policy: str, lead: str = "") -> str:
    lead = f'<section id="lead">{lead}</section>' if lead else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{policy}<title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">{styles}'
        f'<script type="importmap">{imports}</script></head><body>{lead}<div id="app"></div>\n<!-- data -->'
        f'<script type="module">{_START}</script></body></html>\n'
    )


def _digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
