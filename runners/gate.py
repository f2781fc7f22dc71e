"""sdopt gate: judge a finished result, or compare it with an earlier one; needs no GPU."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdopt.errors import UsageError

from . import Arguments, answers, end_with_code, judged_in, only_json

if TYPE_CHECKING:
    from sdopt.record.records import StudyResult
    from sdopt.tracking.finding import Found


@end_with_code
def main(argv: list[str]) -> int:
    """Judges a result; returns 0 if all passed, 1 for a regression, 2 for a usage error, 3 if not all were judged."""
    arguments = _parser().parsed(argv)

    from sdopt.config.composer import gate_of
    from sdopt.config.overrides import group_of
    from sdopt.judging import Judging
    from sdopt.schema import THRESHOLDS
    from sdopt.tracking.finding import find_results

    with only_json(arguments.json) as say:
        config = gate_of(arguments.overrides, arguments.config_dir)
        if not config.gate.judges:
            raise UsageError(
                f"gate={config.gate.name}: has no rules; choose gate=default, gate=strict or a gate of your own"
            )
        waived = _waived(arguments.waive, arguments.against)
        found = find_results(judged_in(arguments.result), config.tracking)
        named = {override.partition("=")[0] for override in arguments.overrides}
        thresholds = {
            name: getattr(config.protocol, name)
            for name in THRESHOLDS
            if f"protocol.{name}" in named
        }
        against = arguments.against and judged_in(arguments.against)
        judging = Judging(
            config,
            against,
            waived,
            thresholds,
            arguments.output,
            own_gate=not any(group_of(key) == "gate" for key in named),
        )
        code, judged, problems = judging.judge_all(found)
        if arguments.json:
            answer = _answer(found, judged, bool(against), code)
            say(answer | ({"problems": problems} if problems else {}))
        return code


def _parser() -> Arguments:
    parser = Arguments(
        prog="sdopt gate",
        description="Judge a result by a gate's rules, or, with --against, whether it is worse than an earlier one.",
        epilog="without gate=… it judges by the gate of the study, or else by gate=default. "
        "examples: sdopt gate outputs/runs/quickstart/<time> gate=strict; "
        "sdopt gate <new> --against <old> --waive versions",
    )
    parser.add_argument(
        "result",
        metavar="RESULT",
        help="a run's folder, its result.json, a sweep's folder, or an MLflow run id",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="as in gate=strict, protocol.smallest_speedup=0.03, tracking.uri=…",
    )
    parser.add_argument(
        "--against", metavar="RESULT", help="an earlier result of the same study"
    )
    parser.add_argument(
        "--waive",
        default="",
        metavar="NAMES",
        help="differences to allow with --against, separated by commas: versions, sdopt, options",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for verdicts.{json,md,xml}; for a sweep, with a subfolder for each job (default: beside the "
        "result; for an MLflow run outputs/reports/<id>)",
    )
    parser.add_config_dir()
    parser.add_json()
    return parser


def _answer(
    found: "Found", judged: Sequence["StudyResult"], is_drift: bool, code: int
) -> dict[str, Any]:
    """Returns the answers of the judged studies, and what verdicts.json holds of each; in a sweep, of all in order."""
    from sdopt.report.summary import summary_of
    from sdopt.report.verdicts import against_sentence, verdict_json

    by_id = {}
    for result in judged:
        sentence = against_sentence(result) if is_drift else ""
        by_id[result.id] = json.loads(verdict_json(summary_of(result), sentence))
    answer = answers(found, code)
    verdicts = [by_id.get(result.id) for result, _ in found.studies]
    for study, verdict in zip(answer["studies"], verdicts, strict=True):
        if verdict is not None:
            study["answer"] = verdict["answer"]
    return answer | {"verdicts": verdicts if found.sweep else verdicts[0]}


def _waived(names: str, against: str | None) -> tuple[str, ...]:
    """Returns the waivers of a command line. Raises UsageError if one does not exist, or `--against` is missing."""
    from sdopt.gate.differences import WAIVERS

    waived = tuple(filter(None, names.split(",")))
    problems = []
    if unknown := sorted(set(waived) - set(WAIVERS)):
        problems.append(
            f"--waive {','.join(unknown)}: unknown; choose from {', '.join(WAIVERS)}"
        )
    if waived and against is None:
        problems.append(
            f"--waive {names}: allows differences to an earlier result; name that with --against, or leave it out"
        )
    if problems:
        raise UsageError(problems)
    return waived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
