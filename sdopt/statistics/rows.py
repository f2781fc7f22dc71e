"""What a study knows of one variant: its figures, its ratios, and the verdicts on it, in one row.

Tables, plots, pages, data frames, searches and trackers read these rows, so that they cannot disagree. `figures`
derives them, and `summary` adds the verdicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sdopt.record.comparisons import BreakEven, Comparison, Interval
from sdopt.record.records import Status, VariantResult
from sdopt.record.scores import Score
from sdopt.record.verdicts import Judgement, Verdict
from sdopt.schema import Shape
from sdopt.statistics.giving_up import at_least_slower
from sdopt.statistics.measures import (
    MEMORY_RATIO,
    SPEEDUP,
    Ratio,
    measure_named,
    with_shape,
)
from sdopt.statistics.scale import Images, Speed, speed_of
from sdopt.statistics.words import unit_text

PSNR = "psnr_db"
"""The metric of image pairs that is read first, where it was measured."""


@dataclass(frozen=True)
class Row:
    """One variant, compared with the study's baseline and, in some designs, with another variant too.

    Times are in seconds, stages in milliseconds, memory in GiB, energy in joules; what was not measured is None, or
    missing from a mapping.
    """

    variant: VariantResult
    shape: Shape
    comparison: Comparison | None = None
    """With its reference: the baseline, or the variant that it builds on; None if it was compared with nothing."""
    latency: Interval | None = None
    """One call, as `protocol.estimator` summarises it."""
    per_image: bool = False
    """Whether times are shown per image: calls of the study's variants make different numbers of images."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Its figures by name: `latency/p50_s`, `speedup`, `quality/psnr_db`, … With several shapes, a plain name is the
    figure at the main shape, and `speedup/512x512b1` the one at that shape."""
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    peak_rate: tuple[str, float] | None = None
    """The data sheet's dense peak rate for the types that ran: its name (`bf16`) and TFLOP/s; None if not known."""
    headline_memory: tuple[str, float] | None = None
    """The peak from which memory ratios are computed, with its name: the geometric mean of the processes."""
    beside_reference: Mapping[str, Ratio] = field(default_factory=dict)
    """By measure (`speedup`, `memory_ratio`, `tail_ratio`): of the comparison."""
    over_baseline: Mapping[str, Ratio] = field(default_factory=dict)
    """The same over the study's baseline, whatever the reference: what variants are ranked by."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """The variant's own quality metrics, and the distances to the reference's images."""
    judgement: Judgement | None = None
    """What the gate says of this comparison; None if it was not judged."""
    further: tuple["Row", ...] = ()
    """The rows at the further shapes of the study; this one is at the main shape."""

    # What `summary` adds.
    command: str = ""
    """The `sdopt run` command that measures it again, by the gate that judged it; "" if none is known to."""
    option: str = ""
    """The options that it adds to the baseline, as in `precision=bf16`; its name if none is known."""
    is_baseline: bool = False
    speed: Speed | None = None
    """What its speed-up over the baseline shows; None without one, and of a step."""
    images: Images | None = None
    """What is known of its images; None for the baseline, and where nothing was measured."""
    decision: Verdict | None = None
    """The gate's verdict on its comparisons, the worst one; None if none judged."""
    because: str = ""
    """Why it does not pay, in a few words; "" if it does."""
    pays: bool = False
    """Whether it is shown to gain speed or memory, and neither the gate nor its evidence speaks against it."""
    steps: tuple["Row", ...] = ()
    """Its comparisons with other variants than the baseline."""
    leaves_out: bool = False
    """Of a step: whether it leaves this option of its reference out, as in `study=leave_one_out`."""

    def __str__(self) -> str:
        words = [str(self.speed or self.status)]
        if self.speedup is not None:
            words.insert(0, f"{self.speedup.text}{unit_text(self.per_image)}")
        if self.images:
            words.append(f"images {self.images}")
        if self.decision:
            words.append(str(self.decision))
        line = f"{self.name}: {', '.join(words)}"
        return f"{line} ({self.because})" if self.because else line

    # The variant.

    @property
    def name(self) -> str:
        """The variant's name."""
        return self.variant.name

    @property
    def status(self) -> Status:
        """How it was measured."""
        return self.variant.status

    @property
    def has_verdict(self) -> bool:
        """Whether a gate judged it; broken images need none."""
        return self.decision is not None or bool(self.variant.trips)

    @property
    def lines(self) -> tuple[str, ...]:
        """Code that turns it on in a program that has a pipeline `pipe` of diffusers; () if none is known to."""
        program = self.variant.program
        return tuple(program.lines) if program and program.draws else ()

    @property
    def reference(self) -> str:
        """The name of what it was compared with; "" without a comparison."""
        return self.comparison.reference if self.comparison else ""

    @property
    def break_even(self) -> BreakEven | None:
        """The start-up cost, and after how many images it is repaid."""
        return self.comparison.break_even if self.comparison else None

    @property
    def is_step(self) -> bool:
        """Whether the reference is another variant than the baseline, as in a study that adds options one by one."""
        return self.beside_reference != self.over_baseline

    # Figures.

    @property
    def peak_gib(self) -> float | None:
        """The peak from which memory ratios are computed; None where it was not measured."""
        return self.headline_memory[1] if self.headline_memory else None

    @property
    def flat(self) -> Mapping[str, float]:
        """The figures of a variant that was measured: a sweeper may optimise them, and a tracker logs some.

        A failed one has none: partial measurements must not rank beside complete ones.
        """
        return self.figures if self.status.measured else {}

    @property
    def images_per_call(self) -> int:
        """How many images one call makes at this shape."""
        return self.variant.config.images_per_call

    @property
    def image_time(self) -> Interval | None:
        """The time of one image: that of a call, divided by how many images it makes."""
        time = self.latency
        images = self.images_per_call
        if time is None:
            return None
        low = None if time.low is None else time.low / images
        high = None if time.high is None else time.high / images
        return replace(time, estimate=time.estimate / images, low=low, high=high)

    @property
    def time(self) -> Interval | None:
        """The time that stands beside those of other variants: of one call, or of one image (`per_image`)."""
        return self.image_time if self.per_image else self.latency

    @property
    def call_ms(self) -> dict[str, float]:
        """Milliseconds of one call by stage; of the denoiser, the sum of its steps, which a cache makes unequal.

        They are those of one image where times are shown per image.
        """
        steps = self.variant.denoiser_calls or self.variant.config.workload.steps
        images = self.images_per_call if self.per_image else 1
        times: dict[str, float] = {}
        for stage, value in self.stages_ms.items():
            calls = steps if stage.endswith("_step") else 1
            times[stage.removesuffix("_step")] = value * calls / images
        return times

    @property
    def largest_memory_gib(self) -> float | None:
        """The peak of memory in the process that needs most: what limits are compared with."""
        return max(self.variant.peaks_gib, default=None)

    @property
    def at_least_slower(self) -> float | None:
        """How many times as long as the baseline's its calls take at least, if its timing ended early for that."""
        return at_least_slower(self.variant)

    @property
    def distance(self) -> tuple[str, str]:
        """The metric of image pairs that is read first, and its figure; "" twice where there is none."""
        if self.comparison is None or not self.comparison.quality or self.is_step:
            return "", ""
        quality = self.comparison.quality
        metric = next(iter(quality))
        if PSNR in quality:
            metric = PSNR
        estimate = quality[metric].estimate
        return metric, "equal" if estimate is None else f"{estimate:.3g}"

    # Ratios.

    @property
    def shapes(self) -> "tuple[Row, ...]":
        """The rows at each shape, the main one first."""
        return (self, *self.further)

    @property
    def speedup(self) -> Ratio | None:
        """Its speed-up over the baseline, at the main shape; None where it was not timed."""
        return self.over_baseline.get(SPEEDUP.name) if self.status.timed else None

    @property
    def memory(self) -> Ratio | None:
        """Its memory over that of the baseline, at the main shape; None where it was not measured."""
        return self.over_baseline.get(MEMORY_RATIO.name) if self.status.timed else None

    @property
    def speedup_beside(self) -> Ratio | None:
        """Its speed-up over its reference, as it was recorded."""
        return self.beside_reference.get(SPEEDUP.name)

    @property
    def claimed_ratios(self) -> dict[str, Ratio]:
        """Its speed-up and memory over the baseline at each shape, by name (`speedup/512x512b1` of several shapes)."""
        ratios: dict[str, Ratio] = {}
        for row in self.shapes:
            shape = row.shape.name if self.further else ""
            for name, ratio in row.over_baseline.items():
                if ratio.measure.claim:
                    ratios[with_shape(name, shape)] = ratio
        return ratios

    @property
    def speeds(self) -> list[Speed]:
        """What the speed-up at each shape shows."""
        judged = self._judged_gains
        return [
            speed_of(ratio, name in judged)
            for name, ratio in self.claimed_ratios.items()
            if measure_named(name) is SPEEDUP
        ]

    @property
    def gains(self) -> list[str]:
        """The names of the ratios that show a gain."""
        judged = self._judged_gains
        return [
            name
            for name, ratio in self.claimed_ratios.items()
            if ratio.gain > 0 or name in judged
        ]

    @property
    def _judged_gains(self) -> Sequence[str]:
        return () if self.judgement is None or self.is_step else self.judgement.gains

    # Verdicts.

    @property
    def verdict(self) -> Verdict | None:
        """The gate's verdict on this comparison; None if it was not judged."""
        return self.judgement.verdict if self.judgement else None

    @property
    def disturbance(self) -> str:
        """What disturbed the timing, as its gate has found: neither a gain nor a harm is shown then; "" if nothing did."""
        return self.judgement.disturbance if self.judgement else ""

    @property
    def recommended(self) -> bool:
        """Whether it pays, and is not slower than the baseline: that would be a trade."""
        return self.pays and self.speed is not Speed.SLOWER

    @property
    def step_text(self) -> str:
        """What it gains on top of its reference, as in `2.30× [1.88, 2.81] on top of fp16`; "" without a speed-up."""
        ratio = self.speedup_beside
        if ratio is None:
            return ""
        beside = "beside" if self.leaves_out else "on top of"
        return f"{ratio.text}{unit_text(self.per_image)} {beside} {self.reference}"
