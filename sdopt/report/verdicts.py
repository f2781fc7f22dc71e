"""Shows the verdicts of a gate: as a table for the terminal, as Markdown, as JSON, and as JUnit XML for CI."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

from sdopt.quality.metrics import family_of
from sdopt.record.files import write_atomically
from sdopt.record.records import StudyResult
from sdopt.record.verdicts import BROKEN, Judgement, Ruling, Verdict
from sdopt.report.blocks import Block, Fold, Notes, Prose, Table
from sdopt.report.columns import word
from sdopt.report.markdown import escaped, written
from sdopt.report.sentences.reasons import reasons_of
from sdopt.report.summary import Summary
from sdopt.report.tables import ranking
from sdopt.schema import TESTS
from sdopt.statistics.measures import (
    RULED,
    is_of_images,
    measure_named,
    with_shape,
)
from sdopt.statistics.rows import Row

_BOUNDS = (
    "A gate's bounds are one-sided, at the confidence of each rule, and those of gains at that of all claims together: "
    "they are others than the two-sided intervals of the table."
)


_NO_CHARACTER = re.compile(
    r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\x7f-\x9f]"
)
"""What XML 1.0 cannot hold (a surrogate could not even be encoded) or discourages: control characters."""


def verdict_blocks(result: StudyResult, said: str = "") -> list[Block]:
    """Returns a table with a row for each comparison that a gate has judged, and below it the reasons and notes.

    Those that were `said` above it are not repeated.
    """
    rows = []
    reasons: dict[str, list[str]] = {}
    for judgement in result.judgements:
        sides = (judgement.candidate, judgement.reference, judgement.contract)
        rows.append((*sides, word(judgement.verdict)))
        because = _because(result, judgement)
        reasons.setdefault(because, []).append(judgement.candidate)
    notes = []
    for because, names in reasons.items():
        if because not in said:
            notes.append(f"{'; '.join(names)}: {because}")
    table = Table(("variant", "against", "contract", "gate"), rows)
    return [table, Notes(notes)]


def footing_of(result: StudyResult) -> list[str]:
    """Returns what the rules' figures rest on: the kind of their bounds, the claims together, chance differences."""
    return [_BOUNDS, *_claims(result.judgements), *floors_of(result)]


def against_sentence(result: StudyResult) -> str:
    """Returns what a comparison with an earlier result shows, in a sentence, and what it does not compare."""
    failed = [one for one in result.judgements if one.verdict is Verdict.FAIL]
    open_text = _open_text(result.judgements)
    if failed:
        names = "; ".join(judgement.candidate for judgement in failed)
        because = _because(result, failed[0])
        sentences = ". ".join(filter(None, [because, open_text]))
        text = f"Worse than in the earlier result: {names}: {sentences}."
    else:
        text = _nothing_worse(result.judgements, open_text)
    text = " ".join([*_broken_texts(result.judgements), text])
    return f"{text} Each speed-up is over the baseline of its own run: times of the two runs are not compared."


def _broken_texts(judgements: Sequence[Judgement]) -> list[str]:
    """Returns a sentence for each variant that worked in the earlier result and fails now."""
    texts = []
    for judgement in judgements:
        for ruling in judgement.rulings:
            if ruling.rule == BROKEN:
                what = ruling.reason.removeprefix("it ").rstrip(".")
                texts.append(f"{judgement.candidate} {what}.")
    return texts


def _open_text(judgements: Sequence[Judgement]) -> str:
    """Returns which variants neither pass nor fail; "" if none is left."""
    texts = []
    for verdict in (Verdict.INCONCLUSIVE, Verdict.NOT_COMPARABLE):
        names = [one.candidate for one in judgements if one.verdict is verdict]
        if names:
            texts.append(f"{_counted(names)} {verdict}: {'; '.join(names)}")
    return "; ".join(texts)


def _nothing_worse(judgements: Sequence[Judgement], open_text: str) -> str:
    """Returns that nothing failed, by what rules compared: speed-ups, images, or both."""
    metrics: set[str] = set()
    for judgement in judgements:
        metrics.update(ruling.metric for ruling in judgement.rulings)
    compares_speed = any(metric.partition("/")[0] in RULED for metric in metrics)
    of_images = list(filter(is_of_images, metrics))
    in_pairs = any(family_of(metric).needs_pair for metric in of_images)
    images = "image" if in_pairs else "score of the images"
    verb = "is shown to be" if open_text else "is"
    worse = []
    lacking = []
    if compares_speed:
        worse.append(f"speed-up {verb} smaller")
    else:
        lacking.append("speed")
    if of_images:
        worse.append(f"{images} {verb} worse")
    else:
        lacking.append("images")
    clauses = ["Nothing was compared by a rule"]
    if worse:
        clauses = [f"No {' and no '.join(worse)} than in the earlier result"]
        if lacking:
            clauses.append(f"no rule compared {' and '.join(lacking)}")
    if open_text:
        clauses.append(open_text)
    return f"{'; '.join(clauses)}."


def _counted(names: Sequence[str]) -> str:
    return "1 variant" if len(names) == 1 else f"{len(names)} variants"


def verdict_markdown(summary: Summary, first: str = "") -> str:
    """Returns the verdicts as Markdown: what they say in a sentence, if there is one, and every ruling below them."""
    blocks: list[Block] = [Prose(first, strong=True)] if first else []
    return _titled(summary, [*blocks, *verdict_blocks(summary.result, first)])


def _titled(summary: Summary, blocks: Sequence[Block]) -> str:
    """Returns blocks on verdicts below a title, and every ruling below them."""
    rows = []
    for judgement in summary.result.judgements:
        for ruling in judgement.rulings:
            rows.append(_ruling_cells(judgement, ruling))
    headings = (
        "variant",
        "rule",
        "gate",
        "estimate",
        "one-sided bounds",
        "limit",
        "reason",
    )
    every: list[Block] = [
        Table(headings, rows),
        Notes([*footing_of(summary.result), _TURNED]),
    ]
    title = (
        f"sdopt gate: {escaped(summary.result.name)} ({escaped(summary.result.gate)})"
    )
    whole = [*blocks, Fold(f"All {len(rows)} rules", every)]
    return f"## {title}\n\n{written(whole)}"


_TURNED = (
    "A change of a metric is turned so that more is better; that of brightness or contrast, of which neither way is "
    "better, is the reference's figure less the variant's."
)
"""How figures of changes are recorded."""


def _limit_text(ruling: Ruling) -> str:
    """Returns the limit of a ruling, which a change either way has on both sides; "" without one."""
    test = TESTS.get(ruling.rule)
    either_way = test and test.figure == "change" and test.side == "both"
    if either_way and ruling.margin is not None:
        return f"±{abs(ruling.margin):.4g}"
    return _figure(ruling.margin)


def _ruling_cells(judgement: Judgement, ruling: Ruling) -> tuple[str, ...]:
    bounds = ""
    if ruling.low is not None and ruling.high is not None:
        bounds = f"[{ruling.low:.4g}, {ruling.high:.4g}]"
    return (
        judgement.candidate,
        _rule_name(ruling),
        str(ruling.verdict),
        _figure(ruling.estimate),
        bounds,
        _limit_text(ruling),
        ruling.text,
    )


def summary_markdown(
    summary: Summary, against: str = "", alone: Summary | None = None
) -> str:
    """Returns the summary of a step in CI: the answer, the ranking, and then the verdicts.

    `against` is the answer where the result was compared with an earlier one, and `alone` what it says by itself.
    """
    answer = Prose(against or summary.sentence, strong=True)
    table, *reasons = verdict_blocks(summary.result, against)
    if alone is None:  # the ranking has the verdicts
        first = written([answer, ranking(summary)])
        return f"{first}\n{_titled(summary, reasons)}"
    titled = _titled(summary, [table, *reasons])
    label = "The judged result by itself, over its own baseline and by its own gate:"
    last = written([Prose(label), ranking(alone)])
    return f"{written([answer])}\n{titled}\n{last}"


def _claims(judgements: Sequence[Judgement]) -> list[str]:
    """Returns which of the study's claims of a gain hold together; those alone let a candidate pass `must pay`."""
    claims = 0
    gains = []
    for judgement in judgements:
        claims += len(judgement.claims)
        for metric in judgement.claims:
            if metric in judgement.gains:
                shape = metric.partition("/")[2]
                claim = with_shape(measure_named(metric).claim, shape)
                gains.append(f"{judgement.candidate} ({claim})")
    if not claims:
        return []
    counts = f"{len(gains)} of {claims} expected gains are shown, allowing for how many were looked for"
    return [f"{counts}: {'; '.join(gains)}." if gains else f"{counts}."]


def floors_of(result: StudyResult) -> list[str]:
    """Returns the chance differences of two baselines, to show beside the margins."""
    metrics: set[str] = set()
    for judgement in result.judgements:
        metrics.update(ruling.metric for ruling in judgement.rulings)
    order = {
        "numerical": "in another order of computation",
        "sampling": "from other noise",
    }
    lines = []
    for kind, spreads in sorted(result.floors.items()):
        floors = []
        for name, spread in sorted(spreads.items()):
            if name in metrics:
                floors.append(f"{name} {spread.mean:.2g} ± {spread.deviation:.2g}")
        if floors:
            meaning = f"two baselines {order.get(kind, kind)}, mean difference ± deviation by prompt"
            lines.append(f"{kind} floor ({meaning}): {', '.join(floors)}.")
    return lines


def _because(result: StudyResult, judgement: Judgement) -> str:
    """Returns the reasons of the verdict, each in a sentence. A pass has too many to name."""
    if judgement.verdict is Verdict.PASS:
        reasons = [f"all {len(judgement.rulings)} rules pass"]
    else:
        reasons = _first_reasons(judgement, result)
    return "; ".join(filter(None, [*reasons, judgement.note]))


_REASONS = 3
"""Reasons of a verdict that are sentences; the table of all rules has the others."""


def _first_reasons(judgement: Judgement, result: StudyResult) -> list[str]:
    """Returns the first reasons of a verdict, and how many properties more there are."""
    reasons = reasons_of(judgement, result)
    more = len(reasons) - _REASONS
    if more <= 0:
        return reasons
    return [*reasons[:_REASONS], f"and {more} more like these"]


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
    judgements = [asdict(one) | {"gate": one.verdict} for one in result.judgements]
    if against:
        variants = [
            {"variant": one.candidate, "gate": str(one.verdict)}
            for one in result.judgements
        ]
    content = {
        "study": result.name,
        "id": result.id,
        "gate": result.gate,
        "answer": against or summary.sentence,
        "variants": variants,
        "judgements": judgements,
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def verdicts_of(row: Row) -> dict[str, str]:
    """Returns the verdicts on a variant by name, without those that it has none of."""
    verdicts = {
        "variant": row.name,
        "speed": row.speed,
        "images": row.images,
        "gate": row.decision,
        "status": row.status,
    }
    return {
        name: str(verdict) for name, verdict in verdicts.items() if verdict is not None
    }


def junit(summary: Summary, undecided_passes: bool | None = None) -> bytes:
    """Returns JUnit XML, valid for Jenkins and for Ant's schema (windyroad's `JUnit.xsd`).

    A suite for each comparison, with one case; the verdicts are properties of a suite. A regression is a `failure`;
    what is undecided is `skipped` where the gate lets it pass, and else an `error`, so that no reader takes it for a
    pass; so is what cannot be compared. The message has each reason once, the text the figures of the rules. A suite's
    time is that of the candidate's timed calls. Ant's schema asks for every attribute and child here, in this order.

    Args:
        summary: of the judged study.
        undecided_passes: as the gate that judged has it; None for the study's own gate.
    """
    result = summary.result
    lenient = undecided_passes
    if lenient is None:
        lenient = result.config.gate.undecided_passes
    root = ElementTree.Element("testsuites")
    for number, judgement in enumerate(result.judgements):
        _add_suite(root, number, judgement, summary, lenient)
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def _add_suite(
    root: ElementTree.Element,
    number: int,
    judgement: Judgement,
    summary: Summary,
    lenient: bool,
) -> None:
    """Adds the suite of one comparison, with one case."""
    result = summary.result
    name = _printable(f"{judgement.candidate} against {judgement.reference}")
    time = f"{_timed_s(result, judgement.candidate):.3f}"
    outcome = _outcome(judgement, lenient)
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
        failures=str(int(outcome == "failure")),
        errors=str(int(outcome == "error")),
        skipped=str(int(outcome == "skipped")),
    )
    properties = ElementTree.SubElement(suite, "properties")
    for verdict_name, verdict in _verdicts(judgement, summary).items():
        ElementTree.SubElement(properties, "property", name=verdict_name, value=verdict)
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=name,
        name=f"gate {result.gate}",
        time=time,
    )
    if outcome:
        message = _printable("; ".join(_first_reasons(judgement, result)))
        kind = str(judgement.verdict)
        problem = ElementTree.SubElement(case, outcome, message=message, type=kind)
        problem.text = _printable("\n".join(_figures_of(judgement)))
    ElementTree.SubElement(suite, "system-out")
    ElementTree.SubElement(suite, "system-err")


def _timed_s(result: StudyResult, name: str) -> float:
    """Returns the time of all timed calls of a variant; 0 if the study has none of that name."""
    samples = [row.samples.values() for row in result.variants if row.name == name]
    return sum(map(sum, chain.from_iterable(samples)))


def _verdicts(judgement: Judgement, summary: Summary) -> dict[str, str]:
    """Returns the verdicts that JUnit's readers see beside a judgement."""
    gate = {"gate": str(judgement.verdict)}
    row = summary.row(judgement.candidate)
    # What a variant gains over its own baseline says nothing of an earlier result.
    if row is None or judgement.is_drift:
        return gate
    verdicts = verdicts_of(row)
    return {
        name: verdicts[name] for name in ("speed", "images") if name in verdicts
    } | gate


def _outcome(judgement: Judgement, undecided_passes: bool) -> str:
    """Returns the element of JUnit that says how a judgement ended; "" for a pass."""
    if judgement.verdict is Verdict.PASS:
        return ""
    if judgement.verdict is Verdict.FAIL:
        return "failure"
    allowed = judgement.verdict is Verdict.INCONCLUSIVE and undecided_passes
    return "skipped" if allowed else "error"


def _figures_of(judgement: Judgement) -> list[str]:
    """Returns a line for what each rule that does not pass has found; what several share is told once, with all names."""
    rules: dict[tuple[str, str], list[str]] = {}
    for ruling in judgement.rulings:
        if ruling.verdict is Verdict.PASS:
            continue
        verdict = str(ruling.verdict)
        for text in filter(None, (ruling.reason, ruling.doubt)):
            rules.setdefault((verdict, text), []).append(_rule_name(ruling))
    lines = []
    for (verdict, text), names in rules.items():
        lines.append(f"{verdict}: {', '.join(dict.fromkeys(names))}: {text}")
    return lines


def _printable(text: str) -> str:
    """Returns a text without the characters that XML cannot hold, and with none at its ends that a reader drops."""
    return _NO_CHARACTER.sub("�", text).strip()


def write_verdicts(
    summary: Summary,
    folder: Path,
    undecided_passes: bool,
    against: str,
) -> None:
    """Writes `verdicts.json`, `verdicts.md` and `verdicts.xml` (JUnit) into a folder; see `junit`. Raises OSError."""
    contents = {
        "verdicts.json": verdict_json(summary, against),
        "verdicts.md": verdict_markdown(summary, against).encode(),
        "verdicts.xml": junit(summary, undecided_passes),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content)
