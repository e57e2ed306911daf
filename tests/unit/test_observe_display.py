"""What people see: one trajectory as a conversation, and progress on terminals and in files.

Not covered: colors, and the exact drawing of rich's bars.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from mua.observe import progress as progress_module
from mua.observe.progress import Progress
from mua.observe.transcript import render_trajectory
from mua.types import Outcome, Provenance, Segment, Trajectory

PIECES = [
    (Provenance.SYSTEM, 0, "You help."),
    (Provenance.TEMPLATE, 0, "<|im_end|>\n"),
    (Provenance.USER, 0, "Where is [bold]my order[/bold]?"),
    (Provenance.TEMPLATE, 0, "<|im_start|>assistant\n"),
    (Provenance.SAMPLED, 0, "<tool_call>\x1b[31m</tool_call>\n"),
    (Provenance.TOOL, 0, "order 7 was shipped"),
    (Provenance.SAMPLED, 1, "It was shipped."),
]


def trajectory(**changes: object) -> Trajectory:
    """Each piece is one token whose id is its position in PIECES."""
    count = len(PIECES)
    segment = Segment(
        ids=np.arange(count, dtype=np.int32),
        provenance=np.asarray([piece[0] for piece in PIECES], dtype=np.uint8),
        logprobs=np.zeros(count, dtype=np.float32),
        version=np.zeros(count, dtype=np.int32),
        turn=np.asarray([piece[1] for piece in PIECES], dtype=np.int32),
    )
    fields = {"task_id": "refund-17", "ordinal": 3, "sample": 1, "segments": [segment], "turn_rewards": [0.0, 1.0]}
    fields |= {"reward": 1.0, "success": True, "outcome": Outcome.USER_STOP}
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]


def plain(shown: Trajectory) -> str:
    """The rendering without any color, as in a log file."""
    stream = io.StringIO()
    Console(file=stream, width=120, no_color=True).print(
        render_trajectory(shown, lambda ids: "".join(PIECES[i][2] for i in ids))
    )
    return stream.getvalue()


def test_the_mask_is_legible_without_color() -> None:
    text = plain(trajectory())
    body = text.split("⟦ ⟧, green")[0]
    assert body.count("⟦") == body.count("⟧") == 2
    assert "⟦It was shipped.⟧" in body
    assert "⟦" not in next(line for line in body.splitlines() if "order 7 was shipped" in line)


def test_text_of_others_is_neither_markup_nor_terminal_codes() -> None:
    text = plain(trajectory())
    assert "[bold]my order[/bold]" in text
    assert "\x1b" not in text
    assert "␛[31m" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_stages(stream: io.StringIO, enabled: bool = True) -> str:
    with Progress(enabled, stream) as progress, progress.stage("train", total=2) as outer:
        for _ in range(2):
            with progress.stage("rollout", total=3) as inner:
                for _ in range(3):
                    inner.advance(note="fine")
            outer.advance()
    return stream.getvalue()


def test_a_file_gets_one_line_a_stage_and_no_codes() -> None:
    lines = run_stages(io.StringIO()).splitlines()
    assert [line.split(",")[0] for line in lines] == ["  rollout 3/3", "  rollout 3/3", "train 2/2"]
    assert lines[0].endswith(": fine")


def test_a_long_stage_says_something_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress(stream=stream) as progress, progress.stage("train", total=100) as stage:
        for _ in range(100):
            now[0] += 1
            stage.advance()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train 30/100, 30 s, about 70 s left"
    assert len(lines) == 4


def test_a_terminal_gets_bars_unless_silenced() -> None:
    assert "\x1b[" in run_stages(Terminal())
    assert run_stages(Terminal(), enabled=False) == run_stages(io.StringIO(), enabled=False) == ""
