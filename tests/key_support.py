"""What a stranger tries against a server with a key."""

from __future__ import annotations

import re

import aiohttp

_OPEN = ("/health", "/ready", "/metrics")
"""SGLang answers these to everybody; they change nothing and tell that the server lives."""


async def routes(url: str, api_key: str) -> list[tuple[str, str]]:
    """Method and path of everything the server offers and says so, and the pages that say it."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    told = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [*told, *(("GET", page) for page in ("/openapi.json", "/docs", "/redoc", "/nothing"))]


async def answers_without(url: str, known: list[tuple[str, str]], header: str | None) -> dict[tuple[str, str], int]:
    """The status of all ``known`` but the health probes that did not answer 401 to ``Authorization: header``."""
    found = {}
    async with aiohttp.ClientSession(headers={"Authorization": header} if header else None) as session:
        for method, path in known:
            if path.startswith(_OPEN):
                continue
            filled = re.sub(r"\{[^}]*\}", "x", path)
            body = {"model_path": "/nowhere", "input_ids": [1], "tags": ["weights"]} if method != "GET" else None
            async with session.request(method, url + filled, json=body) as answer:
                if answer.status != 401:
                    found[method, path] = answer.status
    return found
