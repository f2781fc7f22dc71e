"""Predicts seconds and GiB of variants on cards: known, extrapolated, or refused with a reason (`sdopt plan`)."""

import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdopt.apps.foresight.advice import Needed, Way, WaysToFit, what_fits
from sdopt.apps.foresight.blueprints import blueprint
from sdopt.apps.foresight.cards import asked_for, sheets_for, with_known_card
from sdopt.apps.foresight.cpu import ARCHITECTURE as CPU
from sdopt.apps.foresight.cpu import (
    HALF_WIDTH,
    device_of,
    machine_of,
    seconds_of,
    sheet_of_cpu,
    threads_of,
)
from sdopt.apps.foresight.fitting import (
    EXTRAPOLATED,
    Z80,
    half_width,
    is_common,
    labels,
    relatives,
    state_of,
    why_not,
)
from sdopt.apps.foresight.latency import (
    NAMES,
    PARTS,
    Array,
    Case,
    RateTable,
    added,
    coefficients,
    generation_of,
)
from sdopt.apps.foresight.memory import (
    ONLY_ALONE,
    Blueprint,
    Footprint,
    footprint,
    steps_of,
)
from sdopt.apps.foresight.software import Software, software_of
from sdopt.apps.foresight.transfers import streams, transfer_s
from sdopt.config.composer import HydraComposer, composer_of
from sdopt.config.groups import data_sheets
from sdopt.config.models import with_own_models
from sdopt.config.overrides import key_of, written_key
from sdopt.config.paths import options_of
from sdopt.errors import UsageError, command_line, counted, require_texts
from sdopt.hardware.cards import sheet_of
from sdopt.hardware.faults import (
    builds_of,
    faults_of,
    without_arithmetic,
    without_kernels,
)
from sdopt.measure.generators import kept_generators
from sdopt.options.caching import Caching
from sdopt.options.memory import TinyVae
from sdopt.pipelines.loading import family_of
from sdopt.pipelines.parts import TEXT_ENCODERS
from sdopt.record.comparisons import Interval
from sdopt.record.files import read_result
from sdopt.schema import Shape, Sheet
from sdopt.statistics.words import gib_text, seconds_parts
from sdopt.study.designs import BASELINE
from sdopt.study.plan import unused_options
from sdopt.variant import Variant

if TYPE_CHECKING:
    import pandas as pd

REFUSED = "refused"

Learned = tuple[Array, str]
"""Coefficients that a measurement has changed, and a summary."""

_ENCODER_SHARE = 0.45
"""Work of the VAE's encoder, as a share of its decoder's."""

_TOKENS = 77
"""Length of a prompt, as CLIP pads it."""

_SIZES = (512, 1024)
"""Sizes of the images in the figures; time for smaller and larger ones is extrapolated."""


@dataclass(frozen=True)
class Prediction:
    """One variant on one card, at one shape.

    Attributes:
        card: the name in `hardware=`.
        images: of a call.
        steps: of a call, as they are asked for.
        memory: of a call; told where the time is refused, too.
        state: `known`, `extrapolated` or `refused`.
        reason: why a time is refused; "" if there is one.
        seconds: of a call; NaN if refused.
        low: lower end of the 80 % interval.
        high: upper end.
        shares: of the time, by what it is spent on.
        price: of 1,000 images, where a price per hour is known.
        warning: known faults of the card in the types of the variant.
    """

    variant: str
    card: str
    sheet: Sheet
    shape: Shape
    images: int
    steps: int
    memory: Footprint
    state: str
    reason: str = ""
    seconds: float = math.nan
    low: float = math.nan
    high: float = math.nan
    shares: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    price: float | None = None
    warning: str = ""

    @property
    def work(self) -> str:
        """What a call makes, and in how many steps."""
        several = self.images != self.shape.batch_size
        images = f", {self.images} images" if several else ""
        return f"{self.shape}{images}, {counted(self.steps, 'step')}"

    @property
    def fits(self) -> str:
        """Whether it fits: `fits`, `tight` or `does not fit`."""
        return self.memory.verdict(self.sheet.memory_gib)

    @property
    def is_too_large(self) -> bool:
        """Whether a call does not fit at all."""
        return self.fits == "does not fit"

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm of the time."""
        return math.log(self.high / self.low) / 2 / Z80

    def row(self) -> dict[str, Any]:
        """Returns the prediction as a flat row."""
        return {
            "variant": self.variant,
            "card": self.card,
            "name": self.sheet.name,
            "size": self.shape.size,
            "batch_size": self.shape.batch_size,
            "images": self.images,
            "steps": self.steps,
            "state": self.state,
            "seconds": self.seconds,
            "low": self.low,
            "high": self.high,
            "at_least_gib": self.memory.floor,
            "likely_gib": self.memory.likely,
            "card_gib": self.sheet.memory_gib,
            "fits": self.fits,
            "price_per_1000_images": math.nan if self.price is None else self.price,
            **{
                f"share_{name.replace(' ', '_')}": share
                for name, share in self.shares.items()
            },
            "evidence": self.evidence,
            "reason": self.reason,
            "warning": self.warning,
        }


def predict(
    variants: Sequence[Variant],
    cards: Mapping[str, Sheet],
    learned: Learned | None = None,
    torch: tuple[int, int] | None = None,
) -> list[Prediction]:
    """Predicts each variant at each of its shapes on each card.

    Args:
        variants: what would run.
        cards: the data sheets of the cards in question, by option of `hardware`.
        learned: what a user's own measurement says of this software and host.
        torch: version of PyTorch there; this machine's if not given.
    """
    there = torch or _torch_here()
    predictions = []
    for variant in variants:
        for shape in variant.shapes:
            plan = blueprint(variant, shape)
            for card, sheet in cards.items():
                predictions.append(
                    _prediction(variant, plan, shape, card, sheet, learned, there)
                )
    return predictions


def predict_here(variants: Sequence[Variant]) -> list[Prediction]:
    """Predicts each variant at each of its shapes on this machine's CPU."""
    return predict(variants, {"cpu": sheet_of_cpu(variants[0].hardware)})


def _prediction(
    variant: Variant,
    plan: Blueprint,
    shape: Shape,
    card: str,
    sheet: Sheet,
    learned: Learned | None,
    torch: tuple[int, int],
) -> Prediction:
    device = device_of(sheet)
    images = shape.batch_size * variant.workload.images_per_prompt
    faults = [
        *faults_of(sheet.name, sheet, variant.number_types),
        builds_of(sheet, torch),
    ]
    prediction = Prediction(
        variant.name,
        card,
        sheet,
        shape,
        images,
        variant.workload.steps,
        footprint(variant, plan, sheet),
        REFUSED,
        warning="; ".join(filter(None, faults)),
    )
    conflicts = variant.conflicts(device)
    software = conflicts[0] if conflicts else software_of(variant, torch)
    if isinstance(software, str):
        return replace(prediction, reason=software)
    reason = _why_untold(variant, sheet, software, torch) or _too_large(prediction)
    if reason:
        return replace(prediction, reason=reason)
    case = case_of_variant(variant, plan, shape, sheet, software)
    if sheet.architecture == CPU:
        return _here(prediction, variant, plan, case)
    return _on_card(prediction, variant, plan, case, learned)


def _why_untold(
    variant: Variant,
    sheet: Sheet,
    software: Software,
    torch: tuple[int, int],
) -> str:
    """Returns why no time can be told of software on a card, or on this CPU; "" if one can."""
    if sheet.architecture == CPU:
        return _why_not_here(software)
    return (
        why_not(sheet)
        or without_kernels(sheet, torch)
        or without_arithmetic(sheet, variant.number_types)
    )


def _too_large(prediction: Prediction) -> str:
    """Returns that a call does not fit at all; "" if it does."""
    if not prediction.is_too_large:
        return ""
    memory = prediction.memory
    at_first = ""
    if memory.quantizing:
        at_first = ", before its weights are quantized (memory=[model_offload] quantizes them in host memory)"
    needs = f"needs at least {memory.floor:.1f} GiB of {prediction.sheet.memory_gib:.1f}{at_first}"
    return f"{needs}: it would spill or run out of memory"


def _on_card(
    prediction: Prediction,
    variant: Variant,
    plan: Blueprint,
    case: Case,
    learned: Learned | None,
) -> Prediction:
    """Adds the time on a card, with its interval."""
    learnt = coefficients()
    table = RateTable.of([case])
    vector = learnt.all if learned is None else learned[0]
    untold = 0.0 if learned else float(table.untold(vector)[0])
    software = case.software
    state = state_of(learnt.cards_of(software), case.sheet)
    caches = isinstance(variant.optimizations.get("caching"), Caching)
    if caches or not _SIZES[0] <= prediction.shape.size <= _SIZES[1]:
        state = EXTRAPOLATED
    # A user is a new publisher, until a measurement of theirs tells of the host.
    common = is_common(learnt, software, family_of(variant.model).title)
    generation = generation_of(case.sheet)
    classes = labels(state, software, generation, learned is not None, common)
    half = half_width(learnt.widths, classes, untold)
    seconds = float(np.exp(table.log_seconds(vector)[0]))
    low, high = seconds * math.exp(-half), seconds * math.exp(half)
    options = variant.optimizations.values()
    least, most = transfer_s(
        options, plan.host_bytes, plan.call_bytes, case.steps, case.sheet
    )
    if most:
        low = max(low, least) if streams(options) else low + least
        high += most
        seconds = math.sqrt(low * high)
    return replace(
        prediction,
        state=state,
        seconds=seconds,
        low=low,
        high=high,
        shares=_shares(case, table.parts(vector)[:, 0], math.sqrt(least * most)),
        evidence=_evidence(prediction.card, case, state, learned),
        price=_price(variant, seconds / prediction.images),
    )


def _torch_here() -> tuple[int, int]:
    return version_of(version("torch"))


def version_of(text: str) -> tuple[int, int]:
    """Returns major and minor version. Raises ValueError if there are none."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def case_of_variant(
    variant: Variant, plan: Blueprint, shape: Shape, sheet: Sheet, software: Software
) -> Case:
    """Returns what the latency model needs to know of a variant's call on a card."""
    decoder = added(plan.decoder, plan.encoding)
    if variant.task.kind != "txt2img" and TinyVae not in map(
        type, variant.optimizations.values()
    ):
        decoder = decoder.times(1 + _ENCODER_SHARE)
    images = shape.batch_size * variant.workload.images_per_prompt
    steps, full = steps_of(variant), plan.decodes_in_float32
    return Case(
        sheet, software, plan.denoiser, decoder, steps, images, decodes_in_float32=full
    )


def _why_not_here(software: Software) -> str:
    if software.compiled:
        return "a compiler's kernels cannot be timed without it: measure, which is quick here"
    # Large products in bfloat16 were twice as fast on a CPU where the whole call gained nothing.
    return (
        ""
        if software.bytes == 4
        else "half types gain in some layers of a CPU only: measure, which is quick here"
    )


def _here(
    prediction: Prediction, variant: Variant, plan: Blueprint, case: Case
) -> Prediction:
    """Adds the time on this machine's CPU, from the rates that it reaches."""
    machine = machine_of(threads_of(variant.hardware))
    texts = (
        sum(gib for name, gib in plan.weights.items() if name in TEXT_ENCODERS)
        * 2**30
        / 4
    )
    prompts = 2 if variant.guidance_scale > 1 else 1
    # The decoder of a transformer's pipeline has the products of its text encoders.
    encoding = 0.0 if plan.is_transformer else 2.0 * texts * _TOKENS * prompts
    parts = machine.rates.parts(case.denoiser, case.decoder, encoding)
    seconds = seconds_of(parts, case.steps)
    return replace(
        prediction,
        state=EXTRAPOLATED,
        seconds=seconds,
        low=seconds * math.exp(-HALF_WIDTH),
        high=seconds * math.exp(HALF_WIDTH),
        shares=_shares(case, parts, 0.0),
        evidence="rates of typical layers, measured here",
        warning=_too_slow(machine.disturbance),
        price=_price(variant, seconds / prediction.images),
    )


def _too_slow(disturbance: str) -> str:
    """Returns that the time told may be too long, if other work made this machine look slower; else ""."""
    if not disturbance:
        return ""
    return f"the time may be too long: {disturbance} while its rates were measured; ask again on an idle machine"


def _shares(case: Case, parts: Any, link: float) -> dict[str, float]:
    """Returns what shares of a call are spent on matrix products, memory, launches, moving weights, and the rest."""
    size = len(PARTS)
    sums = {
        "matrix products": 0.0,
        "memory": 0.0,
        "launches": 0.0,
        "weights from the host": link,
        "fixed": 0.0,
    }
    for start, times in ((0, case.steps), (size, 1)):
        products, memory = (
            parts[start : start + 3].sum(),
            parts[start + 3 : start + 6].sum(),
        )
        device, host = parts[start : start + size - 1].sum(), parts[start + size - 1]
        whole = (device**4 + host**4) ** 0.25
        # What the host adds, and gaps between kernels, are both launches.
        sums["matrix products"] += times * products * min(1.0, device / whole)
        sums["memory"] += times * memory * min(1.0, device / whole)
        sums["launches"] += times * (
            whole - (products + memory) * min(1.0, device / whole)
        )
    sums["fixed"] = float(parts[-2] + parts[-1])
    total = sum(sums.values())
    return {name: float(value / total) for name, value in sums.items() if value > 0}


def _evidence(card: str, case: Case, state: str, learned: Learned | None) -> str:
    """Returns what a prediction rests on."""
    known = coefficients().cards_of(case.software)
    generation = generation_of(case.sheet)
    name = generation.capitalize()
    text = f"no {name} card; others only"
    count = relatives(known, case.sheet)
    if count:
        if generation.startswith("rdna"):
            name = generation.upper()
        text = counted(count, f"{name} card")
        if card in known:
            text += f", {known[card]} figures of this card"
        if state == EXTRAPOLATED:
            text += "; few of such cards, sizes or caches"
    if learned:
        return f"{text}; {learned[1]}"
    if case.software.application == "library" and case.software.age == 3:
        text += "; none with PyTorch since 2.4"
    return text


def _price(variant: Variant, seconds_per_image: float) -> float | None:
    per_hour = variant.hardware.price_per_hour
    return None if per_hour is None else seconds_per_image * 1000 / 3600 * per_hour


def names_of(predictions: Sequence[Prediction]) -> list[str]:
    """Returns what tells predictions apart: the cards, and variants and shapes where there are several."""
    variants = len({prediction.variant for prediction in predictions}) > 1
    shapes = len({prediction.shape for prediction in predictions}) > 1
    names = []
    for prediction in predictions:
        variant = [prediction.variant] if variants else []
        shape = [str(prediction.shape)] if shapes else []
        names.append(" ".join([prediction.card, *variant, *shape]))
    return names


def ranks(predictions: Sequence[Prediction]) -> Iterator[tuple[Prediction, float]]:
    """Yields those with a time, the fastest per image first, each with the probability that it beats the next one.

    Errors of two cards on the same work are partly the same: only what differs between cards counts.
    """
    ordered = sorted(
        (prediction for prediction in predictions if math.isfinite(prediction.seconds)),
        key=lambda prediction: prediction.seconds / prediction.images,
    )
    for prediction, next_one in pairwise(ordered):
        apart = math.log(
            next_one.seconds
            / next_one.images
            / (prediction.seconds / prediction.images)
        )
        # Two variants on one card share its error, and two cards the error of their software.
        shared = 0.85 if prediction.card == next_one.card else 0.3
        spread = math.sqrt(
            (prediction.deviation**2 + next_one.deviation**2) * (1 - shared)
        )
        yield prediction, statistics.NormalDist().cdf(apart / spread)
    yield from ((last, math.nan) for last in ordered[-1:])


def text_of(prediction: Prediction) -> str:
    """Returns a prediction in sentences."""
    card, memory = prediction.sheet.name, prediction.memory
    sentences = []
    if prediction.state == REFUSED:
        sentences.append(f"There is no time for {card}: {prediction.reason}.")
    else:
        interval = Interval(prediction.seconds, prediction.low, prediction.high)
        sentences.append(
            f"One call takes about {seconds_parts(interval)[0]}{_hours_text(prediction.seconds)} on {card}, and four "
            f"in five such calls between {between_text(interval)}."
        )
    total = gib_text(prediction.sheet.memory_gib)
    needs = f"It needs at least {gib_text(memory.floor)}"
    sentences.append(
        f"{needs}, likely {gib_text(memory.likely)}, of {total}: {prediction.fits}."
    )
    if prediction.shares:
        sentences.append(f"The time goes to {shares_text(prediction, 3)}.")
    if prediction.state != REFUSED:
        sentences.append(f"{prediction.state.capitalize()}: {prediction.evidence}.")
    return " ".join(sentences)


def _hours_text(seconds: float) -> str:
    return f" ({seconds / 3600:.1f} h)" if seconds >= _LONG_S else ""


_LONG_S = 3600.0
"""From so many seconds on, a time is told in hours too."""


def between_text(interval: Interval) -> str:
    """Returns the two ends of an interval with its unit, as in `14.9 and 26.2 s`."""
    estimate, bounds = seconds_parts(interval)
    ends = bounds.strip("[]").replace(",", " and")
    return f"{ends} {estimate.rpartition(' ')[2]}"


def shares_text(prediction: Prediction, most: int) -> str:
    """Returns what most of the time is spent on, the largest share first."""
    ordered = sorted(prediction.shares.items(), key=itemgetter(1), reverse=True)
    shares = []
    for name, share in ordered[:most]:
        if share >= _COUNTS:
            shares.append(f"{name} ({100 * share:.0f} %)")
    return ", ".join(shares)


_COUNTS = 0.005
"""The least share of a time that is told: less reads as nothing."""


# ---- from a command line ---------------------------------------------------------------------------------------------

KEYS = {
    "plan.hardware": "the cards, as in 'plan.hardware=[t4,l4,rtx4090]'",
    "plan.measured": "a measured run whose stage times tell of this software and host",
    "plan.torch": "the version of PyTorch there, as in plan.torch=2.3; this machine's if not given",
}
"""Keys of the command itself."""


@kept_generators()
def plan(*overrides: str, config_dir: str | Path | None = None) -> "pd.DataFrame":
    """Predicts seconds and GiB on cards that one does not have: a row per variant, card and shape.

    Args:
        overrides: as of `sdopt plan`: those of a study, `hardware=…` or `plan.hardware=[…]`, and `plan.measured=…`.
        config_dir: a folder with additional configuration groups, like `--config-dir`.

    Raises:
        UsageError: the overrides cannot be composed, or a card is unknown.
    """
    import pandas as pd

    require_texts("plan", overrides)
    predictions, _, _ = plan_of(
        overrides, None if config_dir is None else Path(config_dir)
    )
    return pd.DataFrame([prediction.row() for prediction in predictions])


_BETWEEN_CARDS = re.compile(r",(?!\s*\d+ ?[mg]i?b\b)", re.IGNORECASE)
"""What separates cards; nvidia-smi separates a card's memory from its name so, too: `Tesla T4, 15360 MiB`."""


def plan_of(
    overrides: Sequence[str], config_dir: Path | None = None
) -> tuple[list[Prediction], list[str], str]:
    """Composes a study; returns predictions of its variants, notes on them, and the command that would measure them.

    Raises:
        UsageError: the overrides cannot be composed, or a card is unknown.
    """
    from sdopt.worker.preload import import_all  # what it imports takes seconds

    import_all(
        ("diffusers.models",)
    )  # without what other libraries say of themselves when they are imported
    # Several cards are asked for under either name.
    overrides = [
        re.sub(r"^(?=hardware=.*,)", "plan.", override) for override in overrides
    ]
    of_plan = [
        override for override in overrides if written_key(override).startswith("plan.")
    ]
    rest = [override for override in overrides if override not in of_plan]
    rest = list(with_own_models(rest, options_of("model", config_dir)))
    asked: dict[str, str] = {}
    for override in of_plan:
        key = key_of(override)
        if key not in KEYS:
            raise UsageError(
                f"{key}: unknown key; {', '.join(f'{name} is {what}' for name, what in KEYS.items())}"
            )
        # A version is as written: 2.10 is not 2.1.
        asked[key] = override.partition("=")[2].strip("'\"")
    names = [
        name
        for word in _BETWEEN_CARDS.split(asked.get("plan.hardware", "").strip("[]"))
        if (name := word.strip(" '\""))
    ]
    if names and (
        others := [override for override in rest if key_of(override) == "hardware"]
    ):
        raise UsageError(
            f"{others[0]}: plan.hardware names the cards; leave one of the two out"
        )
    written = asked.get("plan.torch")
    learned: Learned | None = None
    try:
        torch = version_of(written) if written else None
    except ValueError:
        raise UsageError(
            f"plan.torch={written}: is no version; write it as in plan.torch=2.3"
        ) from None
    if "plan.measured" in asked:
        if torch:
            raise UsageError(
                "plan.torch: the run of plan.measured has a PyTorch of its own; leave one of the two out"
            )
        torch, learned = _learned(Path(asked["plan.measured"]))
    if names:
        cards, on_names = asked_for(names)
    else:
        rest, (cards, on_names) = with_known_card(rest, config_dir)
    with composer_of(rest, config_dir) as composer:
        variants, left_out = _variants(composer, rest)
        predictions = predict(
            variants, sheets_for(composer, cards, rest), learned, torch
        )
        notes = [
            *on_names,
            *left_out,
            *_notes(composer, predictions, learned, torch),
        ]
        compared = _is_compared(composer, predictions, rest)
    own_groups = () if config_dir is None else ("--config-dir", config_dir)
    command = command_line("run", *own_groups, *rest, "protocol.replicates=3")
    if not compared:
        # As it was written: the overrides quote a path.
        models = [word for word in overrides if key_of(word) == "model"]
        others = [word for word in rest if key_of(word) != "model"]
        model = models[-1].partition("=")[2].strip("'\"") if models else "emoji"
        command = command_line("optimize", model, *own_groups, *others)
        notes.append(
            "sdopt run would begin with a baseline that does not fit; sdopt optimize begins with what is named here"
        )
    return predictions, notes, command


def _is_compared(
    composer: HydraComposer, predictions: Sequence[Prediction], overrides: Sequence[str]
) -> bool:
    """Returns whether `sdopt run` can measure its baseline on a card that what is asked for fits; the study's own may."""
    fitting = [prediction for prediction in predictions if not prediction.is_too_large]
    if _names_study(overrides) or not fitting:
        return True
    baseline, shape = composer.variant(BASELINE, plain=True), fitting[0].shape
    planned = blueprint(baseline, shape)
    for prediction in fitting:
        needed = footprint(baseline, planned, prediction.sheet)
        if needed.verdict(prediction.sheet.memory_gib) != "does not fit":
            return True
    return False


def _notes(
    composer: HydraComposer,
    predictions: Sequence[Prediction],
    learned: Learned | None,
    torch: tuple[int, int] | None,
) -> list[str]:
    """Returns known faults of the cards, and what would fit where something does not."""
    warnings: dict[str, None] = {}
    for prediction in predictions:
        named = f"{prediction.card}, {prediction.variant}"
        if prediction.sheet.architecture == CPU:
            named = prediction.card  # its rates are those of all variants
        if prediction.warning:
            warnings[f"{named}: {prediction.warning}"] = None
    notes = [*warnings]
    for prediction in predictions:
        if prediction.sheet.architecture != CPU and prediction.memory.fills(
            prediction.sheet.memory_gib
        ):
            notes.append(f"{prediction.card}, {prediction.variant}: takes {ONLY_ALONE}")
    counted: Needed = {}
    hardest: dict[str, Prediction] = {}
    for prediction in sorted(
        predictions, key=lambda prediction: prediction.memory.floor
    ):
        if prediction.is_too_large:
            hardest[prediction.card] = prediction
    for prediction in hardest.values():
        ways = what_fits(composer, prediction.sheet, prediction.shape, counted)
        ways = _timed(ways, prediction, counted, learned, torch)
        notes.append(f"what fits {prediction.card}: {ways}" if str(ways) else "")
    return [note for note in notes if note]


def _timed(
    ways: WaysToFit,
    of: Prediction,
    counted: Needed,
    learned: Learned | None,
    torch: tuple[int, int] | None,
) -> WaysToFit:
    """Returns ways to fit into the card of a prediction with the time of a call, where one is told."""

    def timed(way: Way | None) -> Way | None:
        known = counted.get(way.choices) if way else None
        if way is None or known is None:
            return way
        there = torch or _torch_here()
        told = _prediction(*known, of.shape, of.card, of.sheet, learned, there)
        if told.state == REFUSED:
            return way
        return replace(way, time=Interval(told.seconds, told.low, told.high))

    return WaysToFit(timed(ways.whole), timed(ways.packed), timed(ways.roomy))


def _variants(
    composer: HydraComposer, overrides: Sequence[str]
) -> tuple[list[Variant], list[str]]:
    """Returns the variants of the study, and what none of them has, if one is asked for; else the one composed."""
    if not _names_study(overrides):
        return [composer.variant(None)], []
    study = composer.current.study
    planned = study.plan(composer)
    return list(planned.variants), unused_options(
        study, planned, composer.chosen(), composer.changed
    )


def _names_study(overrides: Sequence[str]) -> bool:
    groups = {key_of(override).split(".")[0] for override in overrides}
    return not groups.isdisjoint(("study", "experiment"))


def _learned(folder: Path) -> tuple[tuple[int, int], Learned]:
    """Returns the PyTorch of a measured run, and what its baseline tells of software and host. Raises UsageError."""
    result = read_result(folder)
    row = result.baseline_variant
    device = str(result.environment.device["name"])
    memory_gib = result.environment.device.get("memory_total_gib")
    sheet = sheet_of(device, data_sheets().values(), memory_gib)
    if sheet is None:
        raise UsageError(
            f"plan.measured={folder}: was measured on {device}, for which there is no data sheet"
        )
    measured = [
        process for process in row.measurements if process.stages_s.get("denoiser_step")
    ]
    calls = list(chain.from_iterable(row.samples.values()))
    if not measured or not calls:
        raise UsageError(
            f"plan.measured={folder}: has no stage times; measure with protocol.stage_calls=1 or more"
        )
    with composer_of(list(row.overrides)) as measured_composer:
        variant = measured_composer.variant(None)
    torch = version_of(result.environment.packages.get("torch", "0.0"))
    software = software_of(variant, torch)
    if isinstance(software, str):
        raise UsageError(f"plan.measured={folder}: {software}")
    shape = variant.shapes[0]
    case = case_of_variant(variant, blueprint(variant, shape), shape, sheet, software)
    stages = {}
    for name in ("denoiser_step", "vae_decoder"):
        times: list[float] = []
        for process in measured:
            times += process.stages_s.get(name, [])
        stages[name] = statistics.median(times or [math.nan])
    source = f"stages of {os.fspath(folder)}"
    return torch, learn(
        case, stages, statistics.median(calls), coefficients().all, source
    )


_TRUST = 0.5
"""How much of a component's residual is taken over: a stage's time holds the card's error too."""


def learn(
    case: Case,
    stages: Mapping[str, float],
    call: float,
    coefficients: Array,
    source: str,
) -> Learned:
    """Changes coefficients by what a measured call says of the host and the software, and of the card nothing.

    One ratio over everything would carry the card's own factor to other cards, and makes predictions worse.
    """
    table = RateTable.of([case])
    parts = table.parts(coefficients)
    _, (expected,), (decoding,) = table.sums(parts)
    step, decoder = stages["denoiser_step"], stages["vae_decoder"]
    changes: dict[str, float] = {}
    words = []
    if step > 0:
        # Bound by launches it tells of the host's own speed, else of the software.
        bound = parts[len(PARTS) - 1, 0] > parts[: len(PARTS) - 1, 0].sum()
        change = _TRUST * math.log(step / expected)
        changes[
            f"launch_{case.software.launcher}"
            if bound
            else f"class_{case.software.name}"
        ] = change
        words.append(f"{'launches' if bound else 'software'} {math.exp(change):.2f}×")
    if step > 0 and decoder > 0:
        changes["decoder"] = -_TRUST * (
            math.log(decoder / decoding) - math.log(step / expected)
        )
        words.append(f"VAE {math.exp(-changes['decoder']):.2f}×")
    rest = call - step * case.steps - decoder
    if rest > 0:
        changes[f"fixed_{case.software.fixed}"] = math.log(
            max(rest, 1e-3) / float(parts[-2, 0])
        )
        words.append(f"fixed part {rest:.2f} s")
    vector = coefficients.copy()
    for name, change in changes.items():
        vector[NAMES.index(name)] += change
    return vector, f"with {source}: {', '.join(words) or 'nothing to learn'}"
