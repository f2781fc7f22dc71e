"""Defines the schema of `result.json`: a study's measurements, from which all tables and trackers are made."""

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
from statistics import median
from typing import Any, ClassVar

from pydantic import ConfigDict

from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.record.choices import NONE, PATCH, difference
from sdopt.record.comparisons import Comparison, Effect
from sdopt.record.configuration import RecordedConfig
from sdopt.record.programs import Program
from sdopt.record.samples import Call, Evidence, Measurement
from sdopt.record.scores import BrokenImage, ImageRecord, Score, Spread
from sdopt.record.verdicts import Judgement, Look
from sdopt.schema import Shape, Sheet

SCHEMA_VERSION = 5
"""Version of the schema, raised with every change that breaks earlier readers. A result of another one is refused."""

IMPORTED = "imported"
"""The design of a study whose images and times other programs made."""


def now() -> str:
    """Returns the current time in UTC, in the format of records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Status(StrEnum):
    """How a variant ended."""

    PENDING = "pending"
    OK = "ok"
    NOT_ENGAGED = "not_engaged"
    """It ran, but an optimization left no evidence of having taken effect."""
    SLOWER = "slower"
    """Its first warm calls showed that it is clearly slower than the baseline, so that it was not timed further."""
    SKIPPED = "skipped"
    """It cannot run here, or its choices conflict; nothing was loaded."""
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    TIMEOUT = "timeout"
    """A request took longer than `protocol.timeout_s`, and its process was killed."""
    INTERRUPTED = "interrupted"

    @property
    def measured(self) -> bool:
        """Whether the variant's figures may be shown: an option without effect still has a latency."""
        return self in (Status.OK, Status.NOT_ENGAGED, Status.SLOWER)

    @property
    def failure(self) -> bool:
        """Whether something went wrong, so that `retry_failed=true` measures it again."""
        return self in (
            Status.FAILED,
            Status.OUT_OF_MEMORY,
            Status.KILLED,
            Status.TIMEOUT,
        )

    @property
    def timed(self) -> bool:
        """Whether the variant's samples may be compared: also samples of an interrupted study."""
        return self.measured or self is Status.INTERRUPTED


REDRAWN = {
    "numerical": "the baseline, computed in another order",
    "sampling": "the baseline, from other noise",
}
"""What a baseline's second images are, by kind of `StudyResult.floors`."""


@dataclass
class Promise:
    """What one optimization promises about the images, and what it is for: `latency`, `memory` or nothing."""

    contract: Contract
    claims: list[str]
    by_image: bool = False
    """Whether each image decides how much of the denoiser runs, and so how fast it is."""


@dataclass
class VariantResult:
    """One point of the ablation."""

    name: str
    role: str
    """`variant`, or `control`: the second baseline of the A/A comparison."""
    choices: dict[str, str]
    overrides: list[str]
    config: RecordedConfig
    contract: Contract = Contract.EXACT
    status: Status = Status.PENDING
    reason: str = ""
    measurements: list[Measurement] = field(default_factory=list)
    images: list[ImageRecord] = field(default_factory=list)
    kept_images: list[ImageRecord] = field(default_factory=list)
    """Those of a quality pass that is not whole: an interrupted study goes on from there."""
    quality: dict[str, Score] = field(default_factory=dict)
    trips: list[BrokenImage] = field(default_factory=list)
    denoiser_calls: int | None = None
    """Number of denoiser runs in one call of the pipeline."""
    promises: dict[str, Promise] = field(default_factory=dict)
    """By axis, what its optimizations promise."""
    program: Program | None = None
    """The program that uses it; None if none was run."""
    command: str = ""
    """The `sdopt run` command that composes its configuration and that of the baseline; "" if none is known to."""
    tflop_per_image: float | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    """Digests of the weights, prompts and user's code that it was measured with."""
    unlike: list[str] = field(default_factory=list)
    """Of images of another program: the settings that they name otherwise than the baseline's, in words."""
    untold: str = ""
    """Of images of another program: in words, which of them do not say how they were made, as their partners do."""
    made_by: str = ""
    """Of images of another program: its name, where they say it."""
    made_by_version: str = ""
    """Of images of another program: its version, where they say it."""
    file_format: str = ""
    """Of images of another program: how their files are written."""
    lossy_files: bool = False
    """Whether writing them so changed pixels."""
    given_up: bool = False
    """Whether it was not timed to the end, because its trial calls (`ShapeSamples.trial_s`) showed that it is clearly
    slower. Its status is `slower`, unless it claims memory alone, which was then measured as usual."""

    def other_work(
        self, reference: "VariantResult", places: Collection[str] = ()
    ) -> str:
        """Returns what the two did differently and must not: work, hardware, and what images say of it; or "".

        `places` are keys of files that may lie elsewhere, because their contents were compared.
        """
        words = []
        differing = self.config.incomparable_work(reference.config)
        for key, (mine, theirs) in differing.items():
            if key not in places:
                words.append(f"{key} ({mine} against {theirs})")
        words += [said for said in self.unlike if said not in reference.unlike]
        return f"not the same work: {', '.join(words)}" if words else ""

    def files_apart(self, reference: "VariantResult") -> str:
        """Returns in words that files are written in ways that lose other details; "" if they are not."""
        if self.file_format == reference.file_format or not (
            self.lossy_files or reference.lossy_files
        ):
            return ""
        return f"its images are {self.file_format}, and those of {reference.name} {reference.file_format}"

    @property
    def is_control(self) -> bool:
        """Whether it is the second baseline of the A/A comparison."""
        return self.role == "control"

    @property
    def is_in_the_race(self) -> bool:
        """Whether it is timed further: it is neither out by its status nor given up."""
        pending = self.status is Status.PENDING
        return (pending or self.status.measured) and not self.given_up

    def __repr__(self) -> str:
        times = list(chain.from_iterable(self.samples.values()))
        timed = f", {len(times)} calls of {median(times):.3g} s" if times else ""
        because = f": {self.reason}" if self.reason else ""
        return f"<VariantResult {self.name}: {self.status}{timed}{because}>"

    @property
    def samples(self) -> dict[int, list[float]]:
        """End-to-end times at the main shape of the rounds that decide, by replicate: of all its sessions in turn."""
        times: dict[int, list[float]] = {}
        for measurement in self.measurements:
            if measurement.main.calls:
                of_process = times.setdefault(measurement.replicate, [])
                of_process += measurement.main.deciding_s
        return times

    @property
    def calls(self) -> list[Call]:
        """All timed calls at the main shape, process by process."""
        return list(chain.from_iterable(one.main.calls for one in self.measurements))

    def at(self, shape_index: int) -> "VariantResult":
        """Returns the result with the shape at this index as its main one; only the first shape has images."""
        if not shape_index or len(self.config.shapes) == 1:
            return self
        return replace(
            self,
            config=self.config.at(shape_index),
            measurements=[
                measurement.at(shape_index) for measurement in self.measurements
            ],
            images=[],
            quality={},
            trips=[],
            tflop_per_image=None,
        )

    @property
    def peaks_gib(self) -> list[float]:
        """The largest measured peak of memory of each process; of those in which none could be measured, nothing."""
        return [
            measurement.peak[1] for measurement in self.measurements if measurement.peak
        ]

    def drop(self, processes: Iterable[Measurement]) -> None:
        """Takes processes out that were not measured."""
        dropped = set(map(id, processes))
        self.measurements = [m for m in self.measurements if id(m) not in dropped]

    @property
    def silent(self) -> set[int]:
        """The replicates that have shown no evidence at some shape; one that was killed before it is replaced."""
        active: set[int] = set()
        for measurement in self.measurements:
            evidence = [samples.evidence for samples in measurement.shapes]
            if measurement.spared or all(evidence):
                active.add(measurement.replicate)
        return {measurement.replicate for measurement in self.measurements} - active

    @property
    def to_retry(self) -> bool:
        """Whether `retry_failed=true` measures it again: it failed, or a call that was to show evidence did."""
        return self.status.failure or (
            self.status is Status.NOT_ENGAGED and bool(self.silent)
        )

    @property
    def is_patched(self) -> bool:
        """Whether functions of one's own change its pipeline."""
        return self.choices.get(PATCH, NONE) != NONE

    def shows_no_effect(self, evidence: Evidence) -> bool:
        """Returns whether evidence shows that an option had no effect.

        What an option names that promises nothing, as the defaults do, a function of one's own may change.
        """
        promise = self.promises.get(evidence.axis)
        plain = (
            promise is not None
            and promise.contract is Contract.EXACT
            and not promise.claims
        )
        return not evidence.engaged and not (
            self.is_patched and plain and evidence.axis != PATCH
        )

    @property
    def skips_by_image(self) -> bool:
        """Whether its images decide how much of the denoiser runs, as with a cache that compares what blocks add."""
        return any(promise.by_image for promise in self.promises.values())

    def promises_beside(self, other: "VariantResult") -> list[Promise]:
        """Returns what its options promise on the axes where it differs from another variant."""
        axes = difference(self.choices, other.choices)
        return [promise for axis, promise in self.promises.items() if axis in axes]

    def image(self, prompt_index: int, image_index: int) -> ImageRecord | None:
        """Returns one image of a prompt; None if it was not drawn."""
        place = prompt_index, image_index
        return next(
            (
                record
                for record in self.images
                if (record.prompt_index, record.image_index) == place
            ),
            None,
        )

    @property
    def tripped(self) -> str:
        """The tripwires that its images tripped, each once: `black, noise`."""
        return ", ".join(dict.fromkeys(trip.wire for trip in self.trips))

    @property
    def trips_at_shapes(self) -> list[BrokenImage]:
        """What timed calls at further shapes have shown, of which the quality pass makes no image."""
        names = {shape.name for shape in self.config.shapes[1:]}
        return [trip for trip in self.trips if trip.path in names]

    @property
    def broken_images(self) -> int:
        """Number of images that tripped a wire; all of them if a tripwire for all images together tripped."""
        tripped = {trip.path for trip in self.trips}
        return (
            len(self.images)
            if "" in tripped
            else sum(image.path in tripped for image in self.images)
        )


def append_reason(row: VariantResult, *more: str) -> str:
    """Returns the reason of a variant with further texts appended, without its name and without repetitions."""
    added = [text.removeprefix(f"{row.name}: ") for text in more]
    return "; ".join(
        [
            *filter(None, [row.reason]),
            *(text for text in added if text not in row.reason),
        ]
    )


@dataclass
class Environment:
    """The machine, the device and the software with which a study ran."""

    sdopt_version: str
    sdopt_commit: str | None
    sdopt_dirty: bool | None
    python: str
    platform: str
    packages: dict[str, str]
    device: dict[str, Any]
    cpu: dict[str, Any]
    start_method: str
    command: list[str]
    code: str | None = None
    """Digest of sdopt's own Python files."""
    sheet: Sheet | None = None
    """The device's data sheet, if there is one."""
    gpu: dict[str, Any] = field(default_factory=dict)
    """Settings of the CUDA device, and the other processes on it, when the study began."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that were set and change how the libraries compute."""
    host: str = ""
    """The machine's name in its network."""
    warnings: list[str] = field(default_factory=list)
    """Deviations from the request: why `auto` chose the CPU, or why workers start slowly."""

    @property
    def sdopt(self) -> str:
        """The version of sdopt, its commit, and whether files differed from that."""
        return f"{self.sdopt_version} {(self.sdopt_commit or '')[:9]}{'+dirty' if self.sdopt_dirty else ''}"


@dataclass
class Schedule:
    """How the rounds were laid out: `interleaved`, or `blocks` with the reason and the drift of the baseline.

    `drift` holds, per block, the reference's time after the block over that before it.
    """

    kind: str = "interleaved"
    reason: str = ""
    drift: dict[str, float] = field(default_factory=dict)


@dataclass
class MeasurementSession:
    """One session of measuring with its own processes: the first, or a later one that measured what was missing.

    A session that times anything measures its own baseline, and repeats it, because processes of different sessions are
    not comparable.
    """

    started: str
    schedule: str = "interleaved"


@dataclass
class IntervalWidth:
    """The course of a study with `protocol.precision` after its pilot, the first `protocol.replicates` processes."""

    needed: dict[str, int] = field(default_factory=dict)
    """By candidate, the number of processes that its speed-ups need, estimated from the pilot's deviation."""
    granted: int = 0
    """Processes of each variant, of those that it needs, that were to be measured so far."""
    spent_s: float = 0.0
    """Time that measuring took, the pilot included."""
    stopped: str = ""
    """Why the study ended before all candidates had the processes that they need; "" if they have them."""


@dataclass
class Budget:
    """What a study left out to end within `protocol.budget_s`; the defaults leave out nothing."""

    spent_s: float = 0.0
    """Seconds from the start of the command until the last measurement."""
    rounds: int | None = None
    """Rounds that were timed, where they are fewer than `protocol.rounds`."""
    processes: dict[str, int] = field(default_factory=dict)
    """Processes by variant, of those that have fewer than `protocol.replicates`."""
    settled: dict[str, int] = field(default_factory=dict)
    """By variant that was shown to be faster or slower before the last round: the rounds that it was timed in."""
    prompts: int | None = None
    """Prompts of the quality pass, where there was no time for all."""
    floor_prompts: int | None = None
    """Prompts that the baseline drew again, where there was no time for all."""
    evidence: bool = True
    """Whether every process had time to show evidence, and not only the first one of each variant."""
    stages: bool = True
    """Whether there was time for the calls that time the stages; without, fewer prompts have images too."""

    @property
    def spared(self) -> bool:
        """Whether anything was left out that leaves a verdict open."""
        return bool(
            self.rounds
            or self.processes
            or self.prompts
            or self.floor_prompts
            or not self.evidence
        )


@dataclass
class StudyResult:
    """Everything that one study found."""

    # Of all records in it: no figure is infinite. What evidence tells may be anything.
    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False)

    name: str
    design: str
    started: str
    environment: Environment
    config: RecordedConfig
    variants: list[VariantResult]
    comparisons: list[Comparison]
    baseline: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the study, by which a tracker recognises it."""
    schema_version: int = SCHEMA_VERSION
    finished: str | None = None
    floor: float | None = None
    """Ratio by which the two baseline workers differed, as in 1.02."""
    schedule: Schedule = field(default_factory=Schedule)
    """Of the last session; its drift is that of all blocks."""
    sessions: list[MeasurementSession] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    gate: str = ""
    """The gate that judged, and its verdict on each comparison."""
    judgements: list[Judgement] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    """Every judging of a comparison so far, the first one first."""
    redrawn: dict[str, list[ImageRecord]] = field(default_factory=dict)
    """The baseline's images drawn again: in other batches (`numerical`), and from other noise (`sampling`)."""
    feature_digests: dict[str, str] = field(default_factory=dict)
    """Hashes of the weights of the networks that quality was computed with."""
    floors: dict[str, dict[str, Spread]] = field(default_factory=dict)
    """How far two baselines differ, by quality metric: where they compute in another order (`numerical`: other batches
    and threads), and where they start from other noise (`sampling`). They are shown beside margins, which are fixed
    beforehand, and never made into one."""
    precision: IntervalWidth | None = None
    """The course of a study with `protocol.precision`; None without it."""
    budget: Budget | None = None
    """What a study with `protocol.budget_s` left out; None without it."""
    status: str = "running"
    """`running`, `finished`, `interrupted`, or `crashed` by a mistake of sdopt's own."""

    def variant(self, name: str) -> VariantResult:
        """Returns the variant of a name. Raises UsageError if there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        names = ", ".join(variant.name for variant in self.variants)
        raise UsageError(f"variant={name}: not in the study; choose one of {names}")

    def sides(self, comparison: Comparison) -> tuple[VariantResult, VariantResult]:
        """Returns the candidate and the reference of a comparison."""
        return self.variant(comparison.candidate), self.variant(comparison.reference)

    @property
    def baseline_variant(self) -> VariantResult:
        """The variant that others are compared with."""
        return self.variant(self.baseline)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes at which all variants were timed, the main one first; a single shape may differ by variant."""
        return self.config.shapes

    @property
    def per_image(self) -> bool:
        """Whether calls of its variants make different numbers of images, so that times are shown per image.

        Ratios of times are always those of one image: where calls make as many images, nothing else follows from it.
        """
        run = [
            variant for variant in self.variants if variant.status is not Status.SKIPPED
        ]
        return len({variant.config.images_per_call for variant in run}) > 1

    @property
    def is_imported(self) -> bool:
        """Whether other programs made its images and times, so that sdopt has no evidence and no trace of them."""
        return self.design == IMPORTED

    def at(self, shape_index: int) -> "StudyResult":
        """Returns the result with the shape at this index as its main one, to derive its figures."""
        if not shape_index:
            return self
        control = self.first_comparison(self.control.name) if self.control else None
        return replace(
            self,
            config=self.config.at(shape_index),
            variants=[variant.at(shape_index) for variant in self.variants],
            comparisons=[comparison.at(shape_index) for comparison in self.comparisons],
            floor=control.shapes[shape_index].floor if control else None,
        )

    @property
    def seconds(self) -> float:
        """The time from its first start to its last end; 0 while it runs."""
        if self.finished is None:
            return 0.0
        return (
            datetime.fromisoformat(self.finished) - datetime.fromisoformat(self.started)
        ).total_seconds()

    @property
    def only_slower(self) -> bool:
        """Whether every candidate that can run was given up as slower, so that nothing is left to compare."""
        statuses = {row.status for row in self.candidates} - {Status.SKIPPED}
        return statuses == {Status.SLOWER}

    @property
    def confidence(self) -> float:
        """Confidence of the two-sided intervals; a gate's one-sided bounds have the confidence of their rule."""
        return self.config.protocol.confidence

    def replicates_of(self, variant: str) -> int:
        """Returns how many processes a variant needs so far: by the protocol, or for its precision."""
        if self.precision is None:
            fewer = self.budget.processes if self.budget else {}
            return fewer.get(variant, self.config.replicates)
        return max(
            self.config.replicates,
            min(self.precision.granted, self.precision.needed.get(variant, 0)),
        )

    @property
    def measurements(self) -> list[Measurement]:
        """All its processes, variant by variant."""
        return list(chain.from_iterable(row.measurements for row in self.variants))

    @property
    def drawn_images(self) -> list[ImageRecord]:
        """The images of the quality pass, variant by variant."""
        return list(chain.from_iterable(row.images for row in self.variants))

    @property
    def control(self) -> VariantResult | None:
        """The second baseline of the A/A comparison."""
        return next((variant for variant in self.variants if variant.is_control), None)

    @property
    def candidates(self) -> list[VariantResult]:
        """All variants but the baseline and the repeated baseline."""
        return [
            variant
            for variant in self.variants
            if not variant.is_control and variant.name != self.baseline
        ]

    def first_comparison(self, candidate: str) -> Comparison | None:
        """Returns a variant's first comparison, whose scores and ratios are shown; None for the baseline."""
        return next(
            (edge for edge in self.comparisons if edge.candidate == candidate), None
        )
