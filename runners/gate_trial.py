"""sdopt gate-trial: judge the judge. Sabotaged options must not pass, and what is the same must not fail."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.gate.trial import CONF

from . import end_with_code

if TYPE_CHECKING:
    from sdopt.gate.trial.alarms import Alarms, Caught


@end_with_code
def main(argv: list[str]) -> int:
    """Runs the trial; returns 0 where all was caught and no alarm was false, 1 where not, 2 and 3 as `sdopt run`."""
    parser = argparse.ArgumentParser(
        prog="sdopt gate-trial",
        description="Try the gate on options that do harm and say they do not, and on pairs that differ by chance.",
        epilog="example: sdopt gate-trial gate=strict quality.prompt_count=96",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for sdopt run")
    parser.add_argument(
        "--config-dir", type=Path, default=CONF, help="with the preset and its options (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, default=59, help="A/A trials of each kind (default: %(default)s)")
    parser.add_argument("--result", type=Path, help="folder of a measured trial: draws its A/A trials anew")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.result is not None:
        if arguments.overrides:
            parser.error(f"--result takes what was measured as it is, and no {' '.join(arguments.overrides)}")
        if not (arguments.result / "result.json").is_file():
            print(f"sdopt: --result {arguments.result}: there is no result.json in it", file=sys.stderr)
            return 2
        return _report(arguments.result, arguments.trials, None)
    if not (arguments.config_dir / "experiment" / "gate_trial.yaml").is_file():
        print(
            f"sdopt: --config-dir {arguments.config_dir}: there is no experiment/gate_trial.yaml; without --config-dir "
            f"the one that comes with sdopt is used, in {CONF}",
            file=sys.stderr,
        )
        return 2

    from .run import main as run

    started = time.monotonic()
    folder = Path("outputs/runs/gate-trial") / time.strftime("%Y-%m-%d_%H-%M-%S")
    command = ["--config-dir", str(arguments.config_dir.resolve()), "experiment=gate_trial", *arguments.overrides]
    code = run([*command, f"hydra.run.dir={folder}"])
    if not (folder / "result.json").is_file():
        return code or 3
    return _report(folder, arguments.trials, started)


def _report(folder: Path, trials: int, started: float | None) -> int:
    from rich.console import Console

    from sdopt.gate.calibration import calibration_for
    from sdopt.gate.trial.alarms import false_alarms, sabotages
    from sdopt.results.files import read_result
    from sdopt.results.records import Verdict

    console, result = Console(), read_result(folder)
    gate = result.config.gate
    caught = sabotages(result)
    with console.status("A/A trials"):
        alarms = false_alarms(result, folder, gate, calibration_for(result, gate.calibration), trials)
    took = "" if started is None else f"; {(time.monotonic() - started) / 60:.1f} minutes"
    markdown = _markdown(caught, alarms, took)
    (folder / "trial.md").write_text(markdown, encoding="utf-8")
    console.print(markdown, markup=False, highlight=False)
    console.print(f"trial: {folder / 'trial.md'}", markup=False, highlight=False, soft_wrap=True)
    false = sum(kind.count(Verdict.FAIL) for kind in alarms)
    return 0 if all(one.fits for one in caught) and not false else 1


def _markdown(caught: "list[Caught]", alarms: "list[Alarms]", took: str) -> str:
    from sdopt.report.markdown import markdown
    from sdopt.results.records import Verdict

    rows = [
        (
            one.name,
            one.contract,
            str(one.verdict) if one.fits else f"**{one.verdict}: not caught**",
            ", ".join(dict.fromkeys(one.by)),
            "" if one.effect is None else f"{one.effect:.1f}",
        )
        for one in caught
    ]
    tables = markdown(("sabotage", "declared", "verdict", "what caught it", "effect over margin"), rows, [])
    shown = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
    counts = [(kind.kind, str(len(kind.verdicts)), *(str(kind.count(v)) for v in shown)) for kind in alarms]
    notes = [f"{kind.kind}: {reason}" for kind in alarms for reason in kind.reasons[:3]]
    tables += "\n" + markdown(("A/A trials", "tried", "false alarms", "inconclusive", "passed"), counts, notes)
    missed = [one.name for one in caught if not one.fits]
    said = f"all {len(caught)} sabotages caught" if not missed else f"not caught: {', '.join(missed)}"
    return f"{tables}\n{said}{took}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
