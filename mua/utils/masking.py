"""Credentials inside URLs: never shown, and kept where a request needs them.

A URL can carry a password (``https://name:password@host``) or a key (``https://host/v1?api_key=...``). Whatever is
printed, logged or written goes through :func:`mask_credentials`; what is asked goes through :func:`below`, which keeps
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

HIDDEN = "**********"
"""Stands for whatever was masked, as it does for a secret of the configuration."""

_SECRET = r"key|token|secret|passw|pwd|credential|auth|sig"
_SECRET_NAME = re.compile(rf"{_SECRET}|^(?:code|pass)$", re.IGNORECASE)
# The name and password before the host. The second form is a password that should have been percent-encoded: what
# follows the colon is no port, so it reaches to the last @, whatever stands between.
_USER = re.compile(r"(?<=://)(?:[^/?#\s@:\[]*:(?!\d*(?:[/?#\s\"',)]|$))[^\s\"'<>]*@|[^/?#\s\"'<>]*@)")
_QUERY = re.compile(
    rf"(?<=[?&;])([^=&;#\s]*(?:{_SECRET})[^=&;#\s]*|code|pass)=(?!{re.escape(HIDDEN)})[^&;#\s\"'<>)]+", re.IGNORECASE
)


def mask_credentials(text: str) -> str:
    """``text`` with the credentials of every URL in it replaced by :data:`HIDDEN`; other text stays as it is."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1={HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def masked_tree(value: Any) -> Any:
    """``value``, made of dictionaries, lists and scalars, with every string in it :func:`mask_credentials`."""
    if isinstance(value, dict):
        return {name: masked_tree(item) for name, item in value.items()}
    if isinstance(value, list):
        return [masked_tree(item) for item in value]
    return mask_credentials(value) if isinstance(value, str) else value


def credentials(url: str) -> Iterator[str]:
    """What :func:`mask_credentials` hides of one URL, as written and decoded: passwords and keys, not names."""
    if "://" not in url:
        return
    parts = urlsplit(url)
    name, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    found = [password if colon else name]
    found += [value for key, value in parse_qsl(parts.query) if _SECRET_NAME.search(key)]
    for secret in filter(None, found):
        yield secret
        if (plain := unquote(secret)) != secret:
            yield plain


def below(base: str, path: str) -> str:
    """The URL of ``path`` below ``base``, whose query, such as an API key, goes with it."""
    parts = urlsplit(base)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{path}").geturl()
