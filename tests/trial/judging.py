"""Decides what the gate caught: a rule failed it, or did not pass it but passes an honest option of the same contract.

Timed options are judged by their study. Harm to images alone is generated here without timing, in the worker's own code
and one process, and judged with the times of the repeated baseline.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from hydra.utils import get_class
from PIL import Image

from sdopt.contract import Contract
from sdopt.gate.calibration import Fit
from sdopt.gate.judge import rulings_of
from sdopt.gate.rule_context import RuleContext
from sdopt.hardware.device import Device
from sdopt.options.base import Optimization
from sdopt.options.precision import Precision
from sdopt.quality.evaluation import Evaluator, Settings
from sdopt.quality.inputs import Pictures
from sdopt.quality.metrics import family_of
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import Promise, Status, StudyResult, VariantResult
from sdopt.record.scores import ImageRecord
from sdopt.record.verdicts import Ruling, Verdict, worst
from sdopt.statistics.measures import RULED
from sdopt.study.reuse import join_latents
from sdopt.variant import Variant
from sdopt.worker.child import call_apart
from sdopt.worker.draws import LATENTS, draw_of, drawing_batch
from sdopt.worker.forkserver import StartContext
from sdopt.worker.host import PipelineHost
from tests.trial.images import Changed, Harm
from tests.trial.options import Mistake, Reordered

HONEST = "honest"


@dataclass(frozen=True)
class Caught:
    """The gate's verdict on one mistake, or on an honest option.

    Attributes:
        name: the variant's name.
        kind: what goes wrong, as a heading; `HONEST` if nothing does, so that no rule may fail it.
        contract: the contract that it declared.
        verdict: the gate's verdict.
        by: names of the rules that caught it: those that failed it or, if none did, those that did not pass it although
            they passed an honest option of the same contract.
        fits: whether an expected rule caught a mistake, or no rule failed an honest option.
        effect: the estimate over the margin for the first expected rule in `by`, else the first in `by`; None if it has
            none.
    """

    name: str
    kind: str
    contract: str
    verdict: Verdict
    by: tuple[str, ...]
    fits: bool
    effect: float | None


def caught(
    name: str,
    kind: str,
    contract: str,
    rulings: Sequence[Ruling],
    shared: Sequence[Ruling],
    expected: str = "",
) -> Caught:
    """Derives from the rulings on a variant whether it was caught, by one of the `expected` rules if there are any.

    An honest option may bring no gain on this machine, and *no benefit* is then no false alarm.
    """
    open_too = {
        rule_of(ruling) for ruling in shared if ruling.verdict is not Verdict.PASS
    }
    failed = [ruling for ruling in rulings if ruling.verdict is Verdict.FAIL]
    if kind == HONEST:
        decisive = [ruling for ruling in failed if ruling.payoff != "no benefit"]
    else:
        decisive = failed or [
            r
            for r in rulings
            if r.verdict is not Verdict.PASS and rule_of(r) not in open_too
        ]
    wanted = tuple(filter(None, expected.split("|")))
    fitting = [ruling for ruling in decisive if rule_of(ruling) in wanted] or decisive
    effects = [
        abs(one.estimate / one.margin)
        for one in fitting[:1]
        if one.estimate is not None and one.margin
    ]
    by = tuple(dict.fromkeys(map(rule_of, decisive)))
    fits = (
        not by
        if kind == HONEST
        else bool(by) and (not wanted or bool({*by} & {*wanted}))
    )
    verdict = worst([ruling.verdict for ruling in rulings])
    return Caught(
        name, kind, contract, verdict, by, fits, effects[0] if effects else None
    )


def rule_of(ruling: Ruling) -> str:
    """Returns a rule's name: its metric's family, or its own name."""
    name = ruling.metric.partition("/")[0]
    return ruling.rule if not name else name if name in RULED else family_of(name).name


def kind_of(variant: VariantResult) -> str:
    """Returns what goes wrong with a timed variant; an option that is not in the group `trial` is honest."""
    option = variant.config.options.get("trial")
    return (
        cast("type[Mistake]", get_class(option["_target_"])).kind if option else HONEST
    )


def judge_timed(result: StudyResult) -> list[Caught]:
    """Returns the gate's verdict on each variant of a judged study."""
    judged = [(one, result.variant(one.candidate)) for one in result.judgements]
    honest = {
        one.contract: one.rulings
        for one, variant in reversed(judged)
        if kind_of(variant) == HONEST
    }
    return [
        caught(
            variant.name,
            kind_of(variant),
            one.contract,
            one.rulings,
            honest.get(one.contract, []),
            variant.config.options.get("trial", {}).get("caught_by", ""),
        )
        for one, variant in judged
    ]


# --------------------------------------------------------------------------------------------------------------- images

PLAIN = "the baseline"
"""The images without harm that all others are compared with, generated by the same process."""

CONTROLS: dict[Contract, tuple[str, dict[str, Optimization]]] = {
    Contract.EXACT: ("the baseline again", {}),
    Contract.EQUIVALENT: ("attention summed in another order", {"trial": Reordered()}),
    Contract.LOSSY: (
        "precision=bf16, not timed",
        {"precision": Precision(weights="bfloat16")},
    ),
}
"""An honest option for each contract, by the name of its row."""


def judge_images(
    harms: Sequence[Harm],
    result: StudyResult,
    folder: Path,
    fit: Fit,
    context: StartContext,
    device: Device,
    note: Callable[[str], None] = lambda name: None,
) -> list[Caught]:
    """Generates and judges the images of every harm, and of an honest option of each contract."""
    options: dict[str, dict[str, Optimization]] = {PLAIN: {}, **dict(CONTROLS.values())}
    options |= {
        harm.name: {"trial": Changed(change=harm.change)}
        for harm in harms
        if harm.change
    }
    baseline = result.variant(result.baseline)
    prompts = tuple(record.prompt for record in baseline.images)
    images = call_apart(
        context,
        _generated,
        baseline.config,
        device,
        prompts,
        options,
        folder,
        note=note,
    )
    images |= {
        harm.name: _retouched(harm, folder, images[PLAIN])
        for harm in harms
        if harm.retouch
    }
    judge = _Judge(result, folder, images[PLAIN], fit)
    found, honest = [], {}
    for contract, (name, _) in CONTROLS.items():
        note(name)
        honest[contract] = judge.rulings(name, contract, images[name])
        found.append(caught(name, HONEST, contract, honest[contract], []))
    for harm in harms:
        note(harm.name)
        contract = Contract(harm.promise)
        rulings = judge.rulings(harm.name, contract, images[harm.name])
        found.append(
            caught(
                harm.name,
                harm.kind,
                contract,
                rulings,
                honest[contract],
                harm.caught_by,
            )
        )
    return found


class _Judge:
    """Judges images as those of a variant of a study that took as long as the repeated baseline."""

    def __init__(
        self, result: StudyResult, folder: Path, plain: list[ImageRecord], fit: Fit
    ) -> None:
        self._result, self._folder, self._fit, self._gate = (
            result,
            folder,
            fit,
            result.config.gate,
        )
        control = result.control
        assert control is not None
        self._control = control
        settings = Settings.of(result.config.quality, result.config.model, "cpu")
        ruled = {rule.metric for rules in self._gate.rules.values() for rule in rules}
        needed = tuple(
            one for one in settings.metrics if {one.name, one.family.name} & ruled
        )
        self._evaluator = Evaluator(replace(settings, metrics=needed))
        self._pictures = Pictures(folder, plain)
        quality = self._evaluator.of_variant(self._pictures, self._pictures)
        self._reference = replace(
            result.variant(result.baseline), images=plain, quality=quality, trips=[]
        )

    def rulings(
        self, name: str, contract: Contract, images: list[ImageRecord]
    ) -> list[Ruling]:
        """Returns the gate's rulings on the images of an option that promises a contract."""
        pictures = Pictures(self._folder, images)
        candidate = replace(
            self._control,
            name=name,
            role="variant",
            status=Status.OK,
            contract=contract,
            choices=self._reference.choices | {"trial": name},
            promises={"trial": Promise(contract, [])},
            images=images,
            denoiser_calls=self._reference.denoiser_calls,
            trips=self._evaluator.trips(pictures, self._pictures),
            quality=self._evaluator.of_variant(pictures, self._pictures),
        )
        edge = self._result.first_comparison(self._control.name)
        assert edge is not None
        context = RuleContext(
            candidate,
            self._reference,
            self._evaluator.of_pair(pictures, self._pictures),
            self._fit,
            lambda metric: RULED[metric].log_ratio(self._control, self._reference),
            lambda metric: RULED[metric].floor(self._result, edge),
            floors=self._result.floors.get("numerical", {}),
        )
        return rulings_of([context], self._gate, contract)


def _generated(
    config: RecordedConfig,
    device: Device,
    prompts: tuple[str, ...],
    options: Mapping[str, Mapping[str, Optimization]],
    folder: Path,
    note: Callable[[str], None],
) -> dict[str, list[ImageRecord]]:
    """Generates the images of the prompts for each set of options by name, in this process; stores them in `folder`."""
    found = {}
    for name, chosen in options.items():
        note(name)
        variant = Variant(
            name,
            choices=dict.fromkeys(chosen, name),
            overrides=(),
            model=config.model,
            task=config.task,
            scheduler=config.scheduler,
            workload=config.workload,
            protocol=config.protocol,
            hardware=config.hardware,
            optimizations=chosen,
            prompts=prompts[:1],
            pictured=prompts,
        )
        host = PipelineHost(variant, device)
        host.prepare()
        draw = draw_of(
            variant, drawing_batch([variant], config.quality.batch_size, judged=False)
        )
        below = _folder_of(name)
        records = [
            record
            for batch in range(draw.calls)
            for record in host.generate(batch, draw, folder / below).records
        ]
        join_latents(folder / below, records)
        found[name] = [
            replace(record, path=f"{below}/{record.path}") for record in records
        ]
    return found


def _retouched(harm: Harm, folder: Path, plain: list[ImageRecord]) -> list[ImageRecord]:
    """Stores the images that a harm makes of the plain ones."""
    assert harm.retouch is not None
    made = (
        torch.from_numpy(Pictures(folder, plain).images).permute(0, 3, 1, 2).float()
        / 127.5
        - 1
    )
    changed = harm.retouch(made)
    levels = (
        ((changed / 2 + 0.5).clamp(0, 1) * 255)
        .round()
        .byte()
        .permute(0, 2, 3, 1)
        .numpy()
    )
    below = _folder_of(harm.name)
    (folder / below).mkdir(parents=True, exist_ok=True)
    records = [
        replace(
            record,
            path=f"{below}/{Path(record.path).name}",
            finite=bool(np.isfinite(image).all()),
            digest="",
        )
        for record, image in zip(plain, changed.numpy(), strict=True)
    ]
    for record, image in zip(records, levels, strict=True):
        Image.fromarray(image).save(folder / record.path)
    latents = (folder / plain[0].path).with_name(LATENTS)
    if latents.is_file():
        shutil.copyfile(latents, folder / below / LATENTS)
    return records


def _folder_of(name: str) -> str:
    return "harmed/" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
