"""Judges sabotages that harm only images, by untimed images, beside an honest option of each contract.

Their times are those of the A/A control, so that rules on time and memory rule as for two equal baselines. A rule that
is inconclusive catches a sabotage only if it passes the honest option of the same contract.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sdopt.analysis.measures import RULED
from sdopt.contract import Contract
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import RuleContext
from sdopt.hardware.device import Device
from sdopt.optimizations.base import Optimization
from sdopt.optimizations.precision import Precision
from sdopt.quality.evaluation import Evaluator, Settings
from sdopt.quality.inputs import Pictures
from sdopt.results.records import Promise, Status, StudyResult
from sdopt.results.scores import ImageRecord
from sdopt.results.verdicts import Ruling
from sdopt.schema import Gate
from sdopt.worker.draws import LATENTS
from sdopt.worker.forkserver import StartContext
from tests.trial.base import Retouch, Sabotage
from tests.trial.caught import Caught, caught
from tests.trial.drawing import Drawing, draw, folder_of
from tests.trial.honest import TITLE as HONEST
from tests.trial.honest import Reordered
from tests.trial.registry import drawn_sabotages

PLAIN = "the baseline"
"""The name of the images without sabotage that all others are compared with, drawn by the same process."""

CONTROLS: dict[Contract, tuple[str, dict[str, Optimization]]] = {
    Contract.EXACT: ("the baseline again", {}),
    Contract.EQUIVALENT: ("attention summed in another order", {"trial": Reordered()}),
    Contract.LOSSY: ("precision=bf16, drawn", {"precision": Precision(weights="bfloat16")}),
}
"""An honest option for each contract, by the name of its row."""


def judge_drawn(
    result: StudyResult,
    folder: Path,
    fit: Fit,
    context: StartContext,
    device: Device,
    gates: Sequence[Gate],
    note: Callable[[str], None] = lambda name: None,
) -> list[list[Caught]]:
    """Draws every sabotage of `registry` that need not be timed, and judges it.

    Args:
        result: a study with images of its baseline, and with a control.
        folder: where its images are; the drawn images go to `drawn/` below it.
        fit: the calibration for margins.
        context: starts the process that draws.
        device: the device to draw on.
        gates: each judges the same images.
        note: called with the name of each option before it is drawn or judged.

    Returns:
        for each gate a row for each honest option and each sabotage.
    """
    sabotages = drawn_sabotages()
    images = _draw_all(result, folder, {name: option for name, (_, option) in sabotages.items()}, context, device, note)
    trial = _Trial(result, folder, images[PLAIN], fit, gates)
    found: list[list[Caught]] = [[] for _ in gates]
    honest: dict[str, list[list[Ruling]]] = {}
    for contract, (name, options) in CONTROLS.items():
        note(name)
        honest[contract] = trial.rulings(name, contract, images[name], options)
        for rows, rulings in zip(found, honest[contract], strict=True):
            rows.append(caught(name, HONEST, contract, rulings, None))
    for name, (title, option) in sabotages.items():
        note(name)
        judged = trial.rulings(name, option.contract, images[name], {"trial": option})
        for rows, rulings, shared in zip(found, judged, honest[option.contract], strict=True):
            rows.append(caught(name, title, option.contract, rulings, shared, option.caught_by))
    return found


class _Trial:
    """Judges images as those of a variant of a study that took as long as the A/A control."""

    def __init__(
        self,
        result: StudyResult,
        folder: Path,
        images: list[ImageRecord],
        fit: Fit,
        gates: Sequence[Gate],
    ) -> None:
        self._result, self._folder, self._fit, self._gates = result, folder, fit, gates
        control = result.control
        assert control is not None
        self._control = control
        settings = Settings.of(result.config.quality, result.config.model, "cpu")
        ruled = {rule.metric for gate in gates for rules in gate.rules.values() for rule in rules}
        needed = tuple(one for one in settings.metrics if {one.name, one.family.name} & ruled)
        self._evaluator = Evaluator(replace(settings, metrics=needed))
        self._pictures = Pictures(folder, images)
        baseline = result.variant(result.baseline)
        quality = self._evaluator.of_variant(self._pictures, self._pictures)
        self._reference = replace(baseline, images=images, quality=quality, trips=[])

    def rulings(
        self, name: str, contract: Contract, images: list[ImageRecord], options: Mapping[str, Optimization]
    ) -> list[list[Ruling]]:
        """Returns each gate's rulings on the images of some options that promise a contract."""
        pictures = Pictures(self._folder, images)
        candidate = replace(
            self._control,
            name=name,
            role="variant",
            status=Status.OK,
            contract=contract,
            choices=self._reference.choices | dict.fromkeys(options, name),
            promises={axis: Promise(contract, []) for axis in options},
            images=images,
            denoiser_calls=self._reference.denoiser_calls,
            trips=self._evaluator.trips(pictures, self._pictures),
            quality=self._evaluator.of_variant(pictures, self._pictures),
        )
        edge = self._result.first_comparison(self._control.name)
        assert edge is not None
        sides = RuleContext(
            candidate,
            self._reference,
            self._evaluator.of_pair(pictures, self._pictures),
            self._fit,
            lambda metric, confidence: RULED[metric].ratio(self._control, self._reference, confidence),
            lambda metric: RULED[metric].floor(self._result, edge),
            floors=self._result.floors.get("numerical", {}),
        )
        return [sides.rulings(gate, contract) for gate in self._gates]


def _draw_all(
    result: StudyResult,
    folder: Path,
    sabotages: Mapping[str, Sabotage],
    context: StartContext,
    device: Device,
    note: Callable[[str], None],
) -> dict[str, list[ImageRecord]]:
    """Returns the images of the honest options and of every sabotage: drawn, or retouched from the baseline's."""
    baseline = result.variant(result.baseline)
    drawings = [Drawing(PLAIN, {}), *(Drawing(name, options) for name, options in CONTROLS.values())]
    drawings += [
        Drawing(name, {"trial": option}) for name, option in sabotages.items() if not isinstance(option, Retouch)
    ]
    prompts = [record.prompt for record in baseline.images]
    found = draw(context, baseline.config, device, prompts, drawings, folder / "drawn", note)
    found = {
        name: [replace(record, path=f"drawn/{record.path}") for record in records] for name, records in found.items()
    }
    for name, option in sabotages.items():
        if isinstance(option, Retouch):
            found[name] = retouched(option, folder, found[PLAIN], f"drawn/{folder_of(name)}")
    return found


def retouched(option: Retouch, folder: Path, plain: list[ImageRecord], subfolder: str) -> list[ImageRecord]:
    """Returns the images of an option that changes decoded images, made from the plain ones."""
    pictures = Pictures(folder, plain)
    decoded = torch.from_numpy(pictures.images).permute(0, 3, 1, 2).float() / 127.5 - 1
    changed = option.retouch(decoded, range(len(decoded)))
    levels = ((changed / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    (folder / subfolder).mkdir(parents=True, exist_ok=True)
    records = [
        replace(record, path=f"{subfolder}/{Path(record.path).name}", finite=bool(np.isfinite(image).all()))
        for record, image in zip(plain, changed.numpy(), strict=True)
    ]
    for record, image in zip(records, levels, strict=True):
        Image.fromarray(image).save(folder / record.path)
    latents = (folder / plain[0].path).with_name(LATENTS)
    if latents.is_file():
        shutil.copyfile(latents, folder / subfolder / LATENTS)
    return records
