"""The server of ``mua view``: the page, its files, and answers as JSON. It reads, and changes nothing.

Who asks must know the key in the address that is printed (as a cookie from then on), since other users of a machine
reach its loopback address too, and must name this server in ``Host``, since a page elsewhere can let its own name point
here (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import mimetypes
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from aiohttp import web

from mua.store.faults import StoreError
from mua.utils.errors import MuaError
from mua.view.html_page import MODULES, STATIC, STYLES, served_page
from mua.view.page_answers import Answers, as_bytes
from mua.view.trajectory_lists import BadQuestion
from mua.view.viewed_runs import NotThere

LOOPBACK = "127.0.0.1"
ANSWER_SECONDS = 120.0
"""Until whoever asked is told that it takes too long."""
_AT_ONCE = 4
_COOKIE = "mua_view"
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)


class ViewServer:
    """Serves :class:`mua.view.page_answers.Answers` on one address."""

    def __init__(self, answers: Answers, host: str = LOOPBACK, port: int = 0) -> None:
        self.answers, self.host, self.port = answers, host, port
        self.key = secrets.token_urlsafe(16)
        self._page, self._policy = served_page()
        self._files = {*MODULES.values(), *STYLES}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    @property
    def url(self) -> str:
        """To open in a browser, with the key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/?key={self.key}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """A block in which it listens; :attr:`port` is then the one it has. Raises OSError where it may not."""
        application = web.Application(middlewares=[self._guarded])
        application.add_routes([
            web.get("/", self._index), web.get("/static/{file:.+}", self._file), web.get("/api/{path}", self._api),
        ])  # fmt: skip
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, self.host, self.port).start()
            except OSError as error:
                raise MuaError(
                    f"cannot listen on {self.host} port {self.port}: {error.strerror or error}; choose another --port"
                ) from None
            self.port = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._names_this(request.host):
            response: web.StreamResponse = web.Response(status=403, text="this server has another name\n")
        elif request.headers.get("Sec-Fetch-Site", "none") == "cross-site" and request.path != "/":
            response = web.Response(status=403, text="asked by another page\n")
        elif not self._knows(request):
            response = web.Response(status=401, text="open the address that mua view printed, with its key\n")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = web.Response(status=error.status, text=f"{error.reason}\n")
        response.headers.update({
            "Content-Security-Policy": self._policy, "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-cache" if request.path.startswith("/static/") else "no-store",
        })  # fmt: skip
        return response

    def _names_this(self, host: str) -> bool:
        """Whether ``Host`` is an address or ``localhost``, or the name that was bound: no name that somebody else could
        let point here."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name in ("localhost", self.host.lower()):
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(name) is not None
        return False

    def _knows(self, request: web.Request) -> bool:
        given = request.cookies.get(_COOKIE + str(self.port)) or ""
        if request.path == "/" and "key" in request.query:
            given = request.query["key"]
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.key.encode())

    async def _index(self, request: web.Request) -> web.StreamResponse:
        if "key" in request.query:
            # The key leaves the address, which people copy.
            moved = web.Response(status=303, headers={"Location": "/"})
            moved.set_cookie(_COOKIE + str(self.port), self.key, httponly=True, samesite="Lax", path="/")
            return moved
        return web.Response(text=self._page, content_type="text/html", charset="utf-8")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        if name not in self._files:
            raise web.HTTPNotFound
        kind = "text/javascript" if name.endswith(("js", "mjs")) else mimetypes.guess_type(name)[0] or "text/plain"
        return web.FileResponse(STATIC / name, headers={"Content-Type": f"{kind}; charset=utf-8"})

    async def _api(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._slots:
                path, given = request.match_info["path"], dict(request.query)
                body = await asyncio.to_thread(lambda: as_bytes(self.answers.answer(path, given)))
        except TimeoutError:
            return _refused(503, f"no answer within {ANSWER_SECONDS:.0f} s; ask for less")
        except MuaError as error:
            status = 503 if isinstance(error, StoreError) and error.passing else 500
            return _refused({NotThere: 404, BadQuestion: 400}.get(type(error), status), str(error))
        response = web.Response(body=body, content_type="application/json")
        response.enable_compression()
        return response


def _refused(status: int, why: str) -> web.Response:
    return web.Response(status=status, body=as_bytes({"error": why}), content_type="application/json")


def serve(answers: Answers, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve until the process is interrupted; ``tell`` is given the address."""

    def warm_up() -> None:
        """What only the first question would wait for: scipy, and the pages of the database."""
        with contextlib.suppress(MuaError):
            import scipy.stats  # noqa: F401

            for key in answers.viewed.keys()[:1]:
                answers.answer("run", {"run": key})

    async def main() -> None:
        server = ViewServer(answers, host, port)
        async with server.serving():
            tell(server.url)
            warm = asyncio.create_task(asyncio.to_thread(warm_up))
            try:
                await asyncio.Event().wait()
            finally:
                warm.cancel()

    asyncio.run(main())
