"""A study's result as a library call or a notebook receives it: the record, with methods that show it."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.analysis.summary import Summary, summary_of
from sdopt.report.catalog import markdown_table
from sdopt.report.dataframe import to_dataframe
from sdopt.results.files import read_result
from sdopt.results.records import StudyResult

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Outcome(StudyResult):
    """A `StudyResult` with methods that show it; it shares the variants and comparisons of the original."""

    @classmethod
    def of(cls, result: StudyResult) -> "Outcome":
        """Returns the same result with the methods of this class."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(StudyResult)})

    def table(self) -> "pd.DataFrame":
        """Returns a row for the baseline and one for each option with all its figures: see `to_dataframe`.

        The repeated baseline is none of them: `speedup_within_floor` says what it shows.
        """
        frame = to_dataframe(summary_of(self))
        return frame[frame["role"] != "control"].reset_index(drop=True)

    def answer(self) -> Summary:
        """Returns the verdict on each option, with its reason, its command and the code that turns it on."""
        return summary_of(self)

    def _repr_markdown_(self) -> str:
        """Returns the table that a notebook shows."""
        return markdown_table(summary_of(self))


def load_result(path: str | Path) -> Outcome:
    """Reads a `result.json`, or the one in a run's folder.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    return Outcome.of(read_result(Path(path)))
