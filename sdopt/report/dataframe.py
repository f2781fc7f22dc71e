"""A study as a pandas data frame, from the same rows as every table."""

from typing import TYPE_CHECKING

from sdopt.statistics.figures import Figures
from sdopt.statistics.scale import decision_of
from sdopt.statistics.summary import Summary

if TYPE_CHECKING:
    import pandas as pd


_FIRST = ("speedup", "latency/p50_s", "memory_ratio")
"""Figures that stand beside the name of a variant."""


def to_dataframe(summary: Summary) -> "pd.DataFrame":
    """Returns a row for the baseline and one for each comparison, best first.

    The first columns are the answer, since a notebook shows no more: `variant`, `speedup`, `latency/p50_s`,
    `memory_ratio`, and the verdicts `speed`, `images` and `gate`. Then come `role`, `status`, `reason`, `contract`,
    `against`, and the option of each axis; "" stands for none. The others are figures by their flat names, with
    two-sided bounds (`speedup_low`, `quality/…`), as floats: NaN for what was not measured. Ratios are over the
    study's baseline; those of a comparison with another variant begin with `step/`. Of several shapes, each has columns
    of its own too, as `speedup/512x512b1`.
    """
    import pandas as pd

    result, order = summary.result, [row.name for row in summary.rows]
    last = len(order)
    rows = sorted(
        summary.figures,
        key=lambda one: last if one.variant.is_control else order.index(one.variant.name),
    )
    facts = [
        {
            "variant": row.variant.name,
            **_verdicts(summary, row),
            "role": "baseline" if row.variant.name == result.baseline else row.variant.role,
            "status": str(row.variant.status),
            "reason": row.variant.reason,
            "contract": row.variant.contract,
            "against": row.reference,
            **row.variant.choices,
        }
        for row in rows
    ]
    figures = [row.flat for row in rows]
    names = list(dict.fromkeys(name for flat in figures for name in flat))
    frame = pd.DataFrame(facts)
    whole = frame.fillna("").join(pd.DataFrame(figures, columns=names, index=frame.index, dtype=float))
    first = ["variant", *(name for name in _FIRST if name in names)]
    return whole[[*first, *(name for name in whole.columns if name not in first)]]


def _verdicts(summary: Summary, figures: Figures) -> dict[str, str]:
    """Returns the verdicts on a variant, or on its step on top of another one; "" for none."""
    row, step = summary.row(figures.variant.name), summary.step(figures)
    found = step or row
    return {
        "speed": str((found.speed if found else None) or ""),
        "images": str((row.images if row else None) or ""),
        "gate": str(decision_of(figures.judgement.verdict)) if figures.judgement else "",
    }
