"""Shows the figures of an article beside those measured."""

from collections.abc import Sequence

from sdopt.report.blocks import Cell, Notes, Table
from sdopt.report.markdown import written
from sdopt.report.tones import TONES
from sdopt.statistics.measures import SPEEDUP
from sdopt.statistics.published import MEMORY, Claim, claims_of, notes_of_published
from sdopt.statistics.summary import Summary

_WORDS = {SPEEDUP.name: "speed-up", "memory_ratio": "memory", MEMORY: "memory limit"}

HEADINGS = ("variant", "against", "figure", "shape", "GPU", "published", "here", "verdict", "because")


def published_markdown(summary: Summary) -> str:
    """Returns every claim, for all cards, with its reason and the notes; "" without an article."""
    result = summary.result
    claims = claims_of(result)
    if not claims:
        return ""
    table = written([claims_table(claims), Notes(notes_of_published(result, claims))])
    return f"## {result.name}: published and measured\n\n{table}"


def claims_table(claims: Sequence[Claim]) -> Table:
    """Returns a table of claims, without empty columns."""
    return Table(HEADINGS, list(map(_row, claims))).filled()


def _row(claim: Claim) -> list[Cell | str]:
    printed = claim.figure.printed
    return [
        claim.variant,
        claim.reference,
        _WORDS[claim.measure],
        claim.shape,
        claim.gpu,
        Cell(claim.published_text, f"{printed}, {claim.place}" if printed else ""),
        Cell(*claim.measured_parts),
        Cell(str(claim.verdict), tone=TONES[claim.verdict]),
        claim.reason,
    ]
