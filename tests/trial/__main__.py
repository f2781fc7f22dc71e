"""python -m tests.trial: try the gate on honest mistakes, which it must catch, and on honest options."""

import argparse
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runners import ENDED, end_with_code
from sdopt.errors import UnavailableError, UsageError
from tests.trial import CONF

if TYPE_CHECKING:
    from tests.trial.judging import Caught

HONEST = {
    "honest exact": ("+trial=neutral", "+trial.claim=latency"),
    "honest equivalent": ("layout=channels_last",),
    "honest lossy": ("precision=bf16",),
}
"""Honest options by contract; the first one is compared with `detour`, beside which it has the gain that it claims."""

_BESIDE = ("neutral", "detour", "reordered")
"""Options of the group `trial` that are no mistakes: parts of the controls, or for `tests.trial.alarms`."""


@end_with_code
def main(argv: list[str]) -> int:
    """Runs the trial; returns 0 if every mistake was caught and no honest option failed, else 1, 2 or 3."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trial",
        description="Try the gate on options with honest mistakes, which it must catch, and on honest options, which "
        "it must not fail. Options are timed in a study; harm to images alone is judged after it. Exit codes: 0 all "
        "caught and none failed; 1 not; 2 and 3 as for sdopt run.",
        epilog="quick: python -m tests.trial --only slower,grows --timed workload.steps=4    "
        "the rules on time: python -m tests.trial.simulate; false alarms: python -m tests.trial.alarms",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="Hydra overrides, as for sdopt run",
    )
    parser.add_argument(
        "--config-dir",
        type=Path,
        metavar="DIR",
        help="folder with mistakes of one's own, one yaml each in DIR/trial/",
    )
    parser.add_argument(
        "--only",
        metavar="NAME,…",
        help="only mistakes whose names begin so; honest options stay",
    )
    parser.add_argument(
        "--timed", action="store_true", help="leave out harm to images alone"
    )
    parser.add_argument(
        "--result",
        type=Path,
        metavar="DIR",
        help="a measured trial: judge its images again",
    )
    arguments = parser.parse_intermixed_args(argv)
    only = tuple(arguments.only.split(",")) if arguments.only else ("",)
    if arguments.result is not None:
        if arguments.overrides:
            parser.error(
                f"--result: judges a trial as it was measured; leave out {' '.join(arguments.overrides)}"
            )
        if not (arguments.result / "result.json").is_file():
            raise UsageError(f"--result {arguments.result}: has no result.json")
        return _report(arguments.result, only, arguments.timed, "")

    from runners.run import main as run
    from sdopt.config.overrides import asks_dry_run

    folder = Path("outputs/runs/gate-trial") / time.strftime("%Y-%m-%d_%H-%M-%S")
    started = time.monotonic()
    study = study_of(mistakes_in(CONF, arguments.config_dir, only))
    code = run([*study, *arguments.overrides, f"hydra.run.dir={folder}"])
    if (
        code not in ENDED
        or asks_dry_run(arguments.overrides)
        or not (folder / "result.json").is_file()
    ):
        return code
    return _report(
        folder,
        only,
        arguments.timed,
        f"{(time.monotonic() - started) / 60:.0f} minutes for the study",
    )


def mistakes_in(
    own: Path, further: Path | None, only: Collection[str]
) -> dict[str, Path]:
    """Returns the folders of the mistakes to time, by the names of their yaml files."""
    from tests.trial.images import HARMS

    found = {
        path.stem: own
        for path in sorted((own / "trial").glob("*.yaml"))
        if path.stem not in _BESIDE
    }
    if further is not None:
        mine = {
            path.stem: further.resolve()
            for path in sorted((further / "trial").glob("*.yaml"))
        }
        if not mine:
            raise UsageError(
                f"--config-dir {further}: has no trial/*.yaml; see {own / 'trial'} for examples"
            )
        found |= mine
    chosen = {
        name: folder
        for name, folder in found.items()
        if name.replace("_", " ").startswith(tuple(only))
    }
    if not chosen and not any(harm.name.startswith(tuple(only)) for harm in HARMS):
        names = [
            *(name.replace("_", " ") for name in found),
            *(harm.name for harm in HARMS),
        ]
        raise UsageError(
            f"--only {','.join(only)}: no mistake begins so; there are: {', '.join(names)}"
        )
    return chosen


def study_of(mistakes: dict[str, Path]) -> list[str]:
    """Returns the overrides of a study of the honest options and of some mistakes."""
    variants = {"baseline": (), "detour": ("+trial=detour",), **HONEST}
    variants |= {name.replace("_", " "): (f"+trial={name}",) for name in mistakes}
    references = {
        name: "baseline" for name in variants if name not in ("baseline", "detour")
    }
    references["honest exact"] = "detour"
    chosen = ",".join(
        f"{name}:[{','.join(map(repr, options))}]" for name, options in variants.items()
    )
    edges = ",".join(
        f"{{candidate:{name},reference:{reference}}}"
        for name, reference in references.items()
    )
    elsewhere = sorted(
        {f"file://{folder}" for folder in mistakes.values() if folder != CONF}
    )
    return [
        *(
            "--config-dir",
            str(CONF),
            f"hydra.searchpath=[{','.join(elsewhere)}]",
            "experiment=trial",
        ),
        *(f"study.variants={{{chosen}}}", f"study.edges=[{edges}]"),
    ]


def _report(folder: Path, only: tuple[str, ...], timed: bool, took: str) -> int:
    """Judges harm to images, and prints the tables of the whole trial."""
    from rich.console import Console

    from sdopt.gate.calibration import calibration_for
    from sdopt.record.files import read_result
    from sdopt.worker.forkserver import start_fork_server
    from sdopt.worker.machine import probe_machine
    from tests.trial.images import HARMS
    from tests.trial.judging import judge_images, judge_timed

    result = read_result(folder)
    rows = judge_timed(result)
    fit = calibration_for(result, result.config.gate.calibration)
    harms = [harm for harm in HARMS if harm.name.startswith(only) and not timed]
    if harms:
        baseline = result.variant(result.baseline)
        if not baseline.images:
            why = (
                f" (status {baseline.status}: {baseline.reason})"
                if not baseline.status.measured
                else ""
            )
            raise UnavailableError(
                f"{folder}: the baseline has no images{why}, and harm to images is judged by them"
            )
        machine, context = probe_machine(
            start_fork_server(), result.config.hardware.device
        )
        with Console(stderr=True).status("generating and judging") as status:
            rows += judge_images(
                harms,
                result,
                folder,
                fit,
                context,
                machine.device,
                lambda name: status.update(f"images: {name}"),
            )
    device, steps = (
        result.environment.device.get("name", ""),
        result.config.workload.steps,
    )
    facts = [
        f"{device}, {steps} steps",
        f"sdopt's code: {result.environment.code}",
        took,
        fit.note or fit.refusal,
    ]
    tables = tables_of(rows, [fact for fact in facts if fact])
    (folder / "trial.md").write_text(tables, encoding="utf-8")
    print(tables)
    print(f"trial: {folder / 'trial.md'}")
    return 0 if all(one.fits for one in rows) else 1


def tables_of(rows: "Sequence[Caught]", facts: Sequence[str]) -> str:
    """Returns the trial as Markdown: mistakes with what caught them, honest options, the count, and some facts."""
    from sdopt.report.markdown import markdown
    from tests.trial.judging import HONEST as NOTHING_WRONG

    def cells(one: "Caught") -> tuple[str, ...]:
        wrong = "failed" if one.kind == NOTHING_WRONG else "not caught"
        verdict = str(one.verdict) if one.fits else f"**{one.verdict}: {wrong}**"
        effect = "" if one.effect is None else f"{one.effect:.3g}"
        return one.kind, one.name, one.contract, verdict, ", ".join(one.by), effect

    mistakes = sorted(
        (one for one in rows if one.kind != NOTHING_WRONG), key=lambda one: one.kind
    )
    honest = [one for one in rows if one.kind == NOTHING_WRONG]
    heads = (
        "what goes wrong",
        "mistake",
        "declared",
        "verdict",
        "what caught it",
        "effect over margin",
    )
    tables = markdown(heads, [cells(one) for one in mistakes])
    tables += "\n" + markdown(
        ("honest option", "declared", "verdict"),
        [cells(one)[1:4] for one in honest],
    )
    missed, failed = (
        [one.name for one in some if not one.fits] for some in (mistakes, honest)
    )
    said = [
        f"not caught: {', '.join(missed)}"
        if missed
        else f"all {len(mistakes)} mistakes caught"
    ]
    said += [
        f"honest and failed: {', '.join(failed)}"
        if failed
        else f"{len(honest)} honest options, none failed"
    ]
    return f"{tables}\n{'; '.join(said)}\n\n" + "".join(f"- {fact}\n" for fact in facts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
