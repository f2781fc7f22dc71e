"""Writes a gate's verdicts as JUnit XML, valid for Jenkins and for Ant's schema (windyroad's `JUnit.xsd`)."""

import re
from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

from sdopt.record.verdicts import Judgement, Ruling, Verdict
from sdopt.statistics.scale import decision_of
from sdopt.statistics.summary import Summary

_NO_CHARACTER = re.compile(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\x7f-\x9f]")
"""What XML 1.0 cannot hold (a surrogate could not even be encoded) or discourages: control characters."""


def rule_name(ruling: Ruling) -> str:
    """Returns a rule's name in reports: its metric, if it has one, and its test."""
    return f"{ruling.metric} {ruling.rule}".strip()


def junit(summary: Summary, judgements: Sequence[Judgement]) -> bytes:
    """Returns JUnit XML: a suite for each comparison, a case for each rule; the verdicts are properties of a suite.

    A rule that failed is a `failure`; one that could not be judged, or not yet, is an `error`, so that no reader takes
    it for a pass. A suite's time is that of the candidate's timed calls; a rule takes none, but readers show NaN for a
    case without a time. Ant's schema asks for every attribute and child that is written here, and for this order.
    """
    root, result = ElementTree.Element("testsuites"), summary.result
    spent = {row.name: sum(map(sum, row.samples.values())) for row in result.variants}
    # A gate may have two rules of one test and metric, and readers keep one case of a name.
    times: Counter[tuple[str, str]] = Counter()
    for number, judgement in enumerate(judgements):
        verdicts = [ruling.verdict for ruling in judgement.rulings]
        failures = verdicts.count(Verdict.FAIL)
        name = printable(f"{judgement.candidate} against {judgement.reference}")
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=name,
            package=printable(f"sdopt gate {result.gate}"),
            id=str(number),
            hostname=printable(result.environment.host) or "unknown",
            timestamp=result.started[:19],
            time=f"{spent.get(judgement.candidate, 0.0):.3f}",
            tests=str(len(verdicts)),
            failures=str(failures),
            errors=str(len(verdicts) - failures - verdicts.count(Verdict.PASS)),
        )
        properties = ElementTree.SubElement(suite, "properties")
        row = summary.row(judgement.candidate)
        verdicts_of = {"speed": row and row.speed, "images": row and row.images, "gate": decision_of(judgement.verdict)}
        for name_of, verdict in verdicts_of.items():
            if verdict is not None:
                ElementTree.SubElement(properties, "property", name=name_of, value=str(verdict))
        for ruling in judgement.rulings:
            rule = printable(rule_name(ruling))
            times[name, rule] += 1
            rule += f" ({times[name, rule]})" if times[name, rule] > 1 else ""
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=rule, time="0.000")
            if ruling.verdict is not Verdict.PASS:
                kind = "failure" if ruling.verdict is Verdict.FAIL else "error"
                ElementTree.SubElement(
                    case, kind, message=printable(ruling.text), type=str(decision_of(ruling.verdict))
                )
        ElementTree.SubElement(suite, "system-out")
        ElementTree.SubElement(suite, "system-err")
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def printable(text: str) -> str:
    """Returns a text without the characters that XML cannot hold, and with none at its ends that a reader drops."""
    return _NO_CHARACTER.sub("�", text).strip()
