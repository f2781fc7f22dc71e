"""What a gate said, as a table for the terminal, as Markdown, as JUnit XML and as JSON."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sdopt.quality.settings import PERFORMANCE
from sdopt.report.table import markdown
from sdopt.results import Judgement, Ruling, StudyResult, Verdict, write_atomically
from sdopt.statistics import holm

STYLES = {Verdict.PASS: "green", Verdict.INCONCLUSIVE: "yellow", Verdict.NOT_COMPARABLE: "yellow", Verdict.FAIL: "red"}


def deciding(judgement: Judgement) -> list[Ruling]:
    """The rulings that made the verdict; of a pass, those with an estimate."""
    decisive = [ruling for ruling in judgement.rulings if ruling.verdict is judgement.verdict]
    return decisive if judgement.verdict is not Verdict.PASS else [r for r in decisive if r.estimate is not None]


def verdict_table(result: StudyResult, judgements: Sequence[Judgement]) -> Group:
    """One line for each comparison, and below it what decided."""
    table = Table(title=escape(f"gate: {result.gate}"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("variant", overflow="fold")
    table.add_column("contract", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("because", overflow="fold")
    for judgement in judgements:
        table.add_row(
            escape(judgement.candidate),
            judgement.contract,
            Text(str(judgement.verdict), STYLES[judgement.verdict]),
            escape(_because(judgement)),
        )
    notes = [*claims_of(result, judgements), *floors_of(result)]
    return Group(table, *(Text(f"  {note}", "dim") for note in notes))


def verdict_markdown(result: StudyResult, judgements: Sequence[Judgement]) -> str:
    """The same as Markdown, and every ruling below it."""
    rows = [(j.candidate, j.reference, j.contract, str(j.verdict), _because(j)) for j in judgements]
    notes = [*claims_of(result, judgements), *floors_of(result)]
    summary = markdown(("variant", "against", "contract", "verdict", "because"), rows, notes)
    rulings = [
        (j.candidate, _name(r), str(r.verdict), _figure(r.estimate), _interval(r), _figure(r.margin), r.reason)
        for j in judgements
        for r in j.rulings
    ]
    heads = ("variant", "rule", "verdict", "estimate", "one-sided bounds", "limit", "reason")
    return f"## sdopt gate: {result.name} ({result.gate})\n\n{summary}\n{markdown(heads, rulings, [])}"


def claims_of(result: StudyResult, judgements: Sequence[Judgement]) -> list[str]:
    """Which of the study's claims of benefit hold together: each may hold alone by chance if there are many.

    Only reported; the verdicts are of each variant by itself.
    """
    claims = [(f"{j.candidate} ({PERFORMANCE[metric]})", p) for j in judgements for metric, p in j.claims.items()]
    if not claims:
        return []
    held = holm([p for _, p in claims], 1 - result.confidence)
    kept = [name for (name, _), holds in zip(claims, held, strict=True) if holds]
    said = f"{len(kept)} of {len(claims)} claims of a gain hold together at {result.confidence:.0%} confidence (Holm)"
    return [f"{said}: {', '.join(kept)}." if kept else f"{said}."]


def floors_of(result: StudyResult) -> list[str]:
    """How far two baselines differ by chance, beside the margins."""
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
            said = f"two baselines {words.get(kind, kind)}, mean difference ± deviation by prompt"
            lines.append(f"{kind} floor ({said}): {', '.join(shown)}.")
    return lines


def _because(judgement: Judgement) -> str:
    """What decided, with rules that say the same in one."""
    by_reason: dict[str, list[str]] = {}
    for ruling in deciding(judgement):
        by_reason.setdefault(ruling.reason, []).append(_name(ruling))
    said = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "; ".join([*said, *([judgement.note] if judgement.note else [])])


def _name(ruling: Ruling) -> str:
    return f"{ruling.metric} {ruling.rule}".strip()


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _interval(ruling: Ruling) -> str:
    return "" if ruling.low is None or ruling.high is None else f"[{ruling.low:.4g}, {ruling.high:.4g}]"


def write_verdicts(result: StudyResult, judgements: Sequence[Judgement], folder: Path) -> None:
    """Writes `verdicts.json`, `verdicts.md` and `verdicts.xml` (JUnit) into a folder.

    The Markdown is also appended to the file that `GITHUB_STEP_SUMMARY` names, where that is set. Raises OSError.
    """
    summary = verdict_markdown(result, judgements)
    content = {
        "study": result.name,
        "id": result.id,
        "gate": result.gate,
        "judgements": [asdict(j) for j in judgements],
    }
    write_atomically(folder / "verdicts.json", (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(folder / "verdicts.md", summary.encode())
    write_atomically(folder / "verdicts.xml", junit(result, judgements))
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with Path(target).open("a", encoding="utf-8") as stream:
            stream.write(summary + "\n")


def junit(result: StudyResult, judgements: Sequence[Judgement]) -> bytes:
    """JUnit XML: a suite for each comparison, a case for each rule.

    A rule that failed is a `failure`; one that could not be judged, or not yet, is an `error`, so that no reader takes
    it for a pass.
    """
    root = ElementTree.Element("testsuites", name=f"sdopt gate {result.gate}")
    for judgement in judgements:
        verdicts = [ruling.verdict for ruling in judgement.rulings]
        failures = verdicts.count(Verdict.FAIL)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=printable(f"{judgement.candidate} against {judgement.reference}"),
            tests=str(len(verdicts)),
            failures=str(failures),
            errors=str(len(verdicts) - failures - verdicts.count(Verdict.PASS)),
            timestamp=result.started[:19],
        )
        for ruling in judgement.rulings:
            case = ElementTree.SubElement(
                suite, "testcase", classname=printable(judgement.candidate), name=_name(ruling)
            )
            if ruling.verdict is not Verdict.PASS:
                kind = "failure" if ruling.verdict is Verdict.FAIL else "error"
                ElementTree.SubElement(case, kind, message=printable(ruling.reason), type=str(ruling.verdict))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(letter if letter >= " " or letter in "\t\n" else "�" for letter in text)
