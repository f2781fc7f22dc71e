"""A study as a pandas data frame, from the same rows as every table."""

from typing import TYPE_CHECKING

from sdopt.analysis.figures import figures_of
from sdopt.results.records import StudyResult

if TYPE_CHECKING:
    import pandas as pd


def to_dataframe(result: StudyResult) -> "pd.DataFrame":
    """Returns a row for the baseline and one for each comparison.

    The first columns say what the row is: `variant`, `role`, `status`, `reason`, `contract`, `against`, `verdict` and
    the option of each axis. The others are all figures by their flat names, as MLflow has them, with two-sided bounds
    (`speedup`, `speedup_low`, `latency/p50_s`, `quality/…`); None stands for what was not measured. Of several shapes,
    each has columns of its own too, as `speedup/512x512b1`.
    """
    import pandas as pd

    rows = figures_of(result)
    facts = [
        {
            "variant": row.variant.name,
            "role": "baseline" if row.variant.name == result.baseline else row.variant.role,
            "status": str(row.variant.status),
            "reason": row.variant.reason or None,
            "contract": row.variant.contract,
            "against": row.reference or None,
            "verdict": None if row.verdict is None else str(row.verdict),
            **row.variant.choices,
        }
        for row in rows
    ]
    figures = [row.flat for row in rows]
    names = list(dict.fromkeys(name for flat in figures for name in flat))
    frame = pd.DataFrame(facts)
    frame = frame.join(pd.DataFrame(figures, columns=names, index=frame.index, dtype=float))
    lacking = [name for name in frame.columns if frame[name].isna().any()]
    return frame.astype(dict.fromkeys(lacking, object)).where(frame.notna(), None)
