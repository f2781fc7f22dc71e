"""Compares a later result of a study with an earlier one, to find regressions between commits or versions.

Speed is compared as each result's own speed-up over its own baseline, because times of two runs share no rounds; images
are compared prompt by prompt.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import RuleContext, judgement, rulings_of
from sdopt.gate.rule_checks import applicable, is_of_images
from sdopt.gate.rulings import unjudged
from sdopt.gate.trust import disturbances, trust_rulings
from sdopt.quality.metrics import family_of, measured_metrics
from sdopt.record.choices import NONE, PATCH, PLAIN
from sdopt.record.comparisons import Comparison
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.scores import Score
from sdopt.record.verdicts import SINCE, Judgement, Ruling, Verdict
from sdopt.schema import AMOUNT, CHOICES, WORK, Gate, Quality
from sdopt.statistics.measures import SPEEDUP
from sdopt.statistics.ratios import LogRatio, speedup_drift

WAIVERS = ("versions", "sdopt", "options")
"""Differences that may be waived by name: `versions` of torch, diffusers and the like, the code of `sdopt`, and the
choices of variants of the same name (`options`), including the keys of these options."""

_OF_OPTIONS = ("contents of options", "contents of parts")
"""The code of a user's own options, and the files that options read: what they are is a choice of the variant."""


_OF_IMAGES = "contents of images"
"""What other programs made: images are what is compared, prompt by prompt."""


@dataclass(frozen=True)
class Difference:
    """One reason why two results are not comparable; `waiver` names the waiver that allows it, "" if none does."""

    what: str
    waiver: str = ""


_LOADED_BY = {
    "deepspeed": ("deepspeed",),
    "onnxruntime": ("onnxruntime",),
    "onnxscript": ("onnxruntime",),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt",),
    "torch-tensorrt": ("tensorrt",),
    "torch-blade": ("blade",),
    "sdnq": ("sdnq", "quantized"),
    "torchao": ("torchao", "quantized"),
    "tomesd": ("tome",),
    "xformers": ("xformers",),
}
"""Words of the options that load a package; a study without such an option is the same with any version of it."""


def _counts(package: str, later: StudyResult, earlier: StudyResult) -> bool:
    """Returns whether a package may have changed a result: code of the user's own may load any."""
    if package not in _LOADED_BY:
        return True
    for variant in (*later.variants, *earlier.variants):
        for axis, option in variant.choices.items():
            if axis == PATCH or any(word in f"{axis} {option}" for word in _LOADED_BY[package]):
                return True
    return bool(later.config.model.factory or earlier.config.model.factory)


def differences(later: StudyResult, earlier: StudyResult) -> list[Difference]:
    """Returns what keeps two results from being compared: other devices, models, workloads, versions or choices."""
    now, then = later.environment, earlier.environment
    essential = {
        "device": (now.device.get("name"), then.device.get("name")),
        "cpu": (now.cpu.get("name"), then.cpu.get("name")),
        "baseline": (later.baseline, earlier.baseline),
        **later.config.differing(earlier.config, WORK),
        **_contents(later.feature_digests, earlier.feature_digests),
    }
    packages = [name for name in sorted({*now.packages, *then.packages}) if _counts(name, later, earlier)]
    versions = {name: (now.packages.get(name), then.packages.get(name)) for name in packages}
    found = [
        Difference(f"{what}: {mine} against {other}", waiver)
        for waiver, pairs in (("", essential), ("versions", versions))
        for what, (mine, other) in pairs.items()
        if mine != other
    ]
    if now.python.rpartition(".")[0] != then.python.rpartition(".")[0]:
        found.append(Difference(f"python: {now.python} against {then.python}", "versions"))
    code = [(e.sdopt_version, e.sdopt_commit, e.sdopt_dirty) for e in (now, then)]
    if code[0] != code[1] or now.sdopt_dirty:
        found.append(Difference(f"sdopt: {now.sdopt} against {then.sdopt}", "sdopt"))
    everywhere = {variant.name for variant, _ in _of_both(later, earlier)}
    for what, names in changed_choices(later, earlier).items():
        # Speed-ups are relative to the baseline, so a change of it can only be waived if all variants changed alike.
        waivable = later.baseline not in names or everywhere <= {*names}
        found.append(Difference(f"{what} ({', '.join(names)})", "options" if waivable else ""))
    found += [Difference(f"{what} ({', '.join(names)})") for what, names in _other_inputs(later, earlier).items()]
    return found


def changed_choices(later: StudyResult, earlier: StudyResult) -> dict[str, list[str]]:
    """Returns the choices that differ between variants of the same name, such as `caching.interval: 5 against 3`.

    Each has the names of the variants in which it differs. Differences between the studies as a whole are left out.
    """
    of_study = later.config.differing(earlier.config, WORK)
    found: dict[str, list[str]] = {}
    for now, then in _of_both(later, earlier):
        settings = now.config.differing(then.config, (*WORK, "hardware"))
        chosen = {key: values for key, values in settings.items() if key.startswith((*CHOICES, *AMOUNT))}
        differing = chosen | _options(now, then)
        differing |= {key: values for key, values in _contents(now.inputs, then.inputs).items() if key in _OF_OPTIONS}
        for key, (mine, other) in differing.items():
            if key not in of_study and key != "hardware.price_per_hour":
                found.setdefault(f"{key}: {mine} against {other}", []).append(now.name)
    return found


def _other_inputs(later: StudyResult, earlier: StudyResult) -> dict[str, list[str]]:
    """Returns the work and the inputs in which variants of the same name differ, with the names of these variants.

    Inputs are weights, prompts, start images and noise; and prompts and seeds of the images, which every result has.
    """
    found: dict[str, list[str]] = {}
    of_study = later.config.differing(earlier.config, WORK)
    for now, then in _of_both(later, earlier):
        for key, (mine, other) in now.config.differing(then.config, WORK).items():
            if key not in of_study and not key.startswith((*CHOICES, *AMOUNT)):
                found.setdefault(f"{key}: {mine} against {other}", []).append(now.name)
        for key, (mine, other) in _contents(now.inputs, then.inputs).items():
            if key not in (*_OF_OPTIONS, _OF_IMAGES):
                found.setdefault(f"{key}: {mine} against {other}", []).append(now.name)
        pairs = zip(now.images, then.images, strict=False)
        if any((mine.prompt, mine.seed) != (other.prompt, other.seed) for mine, other in pairs):
            found.setdefault("images: drawn from other prompts or seeds", []).append(now.name)
    return found


def _of_both(later: StudyResult, earlier: StudyResult) -> Iterator[tuple[VariantResult, VariantResult]]:
    """Yields the variants that both results have, the repeated baseline among them."""
    before = {variant.name: variant for variant in earlier.variants}
    yield from ((now, before[now.name]) for now in later.variants if now.name in before)


def _contents(now: Mapping[str, str], then: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns the contents that differ, of those of which both digests are known, with the first digits of both."""
    return {
        f"contents of {name}": (now[name][:12], then[name][:12])
        for name in now
        if name in then and now[name] != then[name]
    }


def _options(now: VariantResult, then: VariantResult) -> dict[str, tuple[Any, Any]]:
    """Returns the options and keys of options in which two variants differ, by full name, with both values."""
    # An axis that one of them has not is of another version of sdopt: its default, which changes nothing.
    plain = {axis: PLAIN.get(axis, NONE) for axis in (*now.choices, *then.choices)}
    mine, other = plain | now.config.flat() | now.choices, plain | then.config.flat() | then.choices
    groups = {axis.partition(".")[0] for axis in (*now.choices, *then.choices)} - {*WORK}
    # The location of an option's class is sdopt's code, which is compared as such. A key that only one side has comes
    # from another version of sdopt; another option shows among the choices.
    return {
        key: (mine[key], other[key])
        for key in mine
        if key.partition(".")[0] in groups and not key.endswith("_target_") and key in other and mine[key] != other[key]
    }


def judge_drift(
    later: StudyResult,
    earlier: StudyResult,
    gate: Gate,
    fit: Fit,
    waived: Collection[str] = (),
    folders: tuple[Path, Path] | None = None,
) -> list[Judgement]:
    """Returns one judgement for each variant of either result; the later result is the candidate.

    A variant that only one of them has cannot be judged, and is not comparable.

    Args:
        later: the result to judge.
        earlier: the result to compare it with.
        gate: holds the rules. Each variant is judged as `equivalent`, or as `lossy` if a difference is waived.
        fit: the calibration of the later result, for margins; see `calibration_for`.
        waived: names from `WAIVERS`.
        folders: the folders of both results, to compare their images; without them, paired metrics are omitted.

    Raises:
        UsageError: the results are not comparable; the message names every difference.
    """
    gate = applicable(gate, later.config.quality, later.config.model)
    found = differences(later, earlier)
    refused = [difference for difference in found if difference.waiver not in waived]
    if refused:
        waivers = sorted({difference.waiver for difference in refused} - {""})
        advice = f"; `--waive {','.join(waivers)}` allows the differences that can be waived" if waivers else ""
        problems = [f"not comparable: {difference.what}" for difference in refused]
        raise UsageError([*problems[:-1], problems[-1] + advice])
    contract = Contract.LOSSY if found else Contract.EQUIVALENT
    now, then = ([v.name for v in result.variants if not v.is_control] for result in (later, earlier))
    names = [name for name in now if name in then]
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
        if ((paired or not family_of(rule.metric).needs_pair) if is_of_images(rule) else rule.metric == SPEEDUP.name)
    ]
    judged = replace(gate, rules={contract: rules}, must_pay=False)
    notes += filter(None, (fit.note, fit.refusal))
    note, shown = "; ".join(notes), folders if paired else None

    def of(name: str, rulings: list[Ruling], note: str = "") -> Judgement:
        comparison = Comparison(name, f"{name} of {earlier.started}", SINCE)
        return judgement(comparison, contract, rulings, note)

    # An option that is gone must not pass.
    alone = [(name, "later") for name in now if name not in then] + [(n, "earlier") for n in then if n not in now]
    return [
        *(of(name, rulings_of(_contexts(later, earlier, name, fit, shown), judged, contract), note) for name in names),
        *(of(name, [unjudged("variant", f"only the {which} result has it")]) for name, which in alone),
    ]


def _contexts(
    later: StudyResult, earlier: StudyResult, name: str, fit: Fit, folders: tuple[Path, Path] | None
) -> list[RuleContext]:
    """Returns a variant of both results at each shape, as the candidate and the reference of rules."""
    paired = _paired(later.variant(name), earlier.variant(name), folders) if folders else {}
    # The smaller of both numerical floors by metric: a regression that raises its own must widen no limit.
    both = [result.floors.get("numerical", {}) for result in (later, earlier)]
    floors = {
        metric: min((floors[metric] for floors in both if metric in floors), key=lambda floor: floor.mean)
        for metric in {**both[0], **both[1]}
    }

    def at(shape_index: int) -> RuleContext:
        views = later.at(shape_index), earlier.at(shape_index)
        pairs = [(view.variant(name), view.variant(view.baseline)) for view in views]

        floor = max((view.floor for view in views if view.floor is not None), default=None)
        disturbed = [
            f"in the {which} result: {what}"
            for which, view, sides in zip(("later", "earlier"), views, pairs, strict=True)
            for what in disturbances(view, *sides)
        ]
        return RuleContext(
            pairs[0][0],
            pairs[1][0],
            paired,
            fit,
            # The baseline's own speed-up is 1.
            lambda _metric: LogRatio(0.0, 0.0) if name == later.baseline else speedup_drift(*pairs),
            lambda _metric: floor,
            disturbed="; ".join(disturbed),
            trust=() if shape_index else _trust(views, pairs),
            shape=pairs[0][0].config.shapes[0].name if len(later.shapes) > 1 else "",
            floors=floors,
            protocol=later.config.protocol,
        )

    return [at(shape_index) for shape_index in range(len(later.shapes))]


def _trust(views: Sequence[StudyResult], pairs: Sequence[tuple[VariantResult, VariantResult]]) -> tuple[Ruling, ...]:
    """Returns the rulings on whether both results can be believed; those on the earlier result never pass or fail."""
    later, earlier = (trust_rulings(view, *sides) for view, sides in zip(views, pairs, strict=True))
    doubtful = [ruling for ruling in earlier if ruling.verdict is not Verdict.PASS]
    return *later, *(
        replace(
            ruling,
            verdict=Verdict.NOT_COMPARABLE if ruling.verdict is Verdict.FAIL else ruling.verdict,
            reason=f"in the earlier result: {ruling.text}",
            doubt="",
        )
        for ruling in doubtful
    )


def _paired(now: VariantResult, then: VariantResult, folders: tuple[Path, Path]) -> dict[str, Score]:
    """Returns the distances between a variant's images in the two results, in pixels and latents."""
    from sdopt.quality.evaluation import Evaluator, Settings
    from sdopt.quality.inputs import Pictures

    evaluator = Evaluator(Settings(measured_metrics(Quality(features=[]), now.config.model)))
    mine, other = (Pictures(folder, v.images) for folder, v in zip(folders, (now, then), strict=True))
    return evaluator.of_pair(mine, other) if now.images and then.images else {}
