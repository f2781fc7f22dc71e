"""python -m tests.trial.alarms: count how often the gate fails an option that changes nothing.

Each trial is a study of its own, with fresh processes and other noise, of one honest option that declares itself exact,
equivalent or lossy in turn: trials that share processes or a baseline are not independent, and give no rate. Each takes
about a minute. The same command continues an interrupted run.
"""

import argparse
import sys
from pathlib import Path

from runners import ENDED, end_with_code
from sdopt.record.files import read_result
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.report.blocks import Notes, Table
from sdopt.report.markdown import written
from sdopt.statistics.bounds import share_bounds
from tests.trial import CONF

CANDIDATES = (
    '["+trial=neutral"]',
    '["+trial=reordered"]',
    '["+trial=reordered","trial.promise=lossy"]',
)
"""The options of the trials, as Hydra overrides, one for each contract."""


@end_with_code
def main(argv: list[str]) -> int:
    """Runs the trials that are missing; returns 1 if the gate failed any, and 3 if some could not be made."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trial.alarms", description=__doc__
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="Hydra overrides, as for sdopt run",
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=201,
        metavar="N",
        help="how many in all [%(default)s]",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("outputs/sweeps/gate-alarms"),
        help="[%(default)s]",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.trials < 1:
        parser.error("--trials: must be at least 1")

    from runners.run import main as run

    if (arguments.folder / "multirun.yaml").is_file():
        code = run([f"resume={arguments.folder}"])
    else:
        seeds = range(0, 1000 * -(-arguments.trials // len(CANDIDATES)), 1000)
        each = (
            f"workload.seed={','.join(map(str, seeds))}",
            f"study.variants.candidate={','.join(CANDIDATES)}",
        )
        place = f"hydra.sweep.dir={arguments.folder}"
        code = run(
            [
                "-m",
                "--config-dir",
                str(CONF),
                "experiment=alarms",
                *each,
                *arguments.overrides,
                place,
            ]
        )
    if code not in ENDED or not arguments.folder.is_dir():
        return code
    found = judgements_in(arguments.folder)
    tables = count_alarms(found)
    (arguments.folder / "alarms.md").write_text(tables, encoding="utf-8")
    print(tables)
    failed = any(judged.verdict is Verdict.FAIL for _, judged in found)
    return 1 if failed else 0 if len(found) >= arguments.trials else 3


def judgements_in(folder: Path) -> list[tuple[int, Judgement]]:
    """Returns the judgements of all results below a folder, each with the seed of its study."""
    results = (read_result(file.parent) for file in sorted(folder.rglob("result.json")))
    return [
        (result.config.workload.seed, judged)
        for result in results
        for judged in result.judgements
    ]


def count_alarms(found: list[tuple[int, Judgement]]) -> str:
    """Returns a Markdown table of the verdicts by contract, with the 95 % bound of the rate of false alarms."""
    shown = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.NOT_COMPARABLE, Verdict.PASS)
    rows = []
    for contract in (*dict.fromkeys(judged.contract for _, judged in found), "all"):
        verdicts = [
            judged.verdict
            for _, judged in found
            if contract in (judged.contract, "all")
        ]
        high = (
            share_bounds(verdicts.count(Verdict.FAIL), len(verdicts), 0.95).high
            if verdicts
            else None
        )
        bound = "" if high is None else f"{100 * high:.1f} %"
        rows.append(
            (
                contract,
                str(len(verdicts)),
                *(str(verdicts.count(verdict)) for verdict in shown),
                bound,
            )
        )
    counts = ("false alarms", "undecided", "not judged", "passed")
    failed = [
        f"seed {seed}, {judged.contract}: {ruling.metric or ruling.rule}: {ruling.reason}"
        for seed, judged in found
        for ruling in judged.rulings
        if ruling.verdict is Verdict.FAIL
    ]
    headings = ("declared", "trials", *counts, "rate of false alarms below (95 %)")
    return written([Table(headings, rows), Notes(failed)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
