"""Applies one rule of a gate to one comparison at one shape: where its limit comes from, and what it tests."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from sdopt.contract import Contract, weakest
from sdopt.gate.calibration import FROM_FOLDERS, Fit, how_to_calibrate
from sdopt.gate.comparability import comparable
from sdopt.gate.rulings import (
    UnjudgedError,
    against,
    find_scores,
    percent,
    precision_of,
    require_finite,
    ruled,
    unjudged,
)
from sdopt.quality.metrics import family_of
from sdopt.record.records import Promise, VariantResult
from sdopt.record.scores import Score, Spread
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.schema import Gate, Protocol, Rule
from sdopt.statistics.bounds import Bounds, subtract
from sdopt.statistics.break_even import first_image_s
from sdopt.statistics.giving_up import bound_text
from sdopt.statistics.measures import (
    FIRST_IMAGE,
    MEASURES,
    MEMORY_RATIO,
    RULED,
    SPEEDUP,
    Measure,
    smallest_change,
    with_shape,
)
from sdopt.statistics.ratios import LogRatio, exceeds


@dataclass(frozen=True)
class RuleContext:
    """Both sides of a comparison at one shape, and the data that rules need.

    Attributes:
        candidate: the variant to judge.
        reference: the variant to compare it with.
        paired: distances between the images of both, pair by pair.
        fit: the model's calibration, for limits and margins that are shares of its spread.
        ratio: returns a measure in `RULED` with its error; None if it was not measured.
        floor: returns the ratio by which two identical baselines differed in a measure; None if it is not known.
        disturbed: what disturbed the times; "" if nothing did.
        trust: rulings on whether the measurements can be believed; only the first shape has them.
        shape: the shape's name if the study has several; "" if it has one.
        floors: by metric, how far the baseline's images move when it computes in another order.
        sees_calls: whether sdopt made the calls, and saw what they did.
        memory_growth: the factor by which memory may grow without harm on this GPU.
        protocol: says which changes of speed and memory are too small to count.
        slower: how many times as long as the baseline's its calls take at least, if its timing ended early for that.
        same_images: whether every image of the candidate is the same file as the reference's.
        steps_left_out: whether a budget left no time for the calls that count the denoiser's steps.
        places: keys of files that may lie elsewhere, because their contents were compared.
    """

    candidate: VariantResult
    reference: VariantResult
    paired: Mapping[str, Score]
    fit: Fit
    ratio: Callable[[str], LogRatio | None]
    floor: Callable[[str], float | None]
    disturbed: str = ""
    trust: tuple[Ruling, ...] = ()
    shape: str = ""
    floors: Mapping[str, Spread] = field(default_factory=dict)
    sees_calls: bool = True
    memory_growth: float = 1.0
    protocol: Protocol = field(default_factory=Protocol)
    slower: float | None = None
    same_images: bool = False
    steps_left_out: bool = False
    places: Collection[str] = ()

    @property
    def promises(self) -> list[Promise]:
        """The promises of both sides' options, on the axes where the two sides differ."""
        return [
            *self.candidate.promises_beside(self.reference),
            *self.reference.promises_beside(self.candidate),
        ]

    @property
    def contract(self) -> Contract:
        """The weakest contract among `promises`; different work, such as another scheduler, is `lossy`."""
        lossy = self.candidate.contract is Contract.LOSSY
        reference_lossy = self.reference.contract is Contract.LOSSY
        if lossy != reference_lossy:
            return Contract.LOSSY
        contracts = [promise.contract for promise in self.promises]
        return weakest(contracts, default=self.candidate.contract)

    @property
    def claimed(self) -> list[str]:
        """The measures in which the candidate's options claim a gain that the reference does not have."""
        claims: set[str] = set()
        for promise in self.candidate.promises_beside(self.reference):
            claims.update(promise.claims)
        return [name for name, measure in MEASURES.items() if measure.claim in claims]

    @property
    def comparable(self) -> bool:
        """Whether the two can be compared at all."""
        return not comparable(self.candidate, self.reference, self.places)

    def apply(self, rule: Rule, gate: Gate) -> Ruling:
        """Applies one rule.

        Most rules pass if the whole one-sided interval is on the right side of the limit, fail if it is on the wrong
        side, and are inconclusive in between (`rulings.against`); `exact` and `every` fail by a single prompt. A rule
        on a ratio fails only if the harm also exceeds the A/A floor, and is inconclusive on disturbed times.

        The limit is the rule's own, in `conf/gate/`:
        - of a ratio, a limit against harm is widened to the smallest change that counts (`protocol.smallest_speedup`,
          `protocol.smallest_memory`, `protocol.smallest_memory_mib`), and of memory to
          `gate.spare_memory` (`_performance`);
        - of images, it may be one for each number type of the reference (`limits`), or a share of the calibrated
          spread (`of_seeds`, `deviations`): of the file `gate.calibration`, or that which sdopt ships for the model
          (`_limit`). `of_floor` lowers it to a multiple of what rounding alone changes (`_tied`).
        """
        try:
            if rule.metric in RULED:
                return self._performance(rule, gate)
            if rule.metric == FIRST_IMAGE:
                return self._first_image(rule)
            if self.same_images and self._shows_no_difference(rule):
                reason = f"all {len(self.candidate.images)} images are the same files"
                return Ruling(rule.test, rule.metric, Verdict.PASS, reason)
            return self._despite_files(self._of_images(rule))
        except UnjudgedError as lacking:
            return unjudged(rule.test, lacking.reason, lacking.metric)

    # Speed and memory.

    def _performance(self, rule: Rule, gate: Gate) -> Ruling:
        """Applies a rule to the speed-up, the slowest calls or the memory ratio.

        A limit against harm always tolerates a harm too small to count. The rule fails only if the harm also exceeds
        the A/A floor, and is inconclusive on times that were disturbed.
        """
        measure = RULED[rule.metric]
        name = with_shape(rule.metric, self.shape)
        log_ratio = self.ratio(rule.metric)
        if log_ratio is None and self.slower is not None and measure is SPEEDUP:
            return self.too_slow(gate, self.contract)
        if log_ratio is None:
            raise UnjudgedError(name, f"{rule.metric} was not measured")
        bounds = _bounds_of_ratio(log_ratio, rule.confidence)
        limit = self._tolerant_limit(rule, measure)
        ruling = against(rule, name, bounds, limit, rule.how.side == "least")
        floor = self.floor(rule.metric)
        within_floor = floor is None or not exceeds(bounds.estimate, floor)
        if ruling.verdict is Verdict.FAIL and within_floor:
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.doubt = f"two equal processes differed by {percent(floor)}"
        is_time = measure is not MEMORY_RATIO
        if is_time and self.disturbed and ruling.verdict is not Verdict.INCONCLUSIVE:
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.doubt = self.disturbed
        return ruling

    def _tolerant_limit(self, rule: Rule, measure: Measure) -> float:
        """Returns the limit on a ratio; one against harm is widened to the smallest change that counts."""
        limit = rule.limit
        assert limit is not None
        smallest, _ = smallest_change(measure, self.protocol, self.reference)
        at_least = rule.how.side == "least"
        if at_least and measure.higher_is_better and limit <= 1:
            return min(limit, 1 / smallest)
        if at_least or measure.higher_is_better or limit < 1:
            return limit
        growth = self.memory_growth if measure is MEMORY_RATIO else 1.0
        return max(limit, smallest, growth)

    def too_slow(self, gate: Gate, contract: Contract) -> Ruling:
        """Rules on a candidate whose timing ended early: it fails if a rule or a claim asks for speed."""
        if self.slower is None:
            reason = f"it was not timed to the end: {self.candidate.reason}"
            return unjudged("status", reason)
        reason = f"slower, at least {bound_text(self.slower)}"
        fails = gate.must_pay and SPEEDUP.name in self.claimed
        for rule in gate.rules.get(contract, []):
            if rule.metric == SPEEDUP.name and rule.limit is not None:
                fails = fails or rule.limit > 1 / self.slower
        if fails:
            name = with_shape(SPEEDUP.name, self.shape)
            return Ruling("speed", name, Verdict.FAIL, reason)
        return unjudged(
            "status", f"{reason}, and not timed to the end (protocol.give_up)"
        )

    def _first_image(self, rule: Rule) -> Ruling:
        """Applies a limit to the seconds until the first image of the first process, which alone starts by itself."""
        seconds = first_image_s(self.candidate)
        limit = rule.limit
        if seconds is None:
            raise UnjudgedError(rule.metric, f"{rule.metric} was not measured")
        assert limit is not None
        verdict = Verdict.PASS if seconds <= limit else Verdict.FAIL
        reason = f"{seconds:.3g} s from loading to the first image, and the limit is {limit:.4g} s"
        return Ruling(
            rule.test,
            rule.metric,
            verdict,
            reason,
            estimate=seconds,
            margin=limit,
        )

    # Images.

    def _shows_no_difference(self, rule: Rule) -> bool:
        """Returns whether a rule is on differences that images in the same files cannot have; latents may have some."""
        if rule.metric == "latents_error":
            score = self.paired.get(rule.metric)
            errors = score.per_prompt if score else []
            return bool(errors) and all(error == 0 for error in errors)
        is_change = rule.how.figure == "change"
        return is_change or family_of(rule.metric).needs_pair

    def _of_images(self, rule: Rule) -> Ruling:
        """Applies a rule on a quality metric; with too few images for that metric, the rule stays unjudged."""
        name, score = self._score(rule.metric)
        if rule.how.figure == "change":
            score = self._difference(name, score)
        try:
            limit = self._limit(rule, name) if rule.how.takes else 0.0
        except UnjudgedError:
            if not self._same_pixels:
                raise
            limit = (
                rule.least
            )  # without a difference, every limit gives the same ruling
        if rule.of_floor is not None:
            limit = self._tied(rule, name, limit, rule.of_floor)
        return ruled(rule, name, score, limit)

    @property
    def _same_pixels(self) -> bool:
        """Whether no pixel of any image differs from the reference's."""
        score = self.paired.get("mse")
        errors = score.per_prompt if score else []
        return bool(errors) and not any(errors)

    def _score(self, metric: str) -> tuple[str, Score]:
        """Returns the score that a rule means, with its name. Raises UnjudgedError."""
        least = family_of(metric).decides_from
        if len(self.candidate.images) < least:
            raise UnjudgedError(metric, f"{metric} needs at least {least:,} images")
        scores = find_scores({**self.candidate.quality, **self.paired}, metric)
        if not scores:
            raise UnjudgedError(metric, f"{metric} was not measured")
        if len(scores) > 1:
            raise UnjudgedError(metric, f"{metric} is ambiguous: {', '.join(scores)}")
        [(name, score)] = scores.items()
        require_finite(name, score)
        return name, score

    def _despite_files(self, ruling: Ruling) -> Ruling:
        """Leaves a failure open that the file formats of imported images may explain."""
        apart = self.candidate.files_apart(self.reference)
        if apart and ruling.verdict is Verdict.FAIL:
            ruling.verdict = Verdict.INCONCLUSIVE
            ruling.doubt = f"{apart}: what a format loses counts as a difference"
        return ruling

    def _tied(self, rule: Rule, name: str, limit: float, times: float) -> float:
        """Lowers a limit to `times` the numerical floor (the baseline computed in another order)."""
        precision = self.candidate.choices.get("precision")
        if precision != self.reference.choices.get("precision"):
            return limit
        floor = self.floors.get(name)
        if floor is None:
            why = "was not measured: see the reason of the repeated baseline"
            if self.floors:
                why = "has no such score"
            raise UnjudgedError(
                name,
                "how much the baseline's images change when it computes in another order "
                f"{why}, and the limit follows it; measure again, or leave out of_floor",
            )
        return min(limit, max(times * floor.mean, rule.least))

    def _difference(self, name: str, score: Score) -> Score:
        """Returns candidate − reference, signed so that more is better. Raises UnjudgedError."""
        reference = self.reference.quality.get(name)
        if reference is None:
            raise UnjudgedError(name, f"the reference has no {name}")
        require_finite(name, reference)
        same_prompts = len(score.per_prompt) == len(reference.per_prompt)
        if not same_prompts or len(score.leave_one_out) != len(reference.leave_one_out):
            reason = (
                f"{name} was measured on different prompts for candidate and reference"
            )
            raise UnjudgedError(name, reason)
        better = 1.0 if family_of(name).higher_is_better else -1.0
        return subtract(score, reference, better)

    def _limit(self, rule: Rule, name: str) -> float:
        """Returns the rule's own limit or margin, or a share of the calibrated spread. Raises UnjudgedError."""
        if rule.limits:
            return self._limit_by_type(rule, name)
        limit = rule.margin if rule.limit is None else rule.limit
        if limit is not None:
            return limit
        calibration = self.fit.calibration
        spread = calibration.metrics.get(name) if calibration else None
        if spread is None:
            reason = f"{self._uncalibrated()}, or give the rule a limit or margin"
            raise UnjudgedError(name, reason)
        if rule.deviations is not None:
            return max(rule.deviations * spread.deviation, rule.least)
        assert rule.of_seeds is not None
        return max(rule.of_seeds * spread.mean, rule.least)

    def _limit_by_type(self, rule: Rule, name: str) -> float:
        number_type = precision_of(self.reference)
        if number_type is None:
            raise UnjudgedError(
                name,
                "the rule has a limit for each precision, and that of the reference is not known: "
                "name it (sdopt judge --precision float32)",
            )
        return rule.limits[number_type]

    def _uncalibrated(self) -> str:
        """Returns why there is no calibration, and how to make one."""
        if self.fit.refusal:
            return self.fit.refusal
        config = self.candidate.config
        how = how_to_calibrate(config) if self.sees_calls else FROM_FOLDERS
        return f"no calibration for {config.model.name}: {how}"


def _bounds_of_ratio(log_ratio: LogRatio, confidence: float | None) -> Bounds:
    """Returns a ratio with one-sided bounds at a confidence; without a confidence, both bounds are the estimate."""
    interval = log_ratio.interval(2 * (confidence or 0.95) - 1)
    low = interval.low
    high = interval.high
    if not confidence:
        low = high = interval.estimate
    return Bounds(
        interval.estimate,
        low,
        high,
        math.nan,
        interval.n,
        interval.unit,
    )
