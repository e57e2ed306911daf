"""Secrets: never shown, and kept where a request needs them.

Whatever is printed, logged, stored or written goes through :func:`mask_secrets` (text) or :func:`masked_tree` (a
configuration). Both hide

- what stands under a name that says secret (:func:`says_secret`): a key, ``NAME=value``, ``--name value``, a header, a
  parameter of a URL, and the password before a URL's host;
- what looks like a key of a known service;
- wherever it stands, what the configuration took from the environment into such a place or from a variable of such a
  name (:func:`remember_secrets`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

HIDDEN = "**********"
"""Stands for whatever was masked, as it does for a secret of the configuration."""
SHORTEST_SECRET = 4
"""A shorter text is hidden where it stands under a name alone: it may be a part of anything."""

_NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile(
    "token|secrets?|(?:pg)?passwords?|passwd|passphrase|sshpass|pwd|credentials?|authorization|cookie|bearer|jwt|appid|"
    "api(?:key|token)s?|(?:access|secret)key"
)
_SECRET_OF = re.compile("keys?|auth|cookie|signature")
"""Secrets where another word stands before them, or as below."""
_SECRET_THERE = re.compile(rf"{_SECRET_OF.pattern}|pass|sig|pat|code")
"""Secrets in a place whose names are those of parameters, flags and variables."""
_NO_SECRET_OF = re.compile(
    "stop|eos|bos|pad|unk|special|sort|primary|foreign|public|group|cache|order|answer|partition|error|status|exit|by|"
    "http|return|zip|country|language|source|input|output|prompt|question|label|messages?|response|reward|metadata|tool|"
    "json|dict|image|audio|video|mask|cls|sep|begin|end|first|last|next|per|page|newline|control|think"
)
"""``stop_token``, ``sort_key`` and ``label_key`` are none."""
_VARIABLE = re.compile(
    "(?:^|_)(?:TOKEN|SECRET|PASSWORD|CREDENTIALS|(?:API|ACCESS|PRIVATE)_KEY)_(?!FILE|PATH|DIR|ID|URL|LEN|MAX)"
)
"""In a variable's name more may follow: ``TOKEN_GITHUB``, ``API_KEY_2``."""
_FREE = ("body", "variables", "env", "headers", "extra", "query", "params", "cookies")
"""Sections whose keys are other programs' and services'."""
_ALL_OF = ("headers", "env", "cookies")
"""Sections of text that is secret by where it stands."""

# The name and password before the host. The second form is a password that should have been percent-encoded: what
# follows the colon is no port, so it reaches to the last @, whatever stands between.
_USER = re.compile(
    r"(?<=://)(?:[^/?#\s@:\[]{0,200}:(?!\d{0,9}(?:[/?#\s\"',)]|$))"
    r"(?:[^\s\"'<>]|[\"'](?=[^\s\"'<>,:;)\]}]{1,100}@)){0,400}@|[^/?#\s\"'<>]{0,400}@)"
)
_PARAMETER = re.compile(rf"(?<=[?&;])([^=&;#\s]{{1,200}})=(?!{re.escape(HIDDEN)})([^&;#\s\"'<>)]+)")
_ASSIGNED = re.compile(r"(?<![\w.-])((?:-{1,2}|export +)?[A-Za-z][\w.-]*)([\"']? *[=:] *[\"']?)(?=\S)")
_FLAG = re.compile(r"(?<![\w.-])(-{1,2}[A-Za-z][\w.-]*)([ \t]+[\"']?)(?=\S)")
_VALUE = re.compile(r"(?<=[\"'])[^\"'\n]+|(?:(?:Bearer|Basic|Token) +)?[^\s\"',;&<>]+")
_LOOKS = re.compile(
    r"\bsk-[\w-]{8,}|\b(?:hf|gh[pousr]|github_pat|r8)_\w{8,}|\b(?:xox[a-z]|glpat|nvapi)-[\w-]{8,}|\bAKIA[A-Z0-9]{16}\b|"
    r"\bAIza[\w-]{30,}|\beyJ[\w-]{10,}\.[\w.-]+|\bBearer\s+[^\s\"'*]+"
)

_remembered: dict[str, str] = {}
"""Secrets by value, with the variable of the environment that each came from."""


def says_secret(name: str, *, alone: bool = True) -> bool:
    """Whether what stands under ``name`` is a secret; ``alone``: also where the name is a word such as ``key``."""
    parts = [part.lower() for part in _NAME_PARTS.findall(name)]
    if not parts or name == "PWD" or (len(parts) > 1 and _NO_SECRET_OF.fullmatch(parts[-2])):
        return False
    if name.isupper() and _VARIABLE.search(name):
        return True
    there = _SECRET_THERE if alone else _SECRET_OF
    return bool(_SECRET.fullmatch(parts[-1]) or (there.fullmatch(parts[-1]) and (alone or len(parts) > 1)))


def remember_secrets(taken: Mapping[str, str], data: Any) -> None:
    """Have these values of variables, by their names, hidden everywhere from now on, if they are secret: by the name,
    or where ``data``, the configuration that they stand in, has them.

    There, a place or the name before a password is none: it is a part of too many other texts.
    """
    shown, real = ("\n".join(str(leaf) for _, leaf in flatten(tree)) for tree in (masked_tree(data), data))
    for name, value in taken.items():
        found = value not in shown and not value.startswith("/") and f"//{value}:" not in real
        if len(value) >= SHORTEST_SECRET and value != "none" and (says_secret(name) or found):
            _remembered[value] = name


def referred(text: str) -> str:
    """``text`` for a shell, with remembered secrets as references to the variables that they came from."""
    for value, name in _remembered.items():
        text = text.replace(value, f"${{{name}}}")
    return text


def mask_secrets(text: str) -> str:
    """``text`` with every secret in it replaced by :data:`HIDDEN`; other text stays as it is."""
    for value in _remembered:
        if value in text:  # and is no part of a longer word
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", HIDDEN, text)
    if "://" in text:
        text = _PARAMETER.sub(_hide_parameter, _USER.sub(f"{HIDDEN}@", text))
    return _LOOKS.sub(HIDDEN, _hide_named(_FLAG, _hide_named(_ASSIGNED, text)))


def _hide_parameter(found: re.Match[str]) -> str:
    return f"{found[1]}={HIDDEN}" if says_secret(found[1]) else found[0]


def _hide_named(pattern: re.Pattern[str], text: str) -> str:
    at, kept = 0, list[str]()
    while found := pattern.search(text, at):
        name, between = found.groups()
        flag = name.startswith(("-", "export"))
        prose = ":" in between and name in ("token", "secret", "bearer")  # "unexpected token: ..."
        kept.append(text[at : found.end()])
        at = found.end()  # a value that is shown may begin with a name
        if not prose and says_secret(name.removeprefix("export"), alone=flag) and (value := _VALUE.match(text, at)):
            kept.append(HIDDEN)
            at = value.end()
    return "".join([*kept, text[at:]])


def masked_tree(value: Any, *, free: bool = False) -> Any:
    """``value``, made of dictionaries, lists and scalars, with every secret in it hidden.

    ``free`` says that its keys are not the configuration's own, so that even ``key`` is one.
    """
    if isinstance(value, dict):
        return {
            name: _hide(item)
            if says_secret(str(name), alone=free)
            else {key: _hide(one) for key, one in item.items()}
            if name in _ALL_OF and isinstance(item, dict)
            else masked_tree(item, free=free or name in _FREE)
            for name, item in value.items()
        }
    if isinstance(value, list):
        before = [None, *value]
        return [
            _hide(item)
            if isinstance(flag, str) and flag.startswith("-") and "=" not in flag and says_secret(flag)
            else masked_tree(item, free=free)
            for flag, item in zip(before, value, strict=False)
        ]
    return mask_secrets(value) if isinstance(value, str) else value


def _hide(value: Any) -> Any:
    """All texts of ``value`` but those that say that there is no secret."""
    if isinstance(value, dict):
        return {name: _hide(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_hide(item) for item in value]
    return HIDDEN if isinstance(value, str) and value not in ("", "none") else value


def hidden_texts(shown: Any, real: Any) -> Iterator[tuple[str, str]]:
    """Key and text of each leaf of ``real``, a dumped configuration, that is another text in ``shown``."""
    known = dict(flatten(shown))
    for key, value in flatten(real):
        text = value.get_secret_value() if hasattr(value, "get_secret_value") else value
        if isinstance(text, str) and text not in ("", "none") and known.get(key) != text:
            yield key, text


def secret_parts(text: str) -> Iterator[str]:
    """What :func:`mask_secrets` hides of a text, as it is written and, from a URL, decoded."""
    kept = mask_secrets(text).split(HIDDEN)
    found = re.fullmatch("(.+?)".join(map(re.escape, kept)), text, re.DOTALL)
    for part in found.groups() if found else ():
        for secret in (part, *(part.split(":", 1)[1:] if "://" in text else ())):  # a name and a password
            yield from {one for one in (secret, unquote(secret)) if len(one) >= SHORTEST_SECRET}


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a configuration by their keys; an empty mapping or list is one."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    if not items or not value:
        yield key, value
    for name, item in items:
        yield from flatten(item, f"{key}.{name}" if key else str(name))


def below(base: str, path: str) -> str:
    """The URL of ``path`` below ``base``, whose query, such as an API key, goes with it."""
    parts = urlsplit(base)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{path}").geturl()
