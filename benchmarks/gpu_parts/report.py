"""What was measured, as rows that know their bars: a table for people, JSON for machines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    case: str
    measured: str
    floor: str = ""
    share: str = ""
    """Of the floor, or against what the bar compares with."""
    bar: str = ""
    passed: bool | None = None
    """None where the case has no bar, or what it is compared with was not measured."""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    card: str
    rows: list[Row] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """Per case that broke, its traceback."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def markdown(self) -> str:
        lines = [
            f"{self.card}, {self.seconds:.0f} s in all",
            "",
            "| case | measured | floor | share | bar | pass |",
            "|---|---|---|---|---|---|",
            *(
                f"| {row.case} | {row.measured} | {row.floor} | {row.share} | {row.bar} | {_verdict(row)} |"
                for row in self.rows
            ),
        ]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        lines += ["", *(f"- {case} broke: {_last(text)}" for case, text in self.errors.items())] if self.errors else []
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        (folder / "gpu.md").write_text(self.markdown())


def _verdict(row: Row) -> str:
    if row.passed is None:
        return "-" if row.bar == "" else "?"
    return "yes" if row.passed else "NO"


def _last(text: str) -> str:
    return text.strip().splitlines()[-1][:200]
