"""Compares two trees of sdopt on an earlier quickstart, beside a process that burns one core now and then.

    git worktree add /tmp/before730 730e618
    python -m tests.study.quickstart_beside_neighbour --before /tmp/before730 --output /tmp/neighbour

Each run is a command of its own, from its tree, with that tree's defaults. Runs of the two trees alternate, and both
have the same neighbours. Reference runs stand for the truth: those of the later tree, without a neighbour and with more
processes; for the earlier tree with the threads that it has by default, which make another truth. What is there is not
measured again. It takes an hour; on a machine that does other work it tells nothing.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from scipy import stats

from sdopt.analysis.disturbance import count_rounds
from sdopt.analysis.figures import figures_of
from sdopt.report.markdown import markdown
from sdopt.results.files import read_result

HERE = Path(__file__).parents[2]
STUDY = (
    "--config-dir",
    str(Path(__file__).parent / "neighbour"),
    "experiment=neighbour",
    "quality=none",
    "tracking=none",
)
REFERENCE = ("protocol.rounds=6", "protocol.replicates=5")
AS_EARLIER = ("hardware.threads=null", "model.threads=null")
"""The earlier tree computes with a thread for each core, and lets those sleep that wait for others."""
SLEEPING = {"OMP_WAIT_POLICY": "passive"}
BUSY_S, IDLE_S = 2.0, 6.0
"""Mean seconds for which the neighbour burns a core, and rests."""


@dataclass(frozen=True)
class Claim:
    """What one run said of one variant."""

    variant: str
    estimate: float
    low: float | None
    high: float | None
    said: int
    """1: faster, -1: slower, 0: neither."""


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    arm: str
    number: int
    wall_s: float
    claims: list[Claim]
    rounds: int
    disturbed: int


def _burn_now_and_then(seed: int) -> None:
    drawn, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:  # not beyond a comparison that was killed
        time.sleep(drawn.expovariate(1 / IDLE_S))
        end = time.monotonic() + drawn.expovariate(1 / BUSY_S)
        while time.monotonic() < end:
            pass


@contextmanager
def neighbour(seed: int | None) -> Iterator[None]:
    """Another process on the machine, whose habits a seed decides; None has none."""
    if seed is None:
        yield
        return
    process = get_context("spawn").Process(target=_burn_now_and_then, args=(seed,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def measure(
    arm: str,
    number: int,
    tree: Path,
    overrides: Sequence[str],
    seed: int | None,
    output: Path,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Measures one run, with variables of the environment, unless it is there."""
    folder = output / arm / f"{number:02d}"
    kept = folder / "run.json"
    if kept.is_file():
        found = json.loads(kept.read_text())
        return Run(**{**found, "claims": [Claim(**claim) for claim in found["claims"]]})
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "sdopt.cli", "run", *STUDY, *overrides, f"hydra.run.dir={folder / 'study'}"]
    with neighbour(seed), (folder / "log.txt").open("w") as log:
        began = time.monotonic()
        subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, **(variables or {}), "PYTHONPATH": str(tree)},
            stdout=log,
            stderr=log,
            check=True,
        )
        wall_s = time.monotonic() - began
    result = read_result(folder / "study")
    claims = [
        Claim(row.variant.name, bounds.estimate, bounds.low, bounds.high, 0 if _straddles(bounds) else row.speedup.gain)
        for row in figures_of(result)
        if row.speedup is not None and (bounds := row.speedup.interval)
    ]
    counts = count_rounds(result)
    run = Run(arm, number, wall_s, claims, counts.timed if counts else 0, counts.disturbed if counts else 0)
    kept.write_text(json.dumps(asdict(run), indent=1))
    return run


def _straddles(bounds: object) -> bool:
    """Whether nothing is claimed because there is no interval, or it holds 1."""
    low, high = getattr(bounds, "low", None), getattr(bounds, "high", None)
    return low is None or high is None or low <= 1 <= high


def truth_of(reference: Sequence[Run]) -> dict[str, tuple[float, float, float]]:
    """The speed-up of each variant over all reference runs, with a 95 % interval between runs."""
    found = {}
    for name in dict.fromkeys(claim.variant for run in reference for claim in run.claims):
        logs = np.log([claim.estimate for run in reference for claim in run.claims if claim.variant == name])
        width = float(stats.t.ppf(0.975, logs.size - 1) * stats.sem(logs)) if logs.size > 1 else math.inf
        mean = 0.0 if "A/A control" in name else float(logs.mean())  # identical, whatever was measured
        width = 0.0 if "A/A control" in name else width
        found[name] = (math.exp(mean), math.exp(mean - width), math.exp(mean + width))
    return found


def is_wrong(claim: Claim, truth: tuple[float, float, float]) -> bool:
    """Whether a run said faster of what is not, or slower of what is not, as far as the reference can tell."""
    _, low, high = truth
    return (claim.said > 0 and high <= 1.0) or (claim.said < 0 and low >= 1.0)


def misses(claim: Claim, truth: tuple[float, float, float]) -> bool:
    """Whether the interval lies beside the reference's."""
    return claim.low is not None and claim.high is not None and (claim.low > truth[2] or claim.high < truth[1])


def summary(arm: str, runs: Sequence[Run], truth: Mapping[str, tuple[float, float, float]]) -> tuple[str, ...]:
    """A row of the table."""
    claims = [claim for run in runs for claim in run.claims]
    wrong = sum(is_wrong(claim, truth[claim.variant]) for claim in claims)
    widths = [math.log(claim.high / claim.low) / 2 for claim in claims if claim.low and claim.high]
    errors = [math.log(claim.estimate / truth[claim.variant][0]) for claim in claims]
    return (
        arm,
        str(len(runs)),
        f"±{100 * math.expm1(float(np.median(widths))):.1f} %" if widths else "no interval",
        f"{100 * math.sqrt(float(np.mean(np.square(errors)))):.1f} %",
        f"{sum(misses(claim, truth[claim.variant]) for claim in claims)} of {len(widths)}",
        f"{wrong} of {sum(abs(claim.said) for claim in claims)}",
        f"{sum(run.disturbed for run in runs)} of {sum(run.rounds for run in runs)}",
        f"{float(np.median([run.wall_s for run in runs])):.0f} s",
    )


HEADINGS = (
    "tree",
    "runs",
    "half an interval (median)",
    "error (root mean square)",
    "intervals beside the truth",
    "wrong of what was said",
    "rounds disturbed",
    "time (median)",
)


def main() -> None:
    """Measures what is missing, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the earlier tree")
    parser.add_argument("--after", type=Path, default=HERE, help="the later tree (default: this one)")
    parser.add_argument("--runs", type=int, default=10, help="of each tree (default: %(default)s)")
    parser.add_argument("--references", type=int, default=3, help="runs without a neighbour (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs and of comparison.json")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of all runs, as in workload.steps=5")
    given = parser.parse_args()
    output: Path = given.output.resolve()
    later = given.after.resolve()
    reference: dict[str, list[Run]] = {"before": [], "after": []}
    for number in range(given.references):
        for arm, own, variables in (("before", AS_EARLIER, SLEEPING), ("after", (), {})):
            said = [*REFERENCE, *own, *given.overrides]
            reference[arm].append(measure(f"reference-{arm}", number, later, said, None, output, variables))
    arms: dict[str, list[Run]] = {"before": [], "after": []}
    for number in range(given.runs):
        for arm, tree in (("before", given.before), ("after", given.after)):
            arms[arm].append(measure(arm, number, tree.resolve(), given.overrides, number, output))
            print(f"{arm} {number}: {arms[arm][-1].wall_s:.0f} s", file=sys.stderr)
    truth = {arm: truth_of(runs) for arm, runs in reference.items()}
    rows = [summary(arm, runs, truth[arm]) for arm, runs in arms.items() if runs]
    notes = [f"{name}, {arm}: {each[0]:.3f}× in the reference" for arm in truth for name, each in truth[arm].items()]
    print(markdown(HEADINGS, rows, notes))
    found = {"truth": truth, "runs": [asdict(run) for runs in (*reference.values(), *arms.values()) for run in runs]}
    (output / "comparison.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
