"""A process that makes text of pages: ``python -m environments.servers.parse_worker``, started by :mod:`parsers`.

::

    stdin (a socket) ──► a line of JSON, then as many bytes as it says ──► text ──► a line of JSON back

One page at a time. CPU time and memory are limits of the kernel's: a page that takes more ends the process. It ends by
itself when the socket is closed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket

from environments.servers.page_text import page_text

_MEMORY = 2**31


def main() -> None:
    """Answer pages until the socket is closed."""
    connection = socket.socket(fileno=os.dup(0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stream = connection.makefile("rwb")
    try:
        import lxml.html  # type: ignore[import-untyped]  # noqa: F401
        import pypdf  # noqa: F401
        import trafilatura  # noqa: F401
    except ImportError as error:
        hello = {"missing": str(error)}
    else:
        hello = {"missing": ""}
    stream.write(json.dumps(hello).encode() + b"\n")
    stream.flush()
    while line := stream.readline():
        asked = json.loads(line)
        body = stream.read(asked.pop("bytes"))
        # The signal's own action, the end: a handler of Python's would wait for the parser.
        signal.setitimer(signal.ITIMER_PROF, asked.pop("seconds"))
        try:
            answer = page_text(body, **asked)._asdict()
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"[:300]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(json.dumps(answer).encode() + b"\n")
        stream.flush()


if __name__ == "__main__":
    main()
