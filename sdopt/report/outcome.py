"""A study's result as a library call or a notebook receives it: the record, with methods that show it."""

from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError
from sdopt.record.files import read_result
from sdopt.record.records import StudyResult
from sdopt.report.answer import answer_blocks
from sdopt.report.markdown import written
from sdopt.report.summary import Summary, summary_of
from sdopt.report.tables import to_dataframe
from sdopt.statistics.rows import Row
from sdopt.statistics.words import unit_text

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image


@dataclass
class Outcome(StudyResult):
    """A `StudyResult` with methods that show it; it shares the variants and comparisons of the original."""

    def __post_init__(self) -> None:
        self.folder: Path | None = None
        """The run's folder, where its images are; None if that is not known."""

    @classmethod
    def of(cls, result: StudyResult, folder: Path | None = None) -> "Outcome":
        """Returns the same result with the methods of this class."""
        outcome = cls(
            **{field.name: getattr(result, field.name) for field in fields(StudyResult)}
        )
        outcome.folder = folder
        return outcome

    def table(self) -> "pd.DataFrame":
        """Returns a row for the baseline and one for each option with all its figures: see `to_dataframe`.

        The repeated baseline is none of them: `speedup_within_floor` says what it shows.
        """
        frame = to_dataframe(summary_of(self))
        return frame[frame["role"] != "control"].reset_index(drop=True)

    def paper_table(self) -> "pd.DataFrame":
        """Returns five columns for a paper, the best first: `paper_table().to_latex(index=False)`.

        They are the variant, its speed-up with its interval as in "1.06 [1.03, 1.08]", the seconds of a call, the peak
        memory in GiB, and what is known of its images; "" stands for what was not measured. Where calls make different
        numbers of images, times and speed-ups are per image, and the headings say so.
        """
        import pandas as pd

        return pd.DataFrame([_paper_row(row) for row in summary_of(self).rows])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {summary_of(self).sentence}>"

    def answer(self) -> Summary:
        """Returns the answer: its `sentence`, and `rows` with verdict, reason, command and code of each variant."""
        return summary_of(self)

    def plot(self) -> "Image":
        """Draws the speed-ups with their intervals, as `plot.png` in the run's folder has them.

        Raises:
            UsageError: nothing was compared.
        """
        from sdopt.report.charts.comparisons import study_plot

        return _opened(
            study_plot(summary_of(self)),
            "nothing was compared, so that there is no plot",
        )

    def images(self, prompts: int = 6) -> "Image":
        """Draws the images side by side, a column per variant, with what differs amplified below.

        Args:
            prompts: how many prompts are shown.

        Raises:
            UsageError: the study has no images, or its folder is not known.
        """
        from sdopt.report.contact_sheet import comparison_sheet

        sheet = (
            comparison_sheet(summary_of(self), self.folder, prompts)
            if self.folder
            else None
        )
        return _opened(
            sheet, "there are no images; sdopt.load_result(FOLDER) finds those of a run"
        )

    def _repr_markdown_(self) -> str:
        """Returns what a notebook shows: the answer and the ranking; `table()` has all figures."""
        return written(answer_blocks(summary_of(self)))


def _paper_row(row: Row) -> dict[str, str]:
    speedup = ""
    if row.speedup is not None:
        interval = row.speedup.interval
        bounds = (
            ""
            if interval.low is None or interval.high is None
            else f" [{interval.low:.2f}, {interval.high:.2f}]"
        )
        speedup = f"{interval.estimate:.2f}{bounds}"
    time, memory, unit = row.time, row.peak_gib, unit_text(row.per_image)
    return {
        "variant": row.name,
        f"speed-up{unit}": speedup,
        f"time{unit} (s)": f"{time.estimate:.3g}" if time else "",
        "memory (GiB)": f"{memory:.3g}" if memory else "",
        "images": str(row.images or ""),
    }


def _opened(content: bytes | None, absent: str) -> "Image":
    from PIL import Image

    if content is None:
        raise UsageError(absent)
    return Image.open(BytesIO(content))


def load_result(path: str | Path) -> Outcome:
    """Reads a `result.json`, or the one in a run's folder. Raises UsageError if there is none, or it is damaged."""
    file = Path(path)
    return Outcome.of(read_result(file), file if file.is_dir() else file.parent)
