"""API keys of a spawned SGLang server: how they reach it, and a plugin that keeps it from telling them.

Reason: SGLang 0.5.23 takes keys on its command line, which everybody on the machine sees, or from a configuration file,
and then writes all its arguments to its log. Its check of keys leaves WebSockets out. No file of SGLang is changed: the
plugin uses its hooks (``sglang.srt.plugins.hook_registry``).

With ``--api-key`` alone every endpoint wants that key but ``/health*``, ``/ready*`` and ``/metrics*``. With
``--admin-api-key`` beside it the endpoints that change the server (weights, memory, caches, logging, profiles) want the
administrator's key instead, so that a client with the other one can only ask for text.

Upstream: sglang 0.5.23. Expiry: ``tests/contract/test_sglang_keys.py`` asks SGLang alone, without the plugin; the day
it masks keys itself and its check of keys takes WebSockets, the plugin can go.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

PLUGIN = Path(__file__).parent / "plugin"


def new_key() -> str:
    """A key nobody can guess."""
    return secrets.token_hex(32)


def with_plugin(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` of a server that is to load the plugin."""
    inherited = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return dict(environment) | {"PYTHONPATH": os.pathsep.join([str(PLUGIN), *inherited])}


def write_key_file(path: Path, api_key: str, admin_api_key: str | None = None) -> None:
    """Write what ``--config`` of SGLang reads the keys from; only its owner may read it. Remove it after the start."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"api-key: '{api_key}'\n")
        if admin_api_key is not None:
            file.write(f"admin-api-key: '{admin_api_key}'\n")
