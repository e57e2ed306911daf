"""Seconds of each test file, out of a report of pytest (``--junitxml``): the slowest files, and what all took together.

    python -m pytest -o junit_duration_report=total --junitxml=report.xml ...
    python -m tools.test_times report.xml [--files 10]

Seconds are wall time of set-up, test and tear-down in the process that ran them: shared fixtures count for the
file that asked first, and on a busy machine waiting counts too.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from tools import kit


def seconds_by_file(report: Path) -> tuple[Counter[str], Counter[str]]:
    """Seconds, and number of tests, by file."""
    seconds, tests = Counter[str](), Counter[str]()
    for case in ET.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[file] += float(case.get("time", 0.0))  # type: ignore[assignment]
        tests[file] += 1
    return seconds, tests


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--files", type=int, default=10)
    arguments = parser.parse_args()
    seconds, tests = seconds_by_file(arguments.report)
    rows = [(f"`{file}`", tests[file], f"{spent:.0f}") for file, spent in seconds.most_common(arguments.files)]
    rows.append((f"all {len(tests)} files", tests.total(), f"{sum(seconds.values()):.0f}"))
    print(kit.table(("file", "tests", "seconds"), rows))


if __name__ == "__main__":
    main()
