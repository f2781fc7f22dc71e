"""python -m tests.trial: test the gate. It must catch sabotaged options, and must not fail honest ones."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runners import ENDED, end_with_code
from sdopt.errors import UsageError
from tests.trial import CONF

if TYPE_CHECKING:
    from tests.trial.alarms import Trial
    from tests.trial.caught import Caught

ALARMS = Path("outputs/sweeps/gate-alarms")


@end_with_code
def main(argv: list[str]) -> int:
    """Runs the trial; returns 0 if every sabotage was caught and no honest option failed, else 1, 2 or 3.

    The codes 2 and 3 mean the same as for `sdopt run`; 3 also that trials of `--alarms` are missing.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.trial",
        description="Test the gate on options that do harm but promise not to, and on honest ones; from a checkout.",
        epilog="example: python -m tests.trial gate=strict quality.prompt_count=240",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, as for sdopt run")
    parser.add_argument(
        "--config-dir", type=Path, default=CONF, help="folder with the preset and its options (default: %(default)s)"
    )
    parser.add_argument(
        "--result", type=Path, help="folder of a measured trial: draw and judge its images again, without measuring"
    )
    parser.add_argument(
        "--alarms",
        type=int,
        metavar="N",
        help="run N independent A/A trials instead, a minute each; the same command continues an interrupted run",
    )
    parser.add_argument("--folder", type=Path, default=ALARMS, help="folder of the trials of --alarms [%(default)s]")
    parser.add_argument(
        "--ledger",
        type=Path,
        metavar="FILE",
        help="CSV file with finished trials of --alarms, which are not run again; new ones are added (default: "
        "trials.csv in the folder)",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.result is not None:
        if arguments.overrides:
            parser.error(f"--result: judges a trial as it was measured; leave out {' '.join(arguments.overrides)}")
        if not (arguments.result / "result.json").is_file():
            raise UsageError(f"--result {arguments.result}: has no result.json")
        return _report(arguments.result, None)
    if arguments.alarms is not None and arguments.alarms < 1:
        parser.error("--alarms: must be at least 1")
    preset = "gate_trial" if arguments.alarms is None else "gate_alarms"
    if not (arguments.config_dir / "experiment" / f"{preset}.yaml").is_file():
        raise UsageError(
            f"--config-dir {arguments.config_dir}: has no experiment/{preset}.yaml; without --config-dir the one that "
            f"belongs to the trial is used, in {CONF}"
        )

    from runners.run import main as run

    command = ["--config-dir", str(arguments.config_dir.resolve()), f"experiment={preset}", *arguments.overrides]
    if arguments.alarms is not None:
        from sdopt.config.overrides import asks_dry_run

        dry = asks_dry_run(arguments.overrides)
        return _alarms(arguments.alarms, arguments.folder, arguments.ledger, command, dry)
    started = time.monotonic()
    folder = Path("outputs/runs/gate-trial") / time.strftime("%Y-%m-%d_%H-%M-%S")
    code = run([*command, f"hydra.run.dir={folder}"])
    if code not in ENDED or not (folder / "result.json").is_file():
        return code
    return _report(folder, started)


def _report(folder: Path, started: float | None) -> int:
    """Draws and judges the sabotages that are not timed, and prints the tables of the whole trial.

    Raises:
        UnavailableError: the baseline has no images, so that there is nothing to judge by.
    """
    from rich.console import Console

    from sdopt.errors import UnavailableError
    from sdopt.gate.calibration import calibration_for
    from sdopt.results.files import read_result
    from sdopt.worker.forkserver import start_fork_server
    from sdopt.worker.machine import probe_machine
    from tests.trial.caught import timed_variants
    from tests.trial.drawn import judge_drawn

    console, result = Console(stderr=True), read_result(folder)
    baseline = result.variant(result.baseline)
    if not baseline.images:
        why = f" (status {baseline.status}: {baseline.reason})" if not baseline.status.measured else ""
        raise UnavailableError(
            f"{folder}: the baseline has no images{why}, and the trial judges all others by them: measure a new trial "
            "with `python -m tests.trial`"
        )
    gate = result.config.gate
    fit = calibration_for(result, gate.calibration)
    machine, context = probe_machine(start_fork_server(), result.config.hardware.device)
    with console.status("drawing and judging") as status:
        [drawn] = judge_drawn(
            result,
            folder,
            fit,
            context,
            machine.device,
            [gate],
            lambda name: status.update(f"drawing and judging: {name}"),
        )
    rows = [*timed_variants(result), *drawn]
    took = "" if started is None else f"; {(time.monotonic() - started) / 60:.1f} minutes"
    tables = _tables(rows, fit.note or fit.refusal, took)
    (folder / "trial.md").write_text(tables, encoding="utf-8")
    print(tables)
    print(f"trial: {folder / 'trial.md'}")
    return 0 if all(one.fits for one in rows) else 1


def _tables(rows: "list[Caught]", calibration: str, took: str) -> str:
    from sdopt.report.markdown import markdown

    def cells(one: "Caught") -> tuple[str, ...]:
        wrong = "failed" if one.honest else "not caught"
        verdict = str(one.verdict) if one.fits else f"**{one.verdict}: {wrong}**"
        effect = "" if one.effect is None else f"{one.effect:.3g}"
        return one.title, one.name, one.contract, verdict, ", ".join(one.by), effect

    sabotages = sorted((one for one in rows if not one.honest), key=lambda one: one.title)
    honest = [one for one in rows if one.honest]
    heads = ("class", "sabotage", "declared", "verdict", "what caught it", "effect over margin")
    tables = markdown(heads, [cells(one) for one in sabotages], [])
    tables += "\n" + markdown(("honest option", "declared", "verdict"), [cells(one)[1:4] for one in honest], [])
    missed = [one.name for one in sabotages if not one.fits]
    failed = [one.name for one in honest if not one.fits]
    summary = f"all {len(sabotages)} sabotages caught" if not missed else f"not caught: {', '.join(missed)}"
    summary += (
        f"; {len(honest)} honest options, none failed" if not failed else f"; honest and failed: {', '.join(failed)}"
    )
    return f"{tables}\n{summary}{took}\n" + (f"\n{calibration}\n" if calibration else "")


def _alarms(wanted: int, folder: Path, ledger: Path | None, command: list[str], dry: bool) -> int:
    """Runs the A/A trials that are missing, for each seed a sweep of one study per contract; counts the false alarms.

    A dry run shows the plan of one sweep, and the number of missing sweeps.
    """
    from runners.run import main as run
    from tests.trial.alarms import CANDIDATES, missing_seeds, read_ledger, trials_in, write_ledger

    ledger = ledger or folder / "trials.csv"
    kept = {(trial.seed, trial.contract): trial for trial in (*read_ledger(ledger), *trials_in(folder))}
    contracts = f"study.variants.candidate={','.join(CANDIDATES)}"
    code, missing = 0, missing_seeds(kept.values(), wanted)
    if dry:
        if missing:
            code = run(["-m", *command, f"workload.seed={missing[0]}", contracts])
        print(f"{len(kept)} of {wanted} trials are made; {len(missing)} sweeps of {len(CANDIDATES)} are missing")
        return code
    for seed in missing:
        sweep = folder / str(seed)
        if (sweep / "multirun.yaml").is_file():
            code = run([f"resume={sweep}"])
        else:
            code = run(["-m", *command, f"workload.seed={seed}", contracts, f"hydra.sweep.dir={sweep}"])
        kept |= {(trial.seed, trial.contract): trial for trial in trials_in(sweep)}
        write_ledger(ledger, kept.values())
        # A usage error or a full disk would recur for every seed, and a signal ends the command.
        if code not in ENDED or not any(seed == made for made, _ in kept):
            break
    trials = list(kept.values())
    failed = _show_alarms(trials, folder)
    if code not in ENDED:
        return code
    return 1 if failed else 0 if len(trials) >= wanted else 3


def _show_alarms(trials: "list[Trial]", folder: Path) -> int:
    """Prints the rates of false alarms, and writes them to `folder`; returns how many trials failed."""
    from sdopt.report.markdown import markdown
    from sdopt.results.verdicts import Verdict
    from tests.trial.alarms import count_alarms

    *by_contract, every = count_alarms(trials)
    shown = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.NOT_COMPARABLE, Verdict.PASS)
    rows = [
        (one.contract, str(len(one.trials)), *(str(one.count(v)) for v in shown), f"{100 * one.highest_rate:.1f} %")
        for one in (*by_contract, every)
    ]
    heads = (
        "declared",
        "trials",
        "false alarms",
        "inconclusive",
        "not comparable",
        "passed",
        "rate of false alarms below (95 %)",
    )
    versions = f"{every.versions} version{'s' if every.versions != 1 else ''} of sdopt's code made these trials"
    tables = markdown(heads, rows, [versions, *every.reasons])
    if folder.is_dir():
        (folder / "alarms.md").write_text(tables, encoding="utf-8")
    print(tables)
    return every.count(Verdict.FAIL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
