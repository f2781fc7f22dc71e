"""Shows the figures of an article beside those measured: for a terminal, as Markdown and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sdopt.analysis.measures import SPEEDUP
from sdopt.analysis.published import (
    MEMORY,
    Claim,
    Reproduction,
    claims_of,
    notes_of_published,
    published_of,
    shown_claims,
)
from sdopt.report.markdown import markdown
from sdopt.report.tones import RICH, TONES
from sdopt.report.words import seconds_text
from sdopt.results.comparisons import Interval
from sdopt.results.records import StudyResult

_WORDS = {SPEEDUP.name: "speed-up", "memory_ratio": "memory", MEMORY: "memory limit"}

HEADINGS = (
    "variant",
    "against",
    "figure",
    "shape",
    "GPU",
    "published",
    "as printed",
    "here",
    "as measured",
    "here ÷ published",
    "verdict",
    "because",
)


def published_tables(result: StudyResult, wide: bool) -> list[Table | Text]:
    """Returns the claims for this machine's card, or for the article's main one, and notes; [] without an article.

    In a narrow terminal, intervals stand below their figures.
    """
    claims = claims_of(result)
    shown = shown_claims(result, claims)
    if not shown:
        return []
    cards = ", ".join(dict.fromkeys(claim.gpu for claim in shown if claim.gpu)) or "no card"
    references = {claim.reference for claim in shown if claim.reference}
    against = f", against {references.pop()}" if len(references) == 1 else ""
    title = f"published on {cards} and measured here{against}"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("variant and figure", min_width=16, overflow="fold")
    table.add_column("published", justify="right", min_width=13)
    for heading in ("here", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    before = ""
    for claim in shown:
        subject = claim.variant + (f"\nagainst {claim.reference}" if claim.reference and not against else "")
        figure = ", ".join(filter(None, [_WORDS[claim.measure], claim.shape]))
        table.add_row(
            escape("\n".join([*([subject] if subject != before else []), f"  {figure}"])),
            "\n".join(filter(None, [claim.published_text, *claim.printed.split("; ")])),
            *(escape(text if wide else text.replace(" [", "\n[")) for text in (claim.measured_text, claim.ratio_text)),
            Text(str(claim.verdict), RICH[TONES[claim.verdict]]),
        )
        before = subject
    others = sorted({claim.gpu for claim in claims} - {claim.gpu for claim in shown})
    notes = [*_reasons(shown), *notes_of_published(result, shown)]
    notes += [f"published.md has the figures for {', '.join(others)} too."] if others else []
    return [table, *(Text(f"  {note}", "dim") for note in notes)]


def published_markdown(result: StudyResult) -> str:
    """Returns every claim, for all cards, with its reason and the notes; "" without an article."""
    claims = claims_of(result)
    if not claims:
        return ""
    table = markdown(HEADINGS, list(map(claim_cells, claims)), notes_of_published(result, claims))
    return f"## {result.name}: published and measured\n\n{table}"


def claim_cells(claim: Claim) -> tuple[str, ...]:
    """Returns the cells of one claim, by `HEADINGS`."""
    return (
        claim.variant,
        claim.reference,
        _WORDS[claim.measure],
        claim.shape,
        claim.gpu,
        claim.published_text,
        f"{claim.printed} ({claim.place})" if claim.printed else "",
        claim.measured_text,
        _amounts_text(claim),
        claim.ratio_text,
        str(claim.verdict),
        claim.reason,
    )


def _amounts_text(claim: Claim) -> str:
    """Returns the two amounts of a measured ratio, as in `458 ms → 210 ms`, like `printed` for the published ratio."""
    if claim.measure == SPEEDUP.name:
        return " → ".join(seconds_text(Interval(amount)) for amount in claim.amounts)
    return " → ".join(f"{amount:.2f} GB" for amount in claim.amounts)


def claims_table(claims: Sequence[Claim]) -> tuple[list[str], list[list[str]]]:
    """Returns headings and cells for a page: a figure with its amounts in one cell, and no empty columns."""
    rows = []
    for claim in claims:
        cells = dict(zip(HEADINGS, claim_cells(claim), strict=True))
        del cells["as printed"], cells["as measured"]
        printed = f"{claim.printed}, {claim.place}" if claim.printed else ""
        for figure, of in (("published", printed), ("here", _amounts_text(claim))):
            cells[figure] += f" ({of})" if of else ""
        rows.append({heading: cell.strip() for heading, cell in cells.items()})
    shown = [heading for heading in rows[0] if any(row[heading] for row in rows)] if rows else []
    return shown, [[row[heading] for heading in shown] for row in rows]


def published_json(result: StudyResult) -> bytes | None:
    """Returns every claim with its published and its measured figures, as JSON; None without an article."""
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


def _reasons(claims: Sequence[Claim]) -> list[str]:
    """Returns the reasons of the verdicts, each once with its variants; for variants not run, see the table."""
    found: dict[str, list[str]] = {}
    for claim in claims:
        if claim.reason and claim.verdict is not Reproduction.NOT_RUN:
            found.setdefault(f"{claim.verdict}: {claim.reason}", []).append(claim.variant)
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in found.items()]
