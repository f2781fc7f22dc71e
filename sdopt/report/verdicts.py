"""Shows the verdicts of a gate: as a table for the terminal, as Markdown, as JSON, and as JUnit XML for CI."""

import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from sdopt.errors import print_problems
from sdopt.gate.looks import spent_of
from sdopt.record.files import write_atomically
from sdopt.record.records import StudyResult
from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.report.blocks import Block, Fold, Notes, Prose, Table
from sdopt.report.columns import word
from sdopt.report.markdown import escaped, written
from sdopt.report.tables import ranking
from sdopt.statistics.measures import RULED, measure_named, with_shape
from sdopt.statistics.reasons import reasons_of
from sdopt.statistics.rows import Row
from sdopt.statistics.scale import Decision, decision_of
from sdopt.statistics.summary import Summary

_BOUNDS = (
    "A gate's bounds are one-sided, each at its rule's confidence: "
    "they are narrower than the two-sided intervals of the table."
)


_NO_CHARACTER = re.compile(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\x7f-\x9f]")
"""What XML 1.0 cannot hold (a surrogate could not even be encoded) or discourages: control characters."""


def verdict_blocks(result: StudyResult) -> list[Block]:
    """Returns a table with a row for each comparison that a gate has judged, and below it the reasons and notes."""
    rows = [(j.candidate, j.reference, j.contract, word(decision_of(j.verdict))) for j in result.judgements]
    because = [f"{j.candidate}: {_because(result, j)}" for j in result.judgements]
    table = Table(("variant", "against", "contract", "gate"), rows)
    return [table, Notes([*because, _BOUNDS, *_claims(result.judgements), *spent_of(result)])]


def against_sentence(result: StudyResult) -> str:
    """Returns what a comparison with an earlier result shows, in a sentence, and what it does not compare."""
    worse = [j for j in result.judgements if j.verdict is Verdict.FAIL]
    undecided = [j.candidate for j in result.judgements if decision_of(j.verdict) is Decision.UNDECIDED]
    open_text = f"{_counted(undecided)} undecided: {', '.join(undecided)}" if undecided else ""
    if worse:
        told = f"Worse than in the earlier result: {', '.join(j.candidate for j in worse)}"
        told = f"{told}: {'; '.join(reasons_of(worse[0], result))}{f'. {open_text}' if open_text else ''}."
    else:
        told = _nothing_worse(result.judgements, open_text)
    return f"{told} Each speed-up is over the baseline of its own run: times of the two runs are not compared."


def _nothing_worse(judgements: Sequence[Judgement], open_text: str) -> str:
    """Returns that nothing failed, by what rules compared: speed-ups, images, or both."""
    compared = {_is_ratio(ruling.metric) for j in judgements for ruling in j.rulings if ruling.metric}
    named = [name for ratio, name in ((True, "speed-up is smaller"), (False, "image is worse")) if ratio in compared]
    lacking = [name for ratio, name in ((True, "speed"), (False, "images")) if ratio not in compared]
    shown = "is shown to be " if open_text else "is "
    words = [name.replace("is ", shown, 1) for name in named]
    told = f"No {' and no '.join(words)} than in the earlier result" if words else "Nothing was compared by a rule"
    rest = [f"no rule compared {' and '.join(lacking)}"] if lacking and words else []
    return f"{'; '.join([told, *rest, *filter(None, [open_text])])}."


def _is_ratio(metric: str) -> bool:
    """Returns whether a ruling's metric is a ratio of times or memory; others are of images."""
    return metric.partition("/")[0] in RULED


def _counted(names: Sequence[str]) -> str:
    return "1 variant" if len(names) == 1 else f"{len(names)} variants"


def verdict_markdown(summary: Summary, first: str = "") -> str:
    """Returns the verdicts as Markdown: what they say in a sentence, if there is one, and every ruling below them."""
    rulings = [
        (
            j.candidate,
            _rule_name(r),
            str(decision_of(r.verdict)),
            _figure(r.estimate),
            "" if r.low is None or r.high is None else f"[{r.low:.4g}, {r.high:.4g}]",
            _figure(r.margin),
            r.text,
        )
        for j in summary.result.judgements
        for r in j.rulings
    ]
    heads = ("variant", "rule", "gate", "estimate", "one-sided bounds", "limit", "reason")
    blocks: list[Block] = [
        *([Prose(first, strong=True)] if first else []),
        *verdict_blocks(summary.result),
        Notes(floors_of(summary.result)),
        Fold(f"All {len(rulings)} rules", [Table(heads, rulings)]),
    ]
    return f"## sdopt gate: {escaped(summary.result.name)} ({escaped(summary.result.gate)})\n\n{written(blocks)}"


def summary_markdown(summary: Summary, against: str = "") -> str:
    """Returns the summary of a step in CI: the answer, the ranking, and then the verdicts.

    `against` is the answer where the result was compared with an earlier one.
    """
    first = written([Prose(against or summary.sentence, strong=True), ranking(summary)])
    return f"{first}\n{verdict_markdown(summary)}"


def _claims(judgements: Sequence[Judgement]) -> list[str]:
    """Returns which of the study's claims of a gain hold together; those alone let a candidate pass `must pay`."""
    claims = [(j, metric) for j in judgements for metric in j.claims]
    kept = [
        f"{j.candidate} ({with_shape(measure_named(metric).claim, metric.partition('/')[2])})"
        for j, metric in claims
        if metric in j.gains
    ]
    if not claims:
        return []
    counts = f"{len(kept)} of {len(claims)} expected gains are shown, allowing for how many were looked for"
    return [f"{counts}: {', '.join(kept)}." if kept else f"{counts}."]


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


def _because(result: StudyResult, judgement: Judgement) -> str:
    """Returns the reasons of the verdict, each in a sentence. A pass has too many to name."""
    if judgement.verdict is Verdict.PASS:
        return "; ".join(filter(None, [f"all {len(judgement.rulings)} rules", judgement.note]))
    return "; ".join(filter(None, [*_first_reasons(judgement, result), judgement.note]))


_REASONS = 3
"""Reasons of a verdict that are sentences; the table of all rules has the others."""


def _first_reasons(judgement: Judgement, result: StudyResult) -> list[str]:
    """Returns the first reasons of a verdict, and how many properties more there are."""
    reasons = reasons_of(judgement, result)
    more = len(reasons) - _REASONS
    return [*reasons[:_REASONS], *([f"and {more} more like these"] if more > 0 else [])]


def _rule_name(ruling: Ruling) -> str:
    """Returns a rule's name in reports: its metric, if it has one, and its test."""
    return f"{ruling.metric} {ruling.rule}".strip()


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def verdict_json(summary: Summary, against: str = "") -> bytes:
    """Returns the verdicts on each variant, best first, and every judgement with its rulings, as JSON.

    `against` is the answer where the result was compared with an earlier one: then the verdicts are of that alone.
    """
    result = summary.result
    variants = [verdicts_of(row) for row in summary.candidates]
    if against:
        variants = [{"variant": j.candidate, "gate": str(decision_of(j.verdict))} for j in result.judgements]
    content = {
        "study": result.name,
        "id": result.id,
        "gate": result.gate,
        "answer": against or summary.sentence,
        "variants": variants,
        "judgements": [asdict(j) | {"gate": decision_of(j.verdict)} for j in result.judgements],
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def verdicts_of(row: Row) -> dict[str, str]:
    """Returns the verdicts on a variant by name, without those that it has none of."""
    found = {"variant": row.name, "speed": row.speed, "images": row.images, "gate": row.decision, "status": row.status}
    return {name: str(verdict) for name, verdict in found.items() if verdict is not None}


def junit(summary: Summary, inconclusive_passes: bool | None = None) -> bytes:
    """Returns JUnit XML, valid for Jenkins and for Ant's schema (windyroad's `JUnit.xsd`).

    A suite for each comparison, with one case; the verdicts are properties of a suite. A regression is a `failure`;
    what is undecided is `skipped` where the gate lets it pass, and else an `error`, so that no reader takes it for a
    pass; so is what cannot be compared. The message has each reason once, the text the figures of the rules. A suite's
    time is that of the candidate's timed calls. Ant's schema asks for every attribute and child here, in this order.

    Args:
        summary: of the judged study.
        inconclusive_passes: as the gate that judged has it; None for the study's own gate.
    """
    root, result = ElementTree.Element("testsuites"), summary.result
    lenient = result.config.gate.inconclusive_passes if inconclusive_passes is None else inconclusive_passes
    spent = {row.name: sum(map(sum, row.samples.values())) for row in result.variants}
    for number, judgement in enumerate(result.judgements):
        name = _printable(f"{judgement.candidate} against {judgement.reference}")
        time, kind = f"{spent.get(judgement.candidate, 0.0):.3f}", _outcome(judgement, lenient)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=name,
            package=_printable(f"sdopt gate {result.gate}"),
            id=str(number),
            hostname=_printable(result.environment.host) or "unknown",
            timestamp=result.started[:19],
            time=time,
            tests="1",
            failures=str(int(kind == "failure")),
            errors=str(int(kind == "error")),
        )
        properties = ElementTree.SubElement(suite, "properties")
        # What a variant gains over its own baseline says nothing of an earlier result.
        row = None if judgement.is_drift else summary.row(judgement.candidate)
        verdicts_of = {"speed": row and row.speed, "images": row and row.images, "gate": decision_of(judgement.verdict)}
        for name_of, verdict in verdicts_of.items():
            if verdict is not None:
                ElementTree.SubElement(properties, "property", name=name_of, value=str(verdict))
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=f"gate {result.gate}", time=time)
        if kind:
            message = _printable("; ".join(_first_reasons(judgement, result)))
            found = ElementTree.SubElement(case, kind, message=message, type=str(decision_of(judgement.verdict)))
            found.text = _printable("\n".join(_figures_of(judgement)))
        ElementTree.SubElement(suite, "system-out")
        ElementTree.SubElement(suite, "system-err")
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def _outcome(judgement: Judgement, inconclusive_passes: bool) -> str:
    """Returns the element of JUnit that says how a judgement ended; "" for a pass."""
    if judgement.verdict is Verdict.PASS:
        return ""
    if judgement.verdict is Verdict.FAIL:
        return "failure"
    allowed = judgement.verdict is Verdict.INCONCLUSIVE and inconclusive_passes
    return "skipped" if allowed else "error"


def _figures_of(judgement: Judgement) -> list[str]:
    """Returns a line for each rule that does not pass, with its figures."""
    return [
        f"{decision_of(ruling.verdict)}: {_rule_name(ruling)}: {ruling.text}"
        for ruling in judgement.rulings
        if ruling.verdict is not Verdict.PASS
    ]


def _printable(text: str) -> str:
    """Returns a text without the characters that XML cannot hold, and with none at its ends that a reader drops."""
    return _NO_CHARACTER.sub("�", text).strip()


def write_verdicts(summary: Summary, folder: Path, inconclusive_passes: bool | None = None, against: str = "") -> None:
    """Writes `verdicts.json`, `verdicts.md` and `verdicts.xml` (JUnit) into a folder; see `junit`. Raises OSError."""
    write_atomically(folder / "verdicts.json", verdict_json(summary, against))
    write_atomically(folder / "verdicts.md", verdict_markdown(summary, against).encode())
    write_atomically(folder / "verdicts.xml", junit(summary, inconclusive_passes))
    append_step_summary(summary, against)


def append_step_summary(summary: Summary, against: str = "") -> None:
    """Appends the Markdown to the file that `GITHUB_STEP_SUMMARY` names, where that is set, as far as GitHub takes it.

    The summary is for reading, and the exit code is the verdict: a file that cannot be written is only said.
    """
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if not target:
        return
    try:
        with open(target, "ab", opener=_at_once) as stream:
            # A terminal or a pipe, as /dev/stdout is, has no place to tell.
            room = _SUMMARY_BYTES - os.fstat(stream.fileno()).st_size
            if room < _LEAST_BYTES:
                raise OSError(errno.EFBIG, "it is full: GitHub takes 1 MiB")
            stream.write(_shortened(summary_markdown(summary, against) + "\n", room))
    except OSError as error:
        said = f"the summary cannot be written ({error.strerror}); verdicts are kept"
        print_problems([f"GITHUB_STEP_SUMMARY={target}: {said}"])


def _at_once(target: str, flags: int) -> int:
    """Opens a file for writing; a named pipe that nobody reads is an error (ENXIO), where `open` would wait."""
    handle = os.open(target, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(handle, True)
    return handle


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
