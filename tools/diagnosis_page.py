"""Writes the generated part of docs/diagnosis.md, the causes, from mua/observe/diagnosis/causes.yaml.

python -m tools.diagnosis_page
"""

from __future__ import annotations

from pathlib import Path

from mua.observe.diagnosis.causes import CAUSES
from tools import kit

PAGE = kit.ROOT / "docs" / "diagnosis.md"


def main() -> None:
    kit.parser(__doc__).parse_args()
    PAGE.write_text(kit.with_part(PAGE, "causes", causes(), by=Path(__file__)), encoding="utf-8")


def causes() -> str:
    """A section for each cause."""
    parts = []
    for cause in CAUSES:
        alarm = "Training watches for it." if cause.from_metrics else "Only the store shows it."
        parts.append(
            f"### {cause.title[0].upper()}{cause.title[1:]}\n\n`{cause.name}`. {cause.meaning}\n\n"
            f"- **Shown by:** {cause.evidence} {alarm}\n- **Try:** {cause.remedy}."
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
