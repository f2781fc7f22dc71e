"""Shows the verdicts of a gate: as a table for the terminal, as Markdown, and as JSON."""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sdopt.analysis.answer import answer_of
from sdopt.analysis.measures import measure_named, with_shape
from sdopt.errors import print_problems
from sdopt.gate.looks import spent_of
from sdopt.report.junit import junit, rule_name
from sdopt.report.markdown import escaped, markdown
from sdopt.report.rows import rows_of, table_of
from sdopt.report.tones import RICH, TONES
from sdopt.results.files import write_atomically
from sdopt.results.records import StudyResult
from sdopt.results.verdicts import Judgement, Ruling, Verdict

_BOUNDS = (
    "A gate's bounds are one-sided, each at its rule's confidence: "
    "they are narrower than the two-sided intervals of the table."
)


def deciding(judgement: Judgement) -> list[Ruling]:
    """Returns the rulings that decided the verdict; for a pass, those with an estimate."""
    decisive = [ruling for ruling in judgement.rulings if ruling.verdict is judgement.verdict]
    return decisive if judgement.verdict is not Verdict.PASS else [r for r in decisive if r.estimate is not None]


def verdict_table(result: StudyResult, judgements: Sequence[Judgement]) -> Group:
    """Returns a table with a line for each comparison, and below it the rulings that decided."""
    table = Table(title=escape(f"gate: {result.gate}"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("variant", overflow="fold")
    table.add_column("contract", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("because", overflow="fold")
    for judgement in judgements:
        table.add_row(
            escape(judgement.candidate),
            escape(judgement.contract),
            Text(str(judgement.verdict), RICH[TONES[judgement.verdict]]),
            escape(_because(judgement)),
        )
    notes = _short_notes(result, judgements)
    return Group(table, *(Padding(Text(note, "dim"), (0, 0, 0, 2)) for note in notes))


VERDICT_HEADINGS = ("variant", "against", "contract", "verdict", "because")


def verdict_rows(judgements: Sequence[Judgement]) -> list[tuple[str, ...]]:
    """Returns a row of cells for each comparison, by `VERDICT_HEADINGS`."""
    return [(j.candidate, j.reference, j.contract, str(j.verdict), _because(j)) for j in judgements]


def verdict_notes(result: StudyResult, judgements: Sequence[Judgement]) -> list[str]:
    """Returns the notes on the verdicts, with the floors of every metric that was judged."""
    return [*_short_notes(result, judgements), *floors_of(result)]


def _short_notes(result: StudyResult, judgements: Sequence[Judgement]) -> list[str]:
    return [_BOUNDS, *claims_of(judgements), *spent_of(result)]


def verdict_markdown(result: StudyResult, judgements: Sequence[Judgement]) -> str:
    """Returns the verdicts as Markdown, with every ruling below them."""
    summary = markdown(VERDICT_HEADINGS, verdict_rows(judgements), verdict_notes(result, judgements))
    rulings = [
        (j.candidate, rule_name(r), str(r.verdict), _figure(r.estimate), _interval(r), _figure(r.margin), r.text)
        for j in judgements
        for r in j.rulings
    ]
    heads = ("variant", "rule", "verdict", "estimate", "one-sided bounds", "limit", "reason")
    return (
        f"## sdopt gate: {escaped(result.name)} ({escaped(result.gate)})\n\n{summary}\n{markdown(heads, rulings, [])}"
    )


def summary_markdown(result: StudyResult, judgements: Sequence[Judgement]) -> str:
    """Returns the summary of a step in CI: the answer, the table of speed-ups, and then the verdicts."""
    speedups = markdown(*table_of(rows_of(result)), [])
    return f"**{escaped(answer_of(result).sentence)}**\n\n{speedups}\n{verdict_markdown(result, judgements)}"


def claims_of(judgements: Sequence[Judgement]) -> list[str]:
    """Returns which of the study's claims of a gain hold together; those alone let a candidate pass `must pay`."""
    claims = [(j, metric) for j in judgements for metric in j.claims]
    kept = [f"{j.candidate} ({_claim(metric)})" for j, metric in claims if metric in j.gains]
    if not claims:
        return []
    counts = f"{len(kept)} of {len(claims)} claims of a gain hold together (Holm)"
    return [f"{counts}: {', '.join(kept)}." if kept else f"{counts}."]


def _claim(name: str) -> str:
    """Returns the claim, with its shape if there are several."""
    return with_shape(measure_named(name).claim, name.partition("/")[2])


def floors_of(result: StudyResult) -> list[str]:
    """Returns the chance differences of two baselines, to show beside the margins."""
    lines = []
    names = {ruling.metric for judgement in result.judgements for ruling in judgement.rulings}
    words = {"numerical": "in another order of computation", "sampling": "from other noise"}
    for kind, spreads in sorted(result.floors.items()):
        shown = [
            f"{name} {spread.mean:.2g} ± {spread.deviation:.2g}"
            for name, spread in sorted(spreads.items())
            if name in names
        ]
        if shown:
            meaning = f"two baselines {words.get(kind, kind)}, mean difference ± deviation by prompt"
            lines.append(f"{kind} floor ({meaning}): {', '.join(shown)}.")
    return lines


def _because(judgement: Judgement) -> str:
    """Returns the reasons of the verdict; rules with the same reason are merged."""
    by_reason: dict[str, list[str]] = {}
    for ruling in deciding(judgement):
        by_reason.setdefault(ruling.because, []).append(rule_name(ruling))
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "; ".join([*reasons, *([judgement.note] if judgement.note else [])])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _interval(ruling: Ruling) -> str:
    return "" if ruling.low is None or ruling.high is None else f"[{ruling.low:.4g}, {ruling.high:.4g}]"


def verdict_json(result: StudyResult, judgements: Sequence[Judgement]) -> bytes:
    """Returns every judgement with its rulings, as JSON."""
    content = {
        "study": result.name,
        "id": result.id,
        "gate": result.gate,
        "judgements": [asdict(j) for j in judgements],
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def write_verdicts(result: StudyResult, judgements: Sequence[Judgement], folder: Path) -> None:
    """Writes `verdicts.json`, `verdicts.md` and `verdicts.xml` (JUnit) into a folder. Raises OSError."""
    write_atomically(folder / "verdicts.json", verdict_json(result, judgements))
    write_atomically(folder / "verdicts.md", verdict_markdown(result, judgements).encode())
    write_atomically(folder / "verdicts.xml", junit(result, judgements))
    append_step_summary(result, judgements)


def append_step_summary(result: StudyResult, judgements: Sequence[Judgement]) -> None:
    """Appends the Markdown to the file that `GITHUB_STEP_SUMMARY` names, where that is set, as far as GitHub takes it.

    The summary is for reading, and the exit code is the verdict: a file that cannot be written is only said.
    """
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if not target:
        return
    try:
        # Opening a pipe that nobody reads would block.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        with os.fdopen(os.open(target, flags, 0o644), "ab") as stream:
            room = _SUMMARY_BYTES - os.fstat(stream.fileno()).st_size
            if room < _LEAST_BYTES:
                raise OSError(errno.EFBIG, "it is full: GitHub takes 1 MiB")
            stream.write(_shortened(summary_markdown(result, judgements) + "\n", room))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        print_problems([f"GITHUB_STEP_SUMMARY={target}: the summary cannot be written ({reason}); verdicts are kept"])


_SUMMARY_BYTES = 1000 * 1024
"""GitHub drops the whole summary of a step above 1 MiB, so that this leaves room for what a step adds itself."""

_LEAST_BYTES = 4096
"""Less room shows nothing of a table."""

_CUT = b"\nShortened, because GitHub takes 1 MiB from a step: `verdicts.md` in the run's folder has all of it.\n"


def _shortened(text: str, room: int) -> bytes:
    """Returns as many whole lines of a text as there is room for, and a line that says so if some are left out."""
    content = text.encode(errors="replace")
    if len(content) <= room:
        return content
    return content[: content.rfind(b"\n", 0, room - len(_CUT)) + 1] + _CUT
