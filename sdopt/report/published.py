"""Shows the figures of an article beside those measured: as a table, as Markdown and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from sdopt.analysis.measures import SPEEDUP
from sdopt.analysis.published import (
    MEMORY,
    Claim,
    claims_of,
    notes_of_published,
    published_of,
)
from sdopt.analysis.summary import Summary
from sdopt.analysis.words import seconds_text
from sdopt.report.blocks import Cell, Notes, Table
from sdopt.report.markdown import written
from sdopt.report.tones import TONES
from sdopt.results.comparisons import Interval

_WORDS = {SPEEDUP.name: "speed-up", "memory_ratio": "memory", MEMORY: "memory limit"}

HEADINGS = (
    "variant",
    "against",
    "figure",
    "shape",
    "GPU",
    "published",
    "here",
    "here ÷ published",
    "verdict",
    "because",
)


def published_markdown(summary: Summary) -> str:
    """Returns every claim, for all cards, with its reason and the notes; "" without an article."""
    result = summary.result
    claims = claims_of(result)
    if not claims:
        return ""
    table = written([claims_table(claims), Notes(notes_of_published(result, claims))])
    return f"## {result.name}: published and measured\n\n{table}"


def _row(claim: Claim) -> list[Cell | str]:
    """Returns the cells of one claim, by `HEADINGS`: a figure with its interval and the amounts behind it."""
    printed = f"{claim.printed}, {claim.place}" if claim.printed else ""
    measured, interval = claim.measured_parts
    return [
        claim.variant,
        claim.reference,
        _WORDS[claim.measure],
        claim.shape,
        claim.gpu,
        Cell(claim.published_text, printed),
        Cell(measured, ", ".join(filter(None, (interval, _amounts_text(claim))))),
        Cell(*claim.ratio_parts),
        Cell(str(claim.verdict), tone=TONES[claim.verdict]),
        claim.reason,
    ]


def _amounts_text(claim: Claim) -> str:
    """Returns the two amounts of a measured ratio, as in `458 ms → 210 ms`, like `printed` for the published ratio."""
    if claim.measure == SPEEDUP.name:
        return " → ".join(seconds_text(Interval(amount)) for amount in claim.amounts)
    return " → ".join(f"{amount:.2f} GB" for amount in claim.amounts)


def claims_table(claims: Sequence[Claim]) -> Table:
    """Returns a table of claims, without empty columns."""
    return Table(HEADINGS, list(map(_row, claims))).filled()


def published_json(summary: Summary) -> bytes | None:
    """Returns every claim with its published and its measured figures, as JSON; None without an article."""
    result = summary.result
    published, claims = published_of(result), claims_of(result)
    if published is None:
        return None
    content = {
        "study": result.name,
        "id": result.id,
        "article": published.article,
        "setup": asdict(published.setup),
        "device": result.environment.device["name"],
        "notes": notes_of_published(result, claims),
        "claims": [asdict(claim) for claim in claims],
    }
    return (json.dumps(content, indent=1) + "\n").encode()
