"""The page of a run: hardware, versions, one line per check. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def page(records: Sequence[Mapping[str, Any]], checks: Iterable[Any]) -> str:
    """Markdown, ready for docs/benchmarks/gpu.md. ``records`` in order, the first with what the machine is."""
    proves = {check.name: check.proves for check in checks}
    machine = next((record["machine"] for record in records if record.get("machine")), None) or {}
    counts = ", ".join(
        f"{sum(record['state'] == state for record in records)} {state}" for state in ("ok", "failed", "skipped")
    )
    dates = " to ".join(dict.fromkeys([min(r["date"] for r in records), max(r["date"] for r in records)]))
    lines = [
        "# What ran on this machine", "",
        f"{dates}, {machine.get('device', 'device unknown')}, by `python tools/gpu_check.py`: {counts}.", "",
    ]  # fmt: skip
    if machine.get("device") == "cpu":
        lines += ["No CUDA device: toy sizes on a CPU. This proves the script and nothing of a GPU.", ""]
    lines += [f"* {key}: {_cell(value)}" for key, value in machine.items() if key != "device"]
    lines += ["", "| check | state | seconds | what was found | what it proves |", "| --- | --- | --- | --- | --- |"]
    for record in records:
        figures = [_figure(figure) for figure in record["figures"]]
        found = "; ".join([*figures, *filter(None, [_cell(record["message"])])])
        cells = (record["name"], record["state"], f"{record['seconds']:.1f}", found, proves.get(record["name"], ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _figure(figure: Mapping[str, Any]) -> str:
    value = figure["value"]
    shown = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else _cell(value)
    return f"{figure['name']} {shown}{' ' if figure['unit'] else ''}{figure['unit']}"


def _cell(value: Any) -> str:
    """Text that cannot break a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
