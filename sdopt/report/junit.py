"""Writes a gate's verdicts as JUnit XML."""

from collections.abc import Sequence
from xml.etree import ElementTree

from sdopt.results.records import StudyResult
from sdopt.results.verdicts import Judgement, Ruling, Verdict


def rule_name(ruling: Ruling) -> str:
    """Returns a rule's name in reports: its metric, if it has one, and its test."""
    return f"{ruling.metric} {ruling.rule}".strip()


def junit(result: StudyResult, judgements: Sequence[Judgement]) -> bytes:
    """Returns JUnit XML: a suite for each comparison, a case for each rule.

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
                suite, "testcase", classname=printable(judgement.candidate), name=rule_name(ruling)
            )
            if ruling.verdict is not Verdict.PASS:
                kind = "failure" if ruling.verdict is Verdict.FAIL else "error"
                ElementTree.SubElement(case, kind, message=printable(ruling.text), type=str(ruling.verdict))
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def printable(text: str) -> str:
    """Returns a text without the control characters that XML cannot hold."""
    return "".join(letter if letter >= " " or letter in "\t\n" else "�" for letter in text)
