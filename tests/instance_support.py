"""Deadlines of one instance, for tests in which a call hangs."""

from __future__ import annotations

from mua.environment.manager import EnvironmentInstance


def hurry(instance: EnvironmentInstance, **seconds: float) -> None:
    """Shorten ``call_seconds`` or ``reset_seconds`` from now on.

    What is meant to hang does so at any deadline; what came before has the usual one, which a busy machine keeps too.
    """
    instance._config = instance._config.model_copy(update=seconds)
