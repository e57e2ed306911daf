"""What a role's endpoints cost: counters and latencies since they were last asked for."""

from __future__ import annotations

from collections.abc import Sequence

LATENCIES = 100_000
"""Latencies kept between two readings; a longer interval keeps its first ones."""
_ALWAYS = ("requests", "retries", "failovers", "tokens_in", "tokens_out", "cost", "cache_hits")


class Accounts:
    """Counts of one role. Every reading begins anew."""

    def __init__(self) -> None:
        self._amounts: dict[str, float] = {}
        self._latencies: list[float] = []

    def count(self, name: str, amount: float = 1.0) -> None:
        self._amounts[name] = self._amounts.get(name, 0.0) + amount

    def answered(self, seconds: float) -> None:
        """A request was answered after ``seconds``."""
        if len(self._latencies) < LATENCIES:
            self._latencies.append(seconds)

    def take(self) -> dict[str, float]:
        """Everything since the last call. Latencies are left out where there was no answer."""
        amounts, self._amounts = self._amounts, {}
        latencies, self._latencies = self._latencies, []
        metrics = dict.fromkeys(_ALWAYS, 0.0) | amounts
        if latencies:
            latencies.sort()
            metrics["latency_p50_seconds"] = quantile(latencies, 0.50)
            metrics["latency_p95_seconds"] = quantile(latencies, 0.95)
        return metrics


def quantile(ascending: Sequence[float], share: float) -> float:
    """The nearest-rank quantile: the smallest value that at least ``share`` of all do not exceed."""
    rank = -int(-share * len(ascending) // 1)
    return ascending[max(rank, 1) - 1]
