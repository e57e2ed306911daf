"""A tool server over standard input and output that misbehaves on order: ``python -S misbehaving_mcp.py [OPTION]``.

With the standard library alone, so that it starts in milliseconds and can break the protocol in ways that a library
would not. Each tool does what its name says. Options: ``--exit TEXT`` prints TEXT on standard error and exits with
status 3; ``--mute`` never answers; ``--tools JSON`` lists these tools in place of its own; ``--banner`` prints lines
that are no messages first; ``--stubborn`` ignores SIGTERM and the end of its input; ``--leaves`` ends after the
handshake; ``--twice FILE`` crashes the first ``fragile`` call, counted in FILE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

Message = dict[str, Any]
STATE: dict[str, str] = {}
ANY: Message = {"type": "object", "properties": {}}
READ_ONLY = {"readOnlyHint": True}


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def notify(method: str, **params: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}))


def text(said: str, **more: Any) -> Message:
    return {"content": [{"type": "text", "text": said}], **more}


def echo(text_: str = "") -> Message:
    return text(text_)


def put(key: str, value: str) -> Message:
    STATE[key] = value
    return text("ok")


def get(key: str) -> Message:
    return text(STATE.get(key, "nothing"))


def pid() -> Message:
    return text(str(os.getpid()))


def variables() -> Message:
    return text(json.dumps(dict(os.environ)))


def wrong() -> Message:
    return text("this did not work", isError=True)


def crash() -> Message:
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(7)


def fragile() -> Message:
    file = Path(sys.argv[sys.argv.index("--twice") + 1])
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    return crash() if file.read_text() == "x" else text("the second time it works")


def hang() -> Message:
    time.sleep(3600)
    return text("")


def slow(seconds: float) -> Message:
    time.sleep(seconds)
    return text("done")


def big(size: int) -> Message:
    return text("x" * size)


def flood_output() -> Message:
    while True:
        os.write(1, b"x" * 65536)


def flood_lines() -> Message:
    while True:
        os.write(1, b"\n" * 65536)


def flood_errors() -> Message:
    while True:
        os.write(2, b"x" * 65535 + b"\n")


def flood_notifications() -> Message:
    while True:
        notify("notifications/message", level="info", data="x")


def garbage() -> Message:
    write('{"jsonrpc": "2.0", "id": ')
    return hang()


def garbage_bytes() -> Message:
    os.write(1, b'{"\xff\xfe": 1}\n')
    return hang()


def stray() -> Message:
    write("debug: this is no message")
    return text("answered all the same")


def shapeless() -> Message:
    return {"content": "not a list"}


def surrogate() -> Message:
    return text("\ud800")


def change_tools() -> Message:
    TOOLS.pop("echo", None)
    notify("notifications/tools/list_changed")
    return text("changed")


def change_silently() -> Message:
    TOOLS.pop("echo", None)
    return text("changed")


def detach() -> Message:
    """A grandchild that leaves the process group and the session; its number."""
    ready, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.write(told, str(os.getpid()).encode())
            for descriptor in (0, 1, 2):
                os.close(descriptor)
            time.sleep(3600)
        os._exit(0)
    os.wait()
    return text(os.read(ready, 32).decode())


def ask() -> Message:
    """Ask the client for a completion, and answer with what came."""
    params = {"messages": [], "maxTokens": 1}
    write(json.dumps({"jsonrpc": "2.0", "id": "mine", "method": "sampling/createMessage", "params": params}))
    return text(sys.stdin.readline())


def kinds() -> Message:
    return {
        "content": [
            {"type": "text", "text": "a text"},
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            {"type": "audio", "data": "AAA=", "mimeType": "audio/wav"},
            {"type": "resource", "resource": {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "inside"}},
            {"type": "resource", "resource": {"uri": "file:///b.bin", "blob": "AAAA"}},
            {"type": "resource_link", "uri": "file:///c.pdf", "name": "report", "mimeType": "application/pdf"},
        ]
    }


def structured() -> Message:
    return {"content": [], "structuredContent": {"answer": 42}}


def tool(name: str, properties: Message | None = None, **more: Any) -> Message:
    schema = {"type": "object", "properties": properties or {}, "required": list(properties or {})}
    return {"name": name, "description": name, "inputSchema": schema, **more}


STRING, NUMBER = {"type": "string"}, {"type": "number"}
TOOLS = {
    "echo": (echo, tool("echo", {"text_": STRING}, annotations=READ_ONLY)),
    "put": (put, tool("put", {"key": STRING, "value": STRING})),
    "get": (get, tool("get", {"key": STRING}, annotations=READ_ONLY)),
    "slow": (slow, tool("slow", {"seconds": NUMBER})),
    "big": (big, tool("big", {"size": {"type": "integer"}})),
    "fragile": (fragile, tool("fragile", annotations=READ_ONLY)),
} | {
    f.__name__: (f, tool(f.__name__))
    for f in (
        pid, variables, wrong, crash, hang, flood_output, flood_lines, flood_errors, flood_notifications, garbage,
        garbage_bytes, stray, shapeless, surrogate, change_tools, change_silently, detach, ask, kinds, structured,
    )
}  # fmt: skip


def listed() -> list[Message]:
    if "--tools" in sys.argv:
        return json.loads(sys.argv[sys.argv.index("--tools") + 1])  # type: ignore[no-any-return]
    return [schema for _, schema in TOOLS.values()]


def answer(message: Message) -> Message:
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        capabilities = {"tools": {"listChanged": True}}
        info = {"name": "misbehaving", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": capabilities, "serverInfo": info}
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": listed()}
    if method == "tools/call":
        if params["name"] not in TOOLS:
            return text(f"Unknown tool: {params['name']}", isError=True)
        return TOOLS[params["name"]][0](**params.get("arguments", {}))
    raise LookupError(method)


def main() -> None:
    if "--exit" in sys.argv:
        print(sys.argv[sys.argv.index("--exit") + 1], file=sys.stderr, flush=True)
        sys.exit(3)
    if "--banner" in sys.argv:
        write("misbehaving server, at your service\n")
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        if not (line := sys.stdin.readline()):
            if "--stubborn" in sys.argv:
                time.sleep(3600)
            return
        message = json.loads(line)
        if "--mute" in sys.argv or "id" not in message:
            if "--leaves" in sys.argv:
                return
            continue
        try:
            write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer(message)}))
        except LookupError as error:
            missing = {"code": -32601, "message": f"no method {error}"}
            write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": missing}))


if __name__ == "__main__":
    main()
