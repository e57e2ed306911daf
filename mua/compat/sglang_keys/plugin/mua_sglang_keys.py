"""SGLang plugin (entry-point group ``sglang.srt.plugins``) for servers with an API key. Upstream: sglang 0.5.23.

Two limits are lifted. SGLang writes its arguments, keys among them, to its log and into the answer of ``/server_info``:
it masks the secrets of watermarks on the way there, and here the keys with them. And its check of keys looks at HTTP
requests alone, so that anybody may open a WebSocket (``/v1/realtime``): here those are closed unopened.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

MASK = "<redacted>"
_NAMES = ("api_key", "admin_api_key")
_OPTION = re.compile(r"(--(?:admin[-_])?api[-_]key)[ =]\S+")
_Send = Callable[[dict[str, Any]], Awaitable[None]]


def register() -> None:
    """Called by SGLang in every process of the server before its arguments are read."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("sglang.srt.sampling.watermarking.core.redact_watermark_secrets", mask_fields),
        ("sglang.srt.sampling.watermarking.core.redact_watermark_command_line", mask_command_line),
        ("sglang.srt.utils.auth.add_api_key_middleware", refuse_websockets),
    ):
        HookRegistry.register(target, hook, HookType.AFTER)


def mask_fields(shown: Any, *_: Any, **__: Any) -> Any:
    """What SGLang is about to show, without the keys."""
    if not isinstance(shown, dict):
        return shown
    return shown | {name: MASK for name in _NAMES if shown.get(name)}


def mask_command_line(shown: str, *_: Any, **__: Any) -> str:
    """The command line that SGLang is about to show, without the keys of its configuration file."""
    return _OPTION.sub(rf"\1 {MASK}", shown)


def refuse_websockets(_: None, app: Any, **__: Any) -> None:
    """Called after the check of keys was added to ``app``."""
    app.add_middleware(_NoWebSockets)


class _NoWebSockets:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: _Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no WebSockets here"})
        else:
            await self._app(scope, receive, send)
