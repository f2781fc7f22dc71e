"""Two results of the same study, an earlier and a later one: has anything got worse between two commits or versions?

Speed is compared as each result's own speed-up over its own baseline, because times of two runs share no rounds; images
are compared prompt by prompt.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from sdopt.analysis.measures import RULED, SPEEDUP
from sdopt.analysis.ratios import speedup_drift
from sdopt.errors import UsageError
from sdopt.gate.calibration import Calibration, fitting_calibration
from sdopt.gate.judge import RuleContext, judgement, of_shapes
from sdopt.optimizations.base import Contract
from sdopt.quality.metrics import family_of, measured_metrics
from sdopt.results.records import Comparison, Interval, Judgement, Score, StudyResult, VariantResult
from sdopt.schema import WORK, Gate, Quality

WAIVERS = ("versions", "sdopt")
"""Differences that may be waived by name: `versions` of torch, diffusers and the like, and the code of `sdopt`."""


@dataclass(frozen=True)
class Difference:
    """One reason why two results are not comparable; `waiver` names the waiver that allows it, "" if none does."""

    what: str
    waiver: str = ""


def differences(later: StudyResult, earlier: StudyResult) -> list[Difference]:
    """Returns what keeps two results from being compared: other devices, models, workloads, prompts or versions."""
    now, then = later.environment, earlier.environment
    found = [
        Difference(f"{what}: {mine} against {other}")
        for what, mine, other in (
            ("device", now.device.get("name"), then.device.get("name")),
            ("cpu", now.cpu.get("name"), then.cpu.get("name")),
            ("baseline", later.baseline, earlier.baseline),
        )
        if mine != other
    ]
    names = sorted({*now.packages, *then.packages})
    changed = [n for n in names if now.packages.get(n) != then.packages.get(n)]
    found += [Difference(f"{n}: {now.packages.get(n)} against {then.packages.get(n)}", "versions") for n in changed]
    if now.python.rpartition(".")[0] != then.python.rpartition(".")[0]:
        found.append(Difference(f"python: {now.python} against {then.python}", "versions"))
    code = [(e.sdopt_version, e.sdopt_commit, e.sdopt_dirty) for e in (now, then)]
    if code[0] != code[1] or now.sdopt_dirty:
        shown = [f"{version} {(commit or '')[:9]}{'+dirty' if dirty else ''}" for version, commit, dirty in code]
        found.append(Difference(f"sdopt: {shown[0]} against {shown[1]}", "sdopt"))
    work = later.config.differing(earlier.config, WORK)
    return found + [Difference(f"{key}: {mine} against {other}") for key, (mine, other) in work.items()]


def judge_drift(
    later: StudyResult,
    earlier: StudyResult,
    gate: Gate,
    calibration: Calibration | None,
    waived: Collection[str] = (),
    folders: tuple[Path, Path] | None = None,
) -> list[Judgement]:
    """Returns one judgement for each variant that both results measured; the later result is the candidate.

    Args:
        later: the result to judge.
        earlier: the result to compare it with.
        gate: holds the rules. Each variant is judged as `equivalent`, or as `lossy` if a difference is waived.
        calibration: the spread that margins are shares of.
        waived: names from `WAIVERS`.
        folders: the folders of both results, to compare their images; without them, paired metrics are omitted.

    Raises:
        UsageError: the results are not comparable; the message names every difference.
    """
    found = differences(later, earlier)
    refused = [difference for difference in found if difference.waiver not in waived]
    if refused:
        waivers = sorted({difference.waiver for difference in refused} - {""})
        advice = f"; `--waive {','.join(waivers)}` allows the differences that can be waived" if waivers else ""
        problems = [f"not comparable: {difference.what}" for difference in refused]
        raise UsageError([*problems[:-1], problems[-1] + advice])
    contract = Contract.LOSSY if found else Contract.EQUIVALENT
    names = [v.name for v in later.variants if v.role != "control" and any(o.name == v.name for o in earlier.variants)]
    if not names:
        raise UsageError("not comparable: the two results have no variant in common")
    notes = [f"waived: {'; '.join(difference.what for difference in found)}"] if found else []
    paired = folders is not None and contract is Contract.EQUIVALENT
    if not paired:
        notes.append(
            "images were not compared pair by pair" + ("" if folders else ": that takes the image files of both runs")
        )
    rules = [
        rule
        for rule in gate.rules.get(contract, [])
        # Memory and the largest calls of two runs were not measured side by side.
        if (rule.metric == SPEEDUP.name if rule.metric in RULED else paired or not family_of(rule.metric).needs_pair)
    ]
    judged = replace(gate, rules={contract: rules}, must_pay=False)
    calibration, misfit = fitting_calibration(calibration, later.config, named=gate.calibration is not None)
    notes += [misfit] if misfit else []
    return [
        _judge(later, earlier, name, judged, contract, calibration, "; ".join(notes), folders if paired else None)
        for name in names
    ]


def _judge(
    later: StudyResult,
    earlier: StudyResult,
    name: str,
    gate: Gate,
    contract: Contract,
    calibration: Calibration | None,
    note: str,
    folders: tuple[Path, Path] | None,
) -> Judgement:
    now, then = later.variant(name), earlier.variant(name)
    paired = _paired(now, then, folders) if folders else {}

    def at(shape_index: int) -> RuleContext:
        views = later.at(shape_index), earlier.at(shape_index)
        pairs = [(view.variant(name), view.variant(view.baseline)) for view in views]

        def ratio(metric: str, confidence: float) -> Interval | None:
            if name == later.baseline:
                return Interval(1.0, 1.0, 1.0, confidence)
            return speedup_drift(pairs[0], pairs[1], confidence)

        floor = max((view.floor for view in views if view.floor is not None), default=None)
        sides, floors = (pairs[0][0], pairs[1][0]), later.floors.get("numerical", {})
        return RuleContext(*sides, paired, calibration, ratio, lambda _metric: floor, floors=floors)

    sides = of_shapes([at(shape_index) for shape_index in range(len(later.shapes))])
    comparison = Comparison(name, f"{name} of {earlier.started}", "everything since")
    return judgement(comparison, contract, sides.rulings(gate, contract), note)


def _paired(now: VariantResult, then: VariantResult, folders: tuple[Path, Path]) -> dict[str, Score]:
    """Returns the distances between a variant's images in the two results, in pixels and latents."""
    from sdopt.quality.evaluation import Evaluator, Settings
    from sdopt.quality.inputs import Pictures

    evaluator = Evaluator(Settings(measured_metrics(Quality(features=[]), now.config.model)))
    mine, other = (Pictures(folder, v.images) for folder, v in zip(folders, (now, then), strict=True))
    return evaluator.of_pair(mine, other) if now.images and then.images else {}
