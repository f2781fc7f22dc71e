"""What every record in `outputs/records` says: its answer, each verdict and each figure.

A change of the code that should change none of these leaves `snapshot.json` as it is. To write it anew:
`python -m tests.record.test_snapshot`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from sdopt.gate.calibration import calibration_for
from sdopt.gate.judge import judge
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.report.summary import summary_of

RECORDS = Path(__file__).parents[2] / "outputs" / "records"

SNAPSHOT = Path(__file__).with_name("snapshot.json")

_FOUND = sorted(
    path.parent.relative_to(RECORDS).as_posix()
    for path in RECORDS.glob("*/*/result.json")
)


def summary(result: StudyResult) -> dict[str, Any]:
    """Returns the answer, the figures and, judged anew by the study's own gate, the verdicts of a result."""
    if result.config.gate.judges:
        judge(
            result,
            result.config.gate,
            calibration_for(result, result.config.gate.calibration),
        )
    found = summary_of(result)
    options = {
        row.name: [
            *(
                str(row.speed or row.status),
                str(row.images or ""),
                str(row.decision or ""),
                row.because,
            ),
            *(step.step_text for step in row.steps),
        ]
        for row in found.rows
    }
    figures = {
        f"{row.variant.name} against {row.reference}": {
            name: float(f"{value:.5g}") for name, value in row.flat.items()
        }
        for row in found.figures
    }
    rulings = {
        f"{judged.candidate} against {judged.reference}": [
            str(judged.verdict),
            *(
                f"{ruling.rule} {ruling.metric}: {ruling.verdict}".replace(" :", ":")
                for ruling in judged.rulings
            ),
        ]
        for judged in result.judgements
    }
    return {
        "answer": found.sentence,
        "options": options,
        "verdicts": rulings,
        "figures": figures,
    }


@pytest.mark.parametrize("name", _FOUND)
def test_says_what_it_said(name: str) -> None:
    expected = json.loads(SNAPSHOT.read_text())[name]
    found = summary(read_result(RECORDS / name))
    assert found == _close_to(expected)


def test_has_every_record() -> None:
    assert list(json.loads(SNAPSHOT.read_text())) == _FOUND


def _close_to(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Returns a snapshot whose figures equal those that differ in their last digit: libraries of numbers do."""
    figures = {
        row: pytest.approx(values, rel=1e-4)
        for row, values in snapshot["figures"].items()
    }
    return {**snapshot, "figures": figures}


def _lines(snapshot: dict[str, Any]) -> str:
    """Returns JSON with one line for each row, so that a change shows as the rows that it changes."""
    studies = []
    for name, study in snapshot.items():
        parts = [f'  "answer": {_json(study["answer"])}']
        for part in ("options", "verdicts", "figures"):
            rows = ",\n".join(
                f"   {_json(row)}: {_json(value)}" for row, value in study[part].items()
            )
            parts.append(
                f'  "{part}": {{\n{rows}\n  }}' if rows else f'  "{part}": {{}}'
            )
        studies.append(f" {_json(name)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(studies) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    SNAPSHOT.write_text(
        _lines({name: summary(read_result(RECORDS / name)) for name in _FOUND})
    )
