"""Calibrations for margins: how much a model's images differ from prompt to prompt, measured once and kept in a file.

A margin must not be a multiple of the noise in the run that it judges: the noisier the run, the more would pass. So
`sdopt calibrate` measures the spread beforehand, on the model without optimizations, and a gate's margins are stated
as shares of that spread.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sdopt.contract import Contract
from sdopt.errors import UnavailableError, UsageError, command_line
from sdopt.record.choices import written_value
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import write_atomically
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.scores import Spread
from sdopt.schema import Gate, Model, Rule, Scheduler, Task
from sdopt.statistics.bounds import MINIMUM_PROMPTS
from sdopt.statistics.measures import is_of_images
from sdopt.text_files import read_text

FOLDER = Path(__file__).parent / "calibrations"

_TXT2IMG = Task().kind


@dataclass(frozen=True)
class Calibration:
    """The spread of each quality metric between two images of one prompt that start from different noise.

    `model`, `workload`, `scheduler` and `task` are sections of the configuration that the spread was measured with; a
    file without a task is of text-to-image. `digests` holds the hashes of the weights: those of the model, those of
    each feature extractor by name, and as `parts` those of the files that its options read, such as a LoRA.
    """

    model: str
    workload: dict[str, Any]
    digests: dict[str, str]
    metrics: dict[str, Spread]
    scheduler: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=lambda: asdict(Task()))

    def differing(self, config: RecordedConfig) -> dict[str, tuple[Any, Any]]:
        """Returns the settings that affect the spread and that differ between the calibration and a study.

        Returns:
            for each key, its value in the calibration and its value in the study. Omits keys that the calibration does
            not record, and keys that both leave to the model.
        """
        mine = dict(self.workload)
        for section, values in (
            ("scheduler", self.scheduler),
            ("task", _named(self.task)),
        ):
            mine |= {f"{section}.{key}": value for key, value in values.items()}
        differing = {}
        for key, value in work_of(config).items():
            measured = mine.get(key)
            if measured is not None and measured != value:
                name = key if "." in key else f"workload.{key}"
                differing[name] = measured, value
        return differing

    def other_parts(self, parts: str) -> dict[str, tuple[str, str]]:
        """Returns the files of options, if they are others than those of the digest `parts`; in both forms, shortened."""
        mine = self.digests.get(_PARTS, "")
        if mine == parts:
            return {}
        return {_OF_OPTIONS: (mine[:12] or "none", parts[:12] or "none")}


_PARTS = "parts"

_OF_OPTIONS = "files of options"


def work_of(config: RecordedConfig) -> dict[str, Any]:
    """Returns the settings that a calibration is valid for: steps, guidance, size, scheduler, task and its images."""
    task = _named(asdict(config.task))
    return {
        "steps": config.workload.steps,
        "guidance_scale": config.workload.guidance(config.model),
        "size": config.shapes[0].size,
        "scheduler.class_name": config.scheduler.class_name,
        "scheduler.options": config.scheduler.options,
        "task.kind": config.task.kind,
        # Text-to-image starts from noise alone, whatever the strength.
        "task.strength": 1.0 if config.task.kind == _TXT2IMG else config.task.strength,
        "task.image": task["image"],
        "task.mask": task["mask"],
    }


def _named(task: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a task; a starting image or mask that is not the user's own is `packaged`."""
    return dict(task) | {key: task.get(key) or "packaged" for key in ("image", "mask")}


_ADAPTER = TypeAdapter(Calibration)


def calibration_file(config: RecordedConfig) -> Path:
    """Returns the path at which sdopt ships the calibration of a model and task at a number of steps, if it does."""
    task = "" if config.task.kind == _TXT2IMG else f"{config.task.kind}-"
    return FOLDER / f"{config.model.name}-{task}{config.workload.steps}.json"


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration. Raises UsageError if the file is missing or is not a calibration."""
    try:
        return _ADAPTER.validate_json(read_text(path.expanduser()))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); `sdopt calibrate` writes one"
        ) from error
    except ValidationError as error:
        raise UsageError(
            f"{path}: not a calibration: {error.errors()[0]['msg']}"
        ) from error


@dataclass(frozen=True)
class Fit:
    """The calibration to judge a study with, if one fits.

    Attributes:
        calibration: the calibration to apply; None if there is none, or if none fits.
        note: the settings in which `calibration` differs from the study, if it is applied nevertheless; else "".
        refusal: why no calibration fits, and what to do; "" if one does, or if there is none at all.
        others: by variant, what fits where its work is another than the baseline's.
    """

    calibration: Calibration | None = None
    note: str = ""
    refusal: str = ""
    others: Mapping[str, "Fit"] = field(default_factory=dict)

    def of(self, reference: str) -> "Fit":
        """Returns what fits comparisons with a variant: images of four steps spread otherwise than those of 25."""
        return self.others.get(reference, self)


def calibration_for(result: StudyResult, path: str | None) -> Fit:
    """Returns the calibration to judge a result with: the file at `path`, or one that sdopt ships for the model.

    If sdopt ships several, the one whose settings differ least from the study's counts. One of other weights never
    fits: margins of one model do not apply to another.

    Raises:
        UsageError: the file at `path` is missing or is not a calibration.
    """
    baseline = result.baseline_variant
    plain = work_of(baseline.config)
    others: dict[str, Fit] = {}
    for variant in result.candidates:
        if work_of(variant.config) != plain:
            weights = _digests(result, variant)
            others[variant.name] = _fitting(variant.config, weights, path)
    whole = _fitting(result.config, _digests(result, baseline), path)
    return replace(whole, others=others)


def _fitting(
    config: RecordedConfig, digests: Mapping[str, str], path: str | None
) -> Fit:
    """Returns the calibration that fits some work: that of the file, or of those that sdopt ships."""
    source = "the calibration that comes with sdopt"
    calibrations = _shipped(config)
    if path:
        source = f"gate.calibration={path}"
        calibrations = [read_calibration(Path(path))]
    if not calibrations:
        return Fit()
    calibrations.sort(key=lambda calibration: len(calibration.differing(config)))
    for calibration in calibrations:
        if not _other_weights(calibration, digests):
            parts = digests.get(_PARTS, "")
            return fit_of(calibration, config, bool(path), parts)
    weights = ", ".join(_other_weights(calibrations[0], digests))
    return Fit(
        refusal=f"{source} is of other weights, {weights}: {how_to_calibrate(config)}"
    )


def _digests(result: StudyResult, variant: VariantResult) -> dict[str, str]:
    """Returns the hashes of the weights of a variant's model and options, and of each feature extractor of its study."""
    digests = {"model": "", **variant.inputs}
    own = {name: digests[name] for name in ("model", _PARTS) if name in digests}
    return own | result.feature_digests


def _other_weights(calibration: Calibration, digests: Mapping[str, str]) -> list[str]:
    """Returns the weights of which a calibration has other ones, each with the first digits of both hashes."""
    other = []
    for name, digest in digests.items():
        measured = calibration.digests.get(name, digest)
        if measured != digest and name != _PARTS:
            other.append(f"{name} {measured[:12]} (here {digest[:12] or 'unknown'})")
    return other


def fit_of(
    calibration: Calibration, config: RecordedConfig, named: bool, parts: str = ""
) -> Fit:
    """Returns whether a calibration of the same weights fits a study's settings.

    Two images of one prompt differ more at few steps than at many, and less where both start from one image or have the
    style of a LoRA, so a calibration with other settings does not fit. One whose file the user named is applied
    nevertheless, with a note.

    Args:
        calibration: the calibration.
        config: the study's configuration.
        named: whether the user named its file.
        parts: the digest of the files that options of the study's baseline read; "" for none.
    """
    differing = calibration.differing(config) | calibration.other_parts(parts)
    if not differing:
        return Fit(calibration)
    settings = []
    for key, (measured, here) in differing.items():
        settings.append(f"{key}={measured} (here {here})")
    note = f"the calibration was measured with {', '.join(settings)}"
    if named:
        return Fit(calibration, note=note)
    way = how_to_calibrate(config)
    if _OF_OPTIONS in differing:
        way += "; name the options of the baseline there, too, as in lora=loaded lora.path=…"
    return Fit(refusal=f"{note}: {way}")


def remarks_on_calibration(
    gate: Gate,
    contracts: Iterable[Contract],
    config: RecordedConfig,
    prompts: int,
) -> Iterator[str]:
    """Yields what a gate will not be able to decide of a study's images, before anything is measured.

    Margins in shares of the spread of images need a calibration with the study's settings, and bounds some prompts.
    Whether a calibration has the study's weights is known only after they are loaded.

    Args:
        gate: the rules that apply.
        contracts: those of the study's variants.
        config: the study's configuration.
        prompts: how many images are drawn of; a file may hold fewer than `quality.prompt_count`.
    """
    rules: list[Rule] = []
    for contract in contracts:
        of_contract = gate.rules.get(contract, [])
        rules += [rule for rule in of_contract if is_of_images(rule.metric)]
    if 0 < prompts < MINIMUM_PROMPTS and any(map(_needs_bounds, rules)):
        yield (
            f"images are drawn of {prompts} prompts, from which gate={gate.name} decides little; "
            f"{MINIMUM_PROMPTS} are the least (quality.prompt_count)"
        )
    if gate.calibration or not any(map(_needs_calibration, rules)):
        return
    if all(calibration.differing(config) for calibration in _shipped(config)):
        yield (
            f"gate={gate.name}: no calibration fits these settings, so that images of approximations will not be judged: "
            f"{how_to_calibrate(config)}; that makes two images of each of 240 prompts (--prompts)"
        )


def _needs_bounds(rule: Rule) -> bool:
    return bool(rule.confidence) and rule.how.has_bounds


def _needs_calibration(rule: Rule) -> bool:
    return bool(rule.of_seeds or rule.deviations) and not rule.optional


def _shipped(config: RecordedConfig) -> list[Calibration]:
    """Returns the calibrations that sdopt ships for a model."""
    # The name comes from the result, which may hold anything: it is compared, and neither a path nor a pattern.
    names = {config.model.name, f"{config.model.name}-{config.task.kind}"}
    return [
        read_calibration(file)
        for file in sorted(FOLDER.glob("*.json"))
        if file.stem.rpartition("-")[0] in names
    ]


def how_to_calibrate(config: RecordedConfig) -> str:
    """Returns how to get a calibration that fits a study."""
    command = command_line("calibrate", *_overrides(config), "--output", "own.json")
    return f"run `{command}` and judge with gate.calibration=own.json"


def _overrides(config: RecordedConfig) -> Iterator[str]:
    """Yields what a calibration has to be measured with."""
    yield from _model_words(config.model)
    if config.task.kind != _TXT2IMG:
        yield f"task={config.task.kind}"
        for key, value in asdict(config.task).items():
            if key != "kind" and value is not None:
                yield f"task.{key}={written_value(value)}"
    yield from _scheduler_words(config.scheduler)
    for key, value in work_of(config).items():
        if "." not in key:
            yield f"workload.{key}={value}"
    if config.quality.features:
        yield f"quality.features=[{','.join(config.quality.features)}]"


def _model_words(model: Model) -> Iterator[str]:
    yield f"model={model.source}"
    if model.weights == "random":
        yield "model.weights=random"
    if model.weights == "factory":  # no file tells its size
        yield f"model.size={model.size}"
    for key in ("revision", "variant", "tokenizer"):
        value = getattr(model, key)
        if value is not None:
            yield f"model.{key}={value}"


def _scheduler_words(scheduler: Scheduler) -> Iterator[str]:
    if scheduler.class_name != Scheduler.class_name:
        yield f"scheduler.class_name={scheduler.class_name}"
    for key, value in scheduler.options.items():
        yield f"+scheduler.options.{key}={written_value(value)}"
    if scheduler.timesteps is not None:
        yield f"scheduler.timesteps={written_value(scheduler.timesteps)}"


FROM_FOLDERS = (
    "run `sdopt calibrate --from A B --output own.json` on two folders of the baseline's images, of the same prompts "
    "and other seeds, and judge with gate.calibration=own.json"
)
"""How to get a calibration for images that other programs drew."""


def calibration_of(result: StudyResult) -> Calibration:
    """Returns the calibration that a study measured, whose baseline was drawn twice, from different noise.

    Raises:
        UnavailableError: the images could not be drawn or scored.
    """
    spreads = result.floors.get("sampling")
    if not spreads:
        problem = "no calibration written: the images could not be drawn or scored"
        failed = [variant for variant in result.variants if variant.status.failure]
        if failed:
            problem += f": {failed[0].name}: {failed[0].reason}"
        raise UnavailableError(problem)
    config = result.config
    work = work_of(config)
    workload = asdict(config.workload)
    workload |= {key: work[key] for key in ("guidance_scale", "size")}
    # Of the images whose spread it is, and not of the timed calls.
    workload["prompt_count"] = max(spread.n for spread in spreads.values())
    return Calibration(
        config.model.name,
        workload,
        _digests(result, result.baseline_variant),
        spreads,
        scheduler=asdict(config.scheduler),
        task=asdict(config.task),
    )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Writes the calibration, replacing the file in one step. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(asdict(calibration), indent=1) + "\n").encode())
