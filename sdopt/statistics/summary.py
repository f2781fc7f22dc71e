"""Sums up a study once: a row for each variant with its verdicts, best first, and the answer in one sentence.

The terminal, Markdown, plots, the page, trackers, sweeps and CI all show this summary, so that they cannot disagree.
Variants are ranked by their gain over the study's baseline; what a variant gains on top of another one is a `Step`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sdopt.record.choices import difference
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.record.verdicts import Verdict
from sdopt.statistics.figures import Figures, Ratio, figures_by_variant, figures_of
from sdopt.statistics.giving_up import bound_text
from sdopt.statistics.measures import MEMORY_RATIO, SPEEDUP, measure_named, with_shape
from sdopt.statistics.ratios import MINIMUM_PROCESSES
from sdopt.statistics.reasons import UNDISTURBED, reasons_of
from sdopt.statistics.scale import Decision, Images, Speed, decision_of, images_of, speed_of, speed_over, worst_of
from sdopt.statistics.words import change_text, shortened, times_text, unit_text

PSNR = "psnr_db"
"""The metric of image pairs that is read first, where it was measured."""

REPEATS = "it changes nothing: its reference has the same configuration"
"""The reason for a variant that is identical to its reference, such as `precision=fp32` beside the default."""


@dataclass(frozen=True)
class Step:
    """What a variant gains on top of another one than the baseline.

    Attributes:
        reference: the other variant.
        left_out: whether the variant leaves this option of its reference out, as in `study=leave_one_out`.
        figures: the figures of the comparison.
        speed: what the speed-up shows.
    """

    reference: str
    left_out: bool
    figures: Figures
    speed: Speed | None

    @property
    def text(self) -> str:
        """The step in words, as in `2.30× [1.88, 2.81] on top of fp16`; "" without a speed-up."""
        ratio = self.figures.speedup
        if ratio is None:
            return ""
        beside = "beside" if self.left_out else "on top of"
        return f"{ratio.text}{unit_text(self.figures.per_image)} {beside} {self.reference}"


@dataclass(frozen=True)
class Row:
    """One variant of a study, compared with its baseline.

    Attributes:
        figures: the variant's figures, with those of its first comparison.
        option: the options that it adds to the baseline, as in `precision=bf16`; its name if none is known.
        is_baseline: whether it is the study's baseline.
        speed: what its speed-up over the baseline shows; None without one.
        images: what is known of its images; None for the baseline, and where nothing was measured.
        decision: the gate's verdict on its comparisons, the worst one; None if none judged.
        because: why it does not pay, in a few words; "" if it does.
        pays: whether it is shown to gain speed or memory, and neither the gate nor its evidence speaks against it.
        steps: its comparisons with other variants than the baseline.
    """

    figures: Figures
    option: str
    is_baseline: bool
    speed: Speed | None = None
    images: Images | None = None
    decision: Decision | None = None
    because: str = ""
    pays: bool = False
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        verdicts = [str(self.speed or self.status), *([f"images {self.images}"] if self.images else [])]
        verdicts += [str(self.decision)] if self.decision else []
        if self.speedup is not None:
            verdicts.insert(0, f"{self.speedup.text}{unit_text(self.figures.per_image)}")
        told = f"{self.name}: {', '.join(verdicts)}"
        return f"{told} ({self.because})" if self.because else told

    @property
    def name(self) -> str:
        """The variant's name."""
        return self.figures.variant.name

    @property
    def variant(self) -> VariantResult:
        """What was recorded of the variant."""
        return self.figures.variant

    @property
    def command(self) -> str:
        """The `sdopt run` command that measures it again; "" if none is known to."""
        return self.variant.command

    @property
    def lines(self) -> tuple[str, ...]:
        """Code that turns it on in a program that has a pipeline `pipe` of diffusers; () if none is known to."""
        program = self.variant.program
        return tuple(program.lines) if program and program.draws else ()

    @property
    def status(self) -> Status:
        """How it was measured."""
        return self.figures.variant.status

    @property
    def speedup(self) -> Ratio | None:
        """Its speed-up over the baseline, at the main shape; None where it was not timed."""
        return self.figures.overall.get(SPEEDUP.name) if self.status.timed else None

    @property
    def at_least_slower(self) -> float | None:
        """How many times as long as the baseline's its calls take at least, if its timing ended early for that."""
        return self.figures.at_least_slower

    @property
    def memory(self) -> Ratio | None:
        """Its memory over that of the baseline, at the main shape; None where it was not measured."""
        return self.figures.overall.get(MEMORY_RATIO.name) if self.status.timed else None

    @property
    def recommended(self) -> bool:
        """Whether it pays, and is not slower than the baseline: that would be a trade."""
        return self.pays and self.speed is not Speed.SLOWER

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Its speed-up and memory at each shape, by name (`speedup/512x512b1` if there are several shapes)."""
        return {
            with_shape(name, at.shape.name if self.figures.further else ""): ratio
            for at in self.figures.shapes
            for name, ratio in at.overall.items()
            if ratio.measure.claim
        }

    @property
    def speeds(self) -> list[Speed]:
        """What the speed-up at each shape shows."""
        gains = self._gains
        return [speed_of(ratio, name in gains) for name, ratio in self.ratios.items() if measure_named(name) is SPEEDUP]

    @property
    def gains(self) -> list[str]:
        """The names of the ratios that show a gain."""
        return [name for name, ratio in self.ratios.items() if ratio.gain > 0 or name in self._gains]

    @property
    def _gains(self) -> Sequence[str]:
        judged = self.figures.judgement
        return () if judged is None or self.figures.is_step else judged.gains

    @property
    def distance(self) -> tuple[str, str]:
        """The metric of image pairs that is read first, and its figure; "" twice where there is none."""
        comparison = self.figures.comparison
        if comparison is None or not comparison.quality or self.figures.is_step:
            return "", ""
        metric = PSNR if PSNR in comparison.quality else next(iter(comparison.quality))
        estimate = comparison.quality[metric].estimate
        return metric, "equal" if estimate is None else f"{estimate:.3g}"


@dataclass(frozen=True, repr=False, eq=False)
class Summary:
    """A study, summed up.

    Attributes:
        result: the study.
        figures: all figures: the baseline, then one for each comparison, and for each variant without one.
        rows: a row for each variant but the repeated baseline, best first; those without a figure come last.
        best: the row that is recommended; None if none is.
        sentence: the answer.
        notes: what the verdicts follow from, and how to have the images judged.
    """

    result: StudyResult
    figures: tuple[Figures, ...]
    rows: tuple[Row, ...]
    best: Row | None
    sentence: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        """Returns the answer and a line for each variant, as a program prints them."""
        return "\n".join([self.sentence, *(f"  {row}" for row in self.candidates)])

    @property
    def candidates(self) -> list[Row]:
        """The rows but the baseline's."""
        return [row for row in self.rows if not row.is_baseline]

    @property
    def first(self) -> dict[str, Figures]:
        """The first figures of each variant, by its name, in the order of the variants."""
        return figures_by_variant(self.result, self.figures)

    def row(self, variant: str) -> Row | None:
        """Returns the row of a variant; None for the repeated baseline."""
        return next((row for row in self.rows if row.name == variant), None)


def summary_of(result: StudyResult) -> Summary:
    """Sums up a study."""
    figures = figures_of(result)
    rows = [
        _row(result, [row for row in figures if row.variant is variant])
        for variant in result.variants
        if not variant.is_control
    ]
    known = {row.name: row for row in rows}
    rows = sorted((_with_chain(row, known) for row in rows), key=rank_of)
    best = next((row for row in rows if row.recommended), None)
    sentence = f"{_reservations(result)}{_sentence(rows, best)}"
    notes = [*_budget_notes(result, rows), *_notes(result)]
    return Summary(result, tuple(figures), tuple(rows), best, sentence, tuple(notes))


def rank_of(row: Row) -> tuple[bool, float]:
    """Returns the order of rows: the largest speed-up over the baseline first, and what has none last."""
    if row.is_baseline:
        return row.figures.latency is None, -1.0
    if row.at_least_slower is not None:
        return False, -1 / row.at_least_slower
    return row.speedup is None, -(row.speedup.interval.estimate if row.speedup else 0.0)


def _row(result: StudyResult, figures: Sequence[Figures]) -> Row:
    """Returns the row of a variant from its figures, one for each of its comparisons."""
    variant = figures[0].variant
    # The comparison with the baseline comes first, where there is one.
    figures = sorted(figures, key=lambda one: one.reference not in ("", result.baseline))
    if variant.name == result.baseline:
        return Row(figures[0], variant.name, is_baseline=True)
    steps = [_step(result, one) for one in figures if one.reference not in ("", result.baseline)]
    first = figures[0]
    direct = first if first.reference == result.baseline else None
    credit = direct.comparison.credit if direct and direct.comparison else ""
    row = Row(
        figures=first,
        option=credit if credit not in ("", "nothing") else variant.name,
        is_baseline=False,
        images=worst_of(map(images_of, figures)) if variant.status in (Status.OK, Status.NOT_ENGAGED) else None,
        decision=worst_of(decision_of(one.judgement.verdict) for one in figures if one.judgement),
        steps=tuple(steps),
    )
    if variant.given_up:
        row = replace(row, speed=Speed.SLOWER)
    elif variant.status.measured:
        row = replace(row, speed=speed_over(row.speeds))
    because = next(filter(None, _objections(result, row, direct)), "")
    return replace(row, because=because, pays=not because)


def _step(result: StudyResult, figures: Figures) -> Step:
    reference, baseline = result.variant(figures.reference), result.variant(result.baseline)
    speeds = [speed_of(at.speedup) for at in figures.shapes if at.speedup]
    mine, plain = figures.variant.choices, baseline.choices
    axes = difference(mine, reference.choices)
    return Step(
        reference=figures.reference,
        left_out=bool(axes) and all(mine.get(axis) == plain.get(axis) for axis in axes),
        figures=figures,
        speed=speed_over(speeds) if figures.variant.status.measured else None,
    )


def _with_chain(row: Row, known: dict[str, Row]) -> Row:
    """Returns a row that is no better than the steps that it is built on: their images and verdicts are its own too."""
    images, seen, step = [row.images] if row.images else [], {row.name}, next(iter(row.steps), None)
    if not row.figures.is_step:
        return row
    while step is not None and step.reference not in seen and not step.left_out:
        seen.add(step.reference)
        below = known[step.reference]
        images += [below.images] if below.images else []
        if below.decision is Decision.FAIL and row.pays:
            row = replace(row, pays=False, because=f"{below.name}, on which it is built, fails the gate")
        step = next(iter(below.steps), None) if below.figures.is_step else None
    return replace(row, images=worst_of(images))


# -------------------------------------------------------------------------------------------------------- objections


def _objections(result: StudyResult, row: Row, direct: Figures | None) -> Iterator[str]:
    """Yields why a variant does not pay, each "" if that does not speak against it; the first one that does counts."""
    variant, baseline = row.variant, result.variant(result.baseline)
    reference = result.variant(row.figures.reference or result.baseline)
    judged = [one.judgement for one in (direct, *(step.figures for step in row.steps)) if one and one.judgement]
    if variant.status in (Status.SKIPPED, Status.PENDING, Status.INTERRUPTED):
        yield variant.reason or str(variant.status)
    yield broken_because(variant)
    yield "" if baseline.status is Status.OK else f"the baseline has the status {baseline.status}"
    if (variant.choices, variant.config) == (reference.choices, reference.config):
        yield REPEATS
    if work := variant.other_work(baseline):
        yield f"not the same work: {', '.join(work)}"
    # What a gate says of leaving an option out says nothing of the variant as a whole.
    if not any(step.left_out for step in row.steps):
        refused = [judgement for judgement in judged if judgement.verdict is not Verdict.PASS]
        reasons = [reason for judgement in refused for reason in reasons_of(judgement, result)]
        yield "; ".join(dict.fromkeys(reasons))
    if not row.gains:
        if row.at_least_slower is not None:
            yield f"slower, at least {bound_text(row.at_least_slower)}"
        if row.speed is Speed.FEW and result.budget is not None and row.name in result.budget.processes:
            yield "no interval: protocol.budget_s left no time for more processes"
        yield _why_open(row.speedup, result.is_imported) if row.speed is not Speed.SLOWER else "slower"
    claims = any(promise.claims for promise in variant.promises_beside(reference))
    if not judged and claims and all(measure_named(name) is SPEEDUP for name in row.gains):
        yield "" if changes_of(result, variant, reference) else "sdopt's own trace shows no change that explains it"


def _wires(variant: VariantResult) -> str:
    return ", ".join(dict.fromkeys(trip.wire for trip in variant.trips))


def broken_because(variant: VariantResult) -> str:
    """Returns why a variant that ran is broken: it failed, had no effect, or its images are broken; "" if it is not."""
    if variant.status in (Status.SKIPPED, Status.PENDING, Status.INTERRUPTED):
        return ""
    if variant.status is Status.NOT_ENGAGED:
        return f"no evidence that it took effect: {variant.reason}"
    if variant.status not in (Status.OK, Status.SLOWER):
        return f"{variant.status}: {variant.reason}"
    if variant.trips:
        share = f"{variant.broken_images} of {len(variant.images)} images" if variant.images else "images"
        return f"{share} are broken: {_wires(variant)}"
    return ""


def _why_open(ratio: Ratio | None, imported: bool) -> str:
    """Returns why a speed-up shows no gain; of `imported` times, in the words of their table."""
    if ratio is None:
        return "it was not timed"
    low, high = ratio.gain_bounds
    if low is None or high is None:
        needed = f"times of {MINIMUM_PROCESSES} replicates" if imported else f"protocol.replicates={MINIMUM_PROCESSES}"
        return f"no interval, which needs {needed} or more"
    if ratio.floor is None:
        return "no repeated baseline to compare it with"
    if ratio.within_floor:
        return f"two identical baselines differed by as much ({100 * (ratio.floor - 1):.1f} %)"
    if 1 / ratio.smallest < low and high < ratio.smallest:
        return f"too small to count ({ratio.key})"
    more = "replicates" if imported else "processes (protocol.replicates)"
    return f"its interval includes changes too small to count; more {more} would narrow it"


# ---------------------------------------------------------------------------------------------------------- sentence


def _sentence(rows: Sequence[Row], best: Row | None) -> str:
    candidates = sorted((row for row in rows if not row.is_baseline), key=lambda row: row.speed is None)
    baseline = next((row for row in rows if row.is_baseline), None)
    if not candidates:
        return "Nothing was compared with the baseline."
    if best is not None:
        return f"{described(best, baseline)}."
    gain = next((row for row in candidates if row.speed is Speed.FASTER and row.decision is Decision.UNDECIDED), None)
    return unconfirmed(gain, baseline) if gain is not None else _nothing_better(candidates, baseline)


def _nothing_better(candidates: Sequence[Row], baseline: Row | None) -> str:
    """Returns the answer where no variant is shown to be better than the baseline."""
    first, several = candidates[0], len(candidates) > 1
    if first.speed is None:
        return _untimed(candidates, baseline)
    if all(row.speed in (Speed.FEW, None) for row in candidates):
        return "; ".join(filter(None, [f"{lacking_text(first)}: {described(first, baseline)}", first.because])) + "."
    if not several:
        one = described(first, baseline)
        return f"{one}: {shortened(first.because)}." if first.speed is Speed.FASTER else f"Keep the baseline: {one}."
    counts = {speed: sum(row.speed is speed for row in candidates) for speed in Speed}
    counted = [f"{count} {speed}" for speed, count in counts.items() if count]
    counted += [f"{count} not measured"] if (count := sum(row.speed is None for row in candidates)) else []
    told = [f"Keep the baseline: none of {len(candidates)} is shown to be better ({', '.join(counted)})"]
    if first.speed is Speed.FASTER:
        told.append(f"The fastest: {described(first, baseline)}: {shortened(first.because)}")
    elif trade := next((row for row in candidates if row.pays), None):
        told.append(f"A trade: {described(trade, baseline)}")
    return ". ".join(told) + "."


def unconfirmed(row: Row, baseline: Row | None) -> str:
    """Returns the answer for a gain that nothing speaks against and that is not shown yet: it, why, and what to do."""
    why = shortened(row.because)
    rulings = row.figures.judgement.rulings if row.figures.judgement else []
    disturbed = any(ruling.rule == UNDISTURBED and ruling.verdict is not Verdict.PASS for ruling in rulings)
    when = " while nothing else runs here" if disturbed else ""
    return (
        f"{described(row, baseline)}. Not confirmed yet: {why}. To confirm it, measure it again{when}: `{row.command}`."
    )


def lacking_text(row: Row) -> str:
    """Returns why a speed-up tells nothing yet: too few runs, or no repeated baseline."""
    bounded = row.speedup is not None and row.speedup.interval.low is not None
    return "Nothing shows which difference is chance" if bounded else "Not enough runs to tell"


def _reservations(result: StudyResult) -> str:
    """Returns what comes before the answer: that images of other programs were made or saved in other ways."""
    baseline, words = result.variant(result.baseline), ""
    for variant in result.candidates:
        if variant.unlike:
            words += (
                f"Not the same work: the images of {variant.name} say {', '.join(variant.unlike)}, so what differs is "
                "not the option's alone. "
            )
        if apart := variant.files_apart(baseline):
            words += f"{variant.name}: {apart}: what a format loses counts as a difference. "
    return words


def _untimed(candidates: Sequence[Row], baseline: Row | None) -> str:
    """Returns the answer where no time was compared: images alone, or what failed."""
    first = candidates[0]
    if baseline is not None and baseline.status.failure:
        told = f"Nothing was compared: the baseline failed: {shortened(baseline.figures.variant.reason)}"
        if baseline.status is Status.OUT_OF_MEMORY:
            told += "; choose one that fits, as in study.baseline=[precision:fp16,memory:model_offload], or as the "
            told += "first variant of study=explicit"
        return f"{told}."
    if pictured := "; ".join(f"{row.name}: {_images_text(row)}" for row in candidates if row.images):
        return f"{pictured} (not timed)."
    timed = [row for row in candidates if row.speedup is not None and row.status is Status.INTERRUPTED]
    if timed:
        fastest = max(timed, key=lambda row: row.speedup.interval.estimate if row.speedup else 0.0)
        assert fastest.speedup is not None
        return f"Not all was measured ({fastest.because}); so far {fastest.name}: {fastest.speedup.text}, not judged."
    fully = "fully " if first.status is Status.INTERRUPTED else ""
    return f"Nothing was {fully}measured beside the baseline: {first.name}: {first.because}."


def described(row: Row, baseline: Row | None, name: str = "") -> str:
    """Returns what a variant does in one line: speed, memory where it changes, and images.

    A trade is said as one: what it gains first, then what it costs. `name` is the variant's where it is not the row's.
    """
    ratio, name = row.speedup, name or row.name
    if row.at_least_slower is not None:
        slower = f"at least {bound_text(row.at_least_slower)} slower"
        details = "; ".join(filter(None, [_memory_text(row), _images_text(row)]))
        return f"{name} is {slower}" + (f", {details}" if details else "")
    if ratio is None or row.speed is None:
        return f"{name} was not measured ({row.because})"
    runs = "one run" if (count := len(row.variant.samples)) == 1 else f"{count} runs"
    unit = unit_text(row.figures.per_image)
    change = f"{change_text(ratio)}{unit}{_from_to(row, baseline)}"
    speed = {
        Speed.CLOSE: f"speed{unit} too close to call ({ratio.text})",
        Speed.FEW: f"{change} in {runs} each",
    }.get(row.speed or Speed.CLOSE, change)
    if SPEEDUP.name not in row.ratios:  # there are several shapes
        found = [(at.overall.get(SPEEDUP.name), at.shape) for at in row.figures.shapes]
        speed = f"{row.speed}{unit}: " + "; ".join(
            f"{each.interval.estimate:.2f}× at {at}" for each, at in found if each
        )
    memory = _memory_text(row)
    saves = MEMORY_RATIO.name in (name.partition("/")[0] for name in row.gains)
    if saves and row.speed is not Speed.FASTER:
        told = f"{name} {memory}, {speed}"
    else:
        told = f"{name}{' is' if row.speed is not Speed.CLOSE else ':'} {speed}{f', {memory}' if memory else ''}"
    images = _images_text(row)
    return f"{told}; {images}" if images else told


def _memory_text(row: Row) -> str:
    """Returns how the memory changes, as in `saves 22 % memory`; "" where it is not shown to."""
    ratio = row.memory
    if ratio is None or not ratio.gain:
        return ""
    found = ratio.interval.estimate
    if found < 1:
        return f"saves {100 * (1 - found):.0f} % memory"
    return f"takes {found:.1f}× the memory" if found >= 2 else f"takes {100 * (found - 1):.0f} % more memory"


def _from_to(row: Row, baseline: Row | None) -> str:
    """Returns both times; "" where they differ the other way than the ratio, which pairs the calls of each round."""
    mine, other = row.figures.time, baseline.figures.time if baseline else None
    if not (mine and other and row.speedup):
        return ""
    agree = (other.estimate >= mine.estimate) == (row.speedup.interval.estimate >= 1)
    return f" ({times_text(other.estimate, mine.estimate)})" if agree else ""


_ALIKE = ((math.inf, "identical"), (40.0, "nearly identical"), (30.0, "similar"), (0.0, "visibly different"))
"""How alike images are that no gate judged, by the least PSNR in dB."""


def _images_text(row: Row) -> str:
    """Returns what is known of a variant's images, in words, with the figure that is read first."""
    if row.images is None:
        return ""
    if row.figures.variant.trips:
        return f"images broken ({_wires(row.figures.variant)})"
    metric, figure = row.distance
    if row.images is not Images.NOT_JUDGED or not metric:
        told = f" ({figure} dB)" if metric == PSNR and figure not in ("", "equal") else ""
        return f"images {row.images}{told}"
    score = row.figures.scores[metric].estimate
    if metric != PSNR:
        return f"images not judged ({metric} {figure})"
    alike = next(word for least, word in _ALIKE if (math.inf if score is None else score) >= least)
    return f"images {alike}" + (f" ({figure} dB), not judged" if score is not None else "")


def _budget_notes(result: StudyResult, rows: Sequence[Row]) -> list[str]:
    """Returns what a study left out to end within its budget, and which verdicts that leaves open."""
    budget = result.budget
    if budget is None or not budget.spared:
        return []
    left_out = []
    if budget.rounds:
        left_out.append(f"{result.config.protocol.rounds - budget.rounds} of {result.config.protocol.rounds} rounds")
    for name, count in budget.processes.items():
        left_out.append(f"{result.config.replicates - count} of {result.config.replicates} processes of {name}")
    if budget.prompts:
        left_out.append(f"the images of all but {budget.prompts} prompts")
    if not budget.evidence:
        left_out.append("the evidence of all but the first process of each variant")
    text = f"protocol.budget_s={result.config.protocol.budget_s:g} left out {', '.join(left_out) or 'repeated images'}"
    undecided = [
        row.name for row in rows if row.speed in (Speed.CLOSE, Speed.FEW) or row.decision is Decision.UNDECIDED
    ]
    if undecided:
        text += f"; it may be why these are not decided: {', '.join(undecided)}"
    return [f"{text}. Resuming with a larger one measures the rest."]


def _notes(result: StudyResult) -> list[str]:
    return [*_work_notes(result), *_judging_notes(result)]


def _work_notes(result: StudyResult) -> Iterator[str]:
    """Yields in what the work of variants differs, as far as that is part of the comparison."""
    if result.per_image:
        names: dict[int, list[str]] = {}
        for variant in result.variants:
            names.setdefault(variant.config.images_per_call, []).append(variant.name)
        counts = "; ".join(f"{count}: {', '.join(listed)}" for count, listed in sorted(names.items()))
        yield (
            "Times and speed-ups are per image, because calls make different numbers of images "
            f"({counts}). Memory is that of a whole call."
        )
    baseline = result.variant(result.baseline)
    for variant in result.candidates:
        if chosen := _chosen_otherwise(variant, baseline):
            yield f"{variant.name} does other work by choice: {', '.join(chosen)}."


def _chosen_otherwise(variant: VariantResult, baseline: VariantResult) -> list[str]:
    """Returns what a variant chooses of the work otherwise than the baseline, beyond what its name says."""
    mine, other = variant.config, baseline.config
    pairs = {
        "workload.steps": (other.workload.steps, mine.workload.steps),
        "workload.guidance_scale": (other.workload.guidance(other.model), mine.workload.guidance(mine.model)),
        "workload.negative_prompt": (other.workload.negative_prompt, mine.workload.negative_prompt),
        "model": (other.model.name, mine.model.name),
        "scheduler": (other.scheduler.class_name, mine.scheduler.class_name),
        "scheduler.options": (other.scheduler.options, mine.scheduler.options),
        "hardware.threads": (other.hardware.threads, mine.hardware.threads),
    }
    return [
        f"{key} {before} → {after}"
        for key, (before, after) in pairs.items()
        if before != after and f"{key}=" not in variant.name
    ]


def _judging_notes(result: StudyResult) -> list[str]:
    if result.judgements:
        bounds = (at.speedup for edge in result.comparisons for at in edge.shapes)
        followed = "; speed follows the two-sided intervals" if any(known and known.low for known in bounds) else ""
        return [f"Images and pass or fail follow gate={result.gate}{followed}."]
    if result.variant(result.baseline).status.failure:
        return []  # no gate has anything to judge
    from sdopt.statistics.bounds import prompts_to_exclude  # imports scipy, which takes a second

    advice = "add gate=default, or run `sdopt gate <folder>` on this result"
    # gate=default tolerates that 5 % of all prompts exceed a limit; with fewer prompts, no lossy option can pass.
    if not any(variant.images for variant in result.variants):
        return ["There are no images to judge: measure again with gate=default, which draws them."]
    if result.is_imported:
        advice = "run `sdopt judge` on the folders again, with gate=default"
    elif (result.config.quality.prompt_count or 0) < prompts_to_exclude(share=0.05, confidence=0.95):
        advice = "measure again with gate=default, which generates more of them"
    return [f"The images were not judged: {advice}."]


def changes_of(result: StudyResult, candidate: VariantResult, reference: VariantResult) -> list[str] | None:
    """Returns what differs between the traces of two variants, in words; None where one of them has none.

    Omits differences that also occur between the two identical baselines. Of calls that another program made, the
    change is that program's own word.
    """
    if result.is_imported:
        return [f"{candidate.name}, as whoever made it says"]
    mine, other = traced(candidate), traced(reference)
    if not mine or not other:
        return None
    first, again = (traced(row) if row else {} for row in (result.variant(result.baseline), result.control))
    chance = _differing(first, again) if first and again else set()
    names = sorted(_differing(mine, other) - chance)
    return [f"{name} {other.get(name, 0):g} → {mine.get(name, 0):g}" for name in names]


def traced_active(variant: VariantResult, baseline: VariantResult) -> bool:
    """Returns whether a variant has options beyond the baseline's, and traces of its calls show each as active."""
    added = difference(variant.choices, baseline.choices).keys() & variant.promises.keys()
    shapes = [shape for measurement in variant.measurements for shape in measurement.shapes]
    evidence = [item for shape in shapes for item in shape.evidence]
    shown = {item.axis for item in evidence} - {item.axis for item in evidence if not item.engaged}
    return bool(added) and added <= shown


def traced(variant: VariantResult) -> dict[str, float]:
    """Returns what ran in the traced call of a variant, with the graphs that its first call compiled."""
    found = next((measurement.shapes[0] for measurement in variant.measurements if measurement.shapes[0].traced), None)
    if found is None:
        return {}
    return found.traced | ({"compiled graphs": float(found.graphs)} if found.graphs else {})


def _differing(mine: dict[str, float], other: dict[str, float]) -> set[str]:
    return {name for name in mine.keys() | other.keys() if mine.get(name, 0) != other.get(name, 0)}
