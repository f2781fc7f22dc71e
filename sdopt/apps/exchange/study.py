"""Makes a study of images and times of other programs, which is scored, judged and shown like sdopt's own."""

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sdopt.apps.exchange.formats import common_format
from sdopt.apps.exchange.pairing import (
    batch_of,
    copies_in,
    of_other_noise,
    other_settings,
    partners,
    program_of,
    require_alike,
    untold,
    version_of,
)
from sdopt.apps.exchange.pictures import ImportedPicture, read_folder, repeated
from sdopt.apps.exchange.settings import require_known
from sdopt.apps.exchange.times import (
    TimesTable,
    measurements_of,
    names_of_columns,
    times_in,
    unlike_times,
    untold_images,
)
from sdopt.apps.exchange.wiring import LINKS
from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.record.comparisons import Comparison
from sdopt.record.configuration import RecordedConfig
from sdopt.record.files import short_digest
from sdopt.record.images import digest_of
from sdopt.record.records import (
    IMPORTED,
    Environment,
    Promise,
    Status,
    StudyResult,
    VariantResult,
)
from sdopt.record.scores import ImageRecord
from sdopt.schema import THRESHOLDS, Model, Protocol, Rule, Workload

BASELINE, AGAIN = "baseline", "baseline again"

AXIS = "program"
"""The axis on which imported variants differ."""

IMAGES = "images"
"""The input of an imported variant: what its images hold, by which two results tell whether a baseline is the same."""

_OF_CALLS = ("speedup", "tail_ratio")

_MODEL = Model(name="images", weights="path", path=None)
"""What is recorded as their model: nobody tells which one it was."""


@dataclass(frozen=True)
class _Side:
    """One folder: its images in the baseline's order, and the times of its calls."""

    name: str
    folder: Path
    pictures: list[ImportedPicture]
    times: TimesTable
    unlike: list[str] = field(default_factory=list)
    """Settings with which its images were made otherwise than the baseline's, in words."""
    untold: str = ""
    """Which images do not say how they were made, as their partners do, in words."""


@dataclass(frozen=True)
class GivenFolder:
    """What is to be judged.

    Attributes:
        baseline: the folder of the baseline's images.
        candidates: the folders to compare with it.
        again: a second folder of the baseline: the same prompts and seeds, made once more.
        contract: what the candidates promise about their images.
        other_noise: a folder of the baseline's prompts, made from other seeds: for a calibration.
        precision: the number type in which the baseline was computed, for rules that depend on it.
        changes: settings of the images that the candidates change on purpose.
    """

    baseline: Path
    candidates: Sequence[Path]
    again: Path | None = None
    contract: Contract = Contract.LOSSY
    precision: str | None = None
    other_noise: Path | None = None
    changes: Sequence[str] = ()

    @property
    def repeats(self) -> list[Path]:
        """The second folder of the baseline, if there is one."""
        return [] if self.again is None else [self.again]

    @property
    def folders(self) -> list[Path]:
        """All folders that are compared."""
        return [self.baseline, *self.candidates, *self.repeats]


def import_study(
    given: GivenFolder,
    config: RecordedConfig,
    environment: Environment,
    started: str,
    output: Path,
) -> StudyResult:
    """Returns a study of images that other programs made, whose images are copied to `output`; nothing is scored yet.

    Raises:
        UsageError: folders, images or tables do not fit together.
    """
    sides = _sides(given)
    first = sides[0].pictures
    noise = _with_other_noise(first, given)
    copies = copies_in([side.pictures for side in sides])
    sides = [replace(side, pictures=_without(copies, side.pictures)) for side in sides]
    copied = _names_of_copies(first, copies)
    first = sides[0].pictures
    promise = Promise(given.contract, _claims(sides))
    config = _config_of(sides, config, given.precision)
    config_of = _configs(sides, config)
    rows = []
    plain = common_format(picture.written for picture in first)
    for number, side in enumerate(sides):
        row = VariantResult(
            side.name,
            "variant",
            {AXIS: BASELINE},
            [],
            config_of[side.name],
            status=Status.OK,
            measurements=measurements_of(side.times, sides[0].times),
            images=_copied(side, first, output, number, copied),
            unlike=side.unlike,
            untold=side.untold,
            inputs={
                IMAGES: _digest(side.pictures),
                **_work_of(side, baseline=not number),
            },
            made_by=program_of(side.pictures),
            made_by_version=version_of(side.pictures),
        )
        written = common_format(picture.written for picture in side.pictures)
        row.file_format, row.lossy_files = written.named_beside(plain), written.lossy
        if side.folder is given.again:
            row.role = "control"
        elif number:
            row.choices = {AXIS: side.name}
            row.contract, row.promises = given.contract, {AXIS: promise}
        rows.append(row)
    result = StudyResult(
        name="judge",
        design=IMPORTED,
        started=started,
        environment=environment,
        config=config,
        variants=rows,
        comparisons=list(map(_comparison, rows[1:])),
        baseline=BASELINE,
    )
    if result.control is not None:
        result.redrawn["numerical"] = result.control.images
    if noise is not None:
        side = replace(noise, pictures=_without(copies, noise.pictures))
        result.redrawn["sampling"] = _copied(side, first, output, len(sides), copied)
    return result


def _sides(given: GivenFolder) -> list[_Side]:
    """Reads the folders that are compared, the baseline's first. Raises UsageError if they do not fit together."""
    if twice := repeated(folder.resolve() for folder in given.folders):
        raise UsageError(f"{twice}: is given twice; name each folder once")
    first = read_folder(given.baseline)
    baseline = _Side(BASELINE, given.baseline, first, times_in(given.baseline))
    sides = [baseline]
    for name, folder in zip(_names(given.candidates), given.candidates, strict=True):
        sides.append(_side_of(baseline, name, folder, given.changes))
    # What the candidates change, the baseline does not when it is made once more.
    again = [_side_of(baseline, AGAIN, folder, ()) for folder in given.repeats]
    sides += again
    require_known(given.changes, _names_beside(sides))
    for side in again:
        _require_chance_alone(first, side)
    for side in sides:
        _require_pictures(first[0], side)
    return sides


def _side_of(baseline: _Side, name: str, folder: Path, changes: Sequence[str]) -> _Side:
    """Reads one folder, and what of it is unlike the baseline's, beside the `changes` that are meant."""
    first = baseline.pictures
    pictures = partners(first, read_folder(folder), (baseline.folder, folder))
    require_alike(first, pictures)
    times = times_in(folder)
    batches = batch_of(first), batch_of(pictures)
    unlike = [
        *other_settings(first, pictures, changes),
        *unlike_times(baseline.times.rows, times.rows, changes),
        *untold_images((baseline.times, times), batches),
    ]
    return _Side(name, folder, pictures, times, unlike, untold(first, pictures))


def _config_of(
    sides: Sequence[_Side], config: RecordedConfig, precision: str | None
) -> RecordedConfig:
    """Returns the configuration of the study, of which others made the calls."""
    replicates = set[int]().union(*(side.times.replicates for side in sides))
    thresholds = {name: getattr(config.protocol, name) for name in THRESHOLDS}
    protocol = Protocol(replicates=max(1, len(replicates)), stage_calls=0, **thresholds)
    return replace(
        config,
        model=_MODEL,
        workload=Workload(prompt_count=len(sides[0].pictures)),
        protocol=protocol,
        options={"precision": {"weights": precision}} if precision else {},
    )


def _with_other_noise(
    first: Sequence[ImportedPicture], given: GivenFolder
) -> _Side | None:
    """Returns the folder of the baseline's prompts from other seeds, if one is given."""
    if given.other_noise is None:
        return None
    folders = given.baseline, given.other_noise
    pictures = of_other_noise(first, read_folder(given.other_noise), folders)
    unlike = other_settings(first, pictures)
    side = _Side("", given.other_noise, pictures, TimesTable(Path()), unlike)
    _require_chance_alone(first, side)
    return side


def _without(
    copies: Mapping[int, int], pictures: Sequence[ImportedPicture]
) -> list[ImportedPicture]:
    """Returns the images of a folder that are no copies of others."""
    return [
        picture for position, picture in enumerate(pictures) if position not in copies
    ]


def _names_of_copies(
    first: Sequence[ImportedPicture], copies: Mapping[int, int]
) -> dict[str, list[str]]:
    """Returns the names of the files that are copies, by that of the file that counts."""
    names: dict[str, list[str]] = {}
    for position, earlier in copies.items():
        copies_of = names.setdefault(first[earlier].file.name, [])
        copies_of.append(first[position].file.name)
    return names


def _digest(pictures: Sequence[ImportedPicture]) -> str:
    digest = hashlib.sha256()
    for picture in pictures:
        digest.update(hashlib.sha256(picture.file.read_bytes()).digest())
    return digest.hexdigest()[:16]


_OF_WORK = (
    *("steps", "guidance scale", "distilled guidance", "size", "denoising strength"),
    *("hires upscale", "hires steps", "refiner"),
)
"""Settings by which calls do more or less."""


def _work_of(side: _Side, baseline: bool) -> dict[str, str]:
    """Returns a digest of what the baseline's calls did, by which two results tell whether it is the same; or {}."""
    told: set[tuple[str | None, ...]] = set()
    for picture in side.pictures:
        settings = picture.origin.settings
        if settings:
            told.add(tuple(map(settings.get, _OF_WORK)))
    if not baseline or not told:
        return {}
    return {"settings": short_digest(repr(sorted(told, key=str)).encode())}


def _require_pictures(first: ImportedPicture, side: _Side) -> None:
    """Raises UsageError if a file is no finished image, or larger or smaller than the first one of the baseline."""
    size = first.looks.size
    for picture in side.pictures:
        what = _unfinished(picture)
        if what:
            raise UsageError(
                f"{picture.file}: {what}, which would count as a generated image; keep the finished ones alone in "
                f"{side.folder}"
            )
        other = picture.looks.size
        if other != size:
            why = f" ({', '.join(side.unlike)})" if side.unlike else ""
            raise UsageError(
                f"{picture.file}: is {other[0]}×{other[1]}, and {first.file} {size[0]}×{size[1]}{why}; compare one size"
            )


_BESIDE = re.compile(r"-(?:before-[a-z-]+|ad-before|ad-preview[\w-]*|mask-composite)$")
"""How A1111 and ADetailer name what they save of an image before a further pass, or of the part that it is of."""


def _unfinished(picture: ImportedPicture) -> str:
    """Returns what a file is that programs leave beside their images; "" for an image."""
    if picture.looks.black_and_white:
        return "has black and white alone, as a mask or the input of a ControlNet"
    if _BESIDE.search(picture.file.stem):
        return "is a copy that was saved before the image was finished"
    return ""


def _require_chance_alone(first: Sequence[ImportedPicture], side: _Side) -> None:
    """Checks that a second folder of the baseline was made like the first: its difference is to be chance.

    Raises:
        UsageError: settings or file formats differ.
    """
    mine = common_format(picture.written for picture in first)
    other = common_format(picture.written for picture in side.pictures)
    unlike = list(side.unlike)
    name = other.named_beside(mine)
    if name != mine.name and (mine.lossy or other.lossy):
        unlike.append(f"files: {name} (baseline {mine.name})")
    if unlike:
        raise UsageError(
            f"{side.folder}: was not made like the baseline, so that more than chance would differ: "
            f"{', '.join(unlike)}; make it with the same settings, and save both as PNG"
        )


def _comparison(row: VariantResult) -> Comparison:
    return Comparison(row.name, BASELINE, "nothing" if row.is_control else row.name)


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns a name for each folder: the shortest end of its path by which it differs from the others."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len({*names, BASELINE, AGAIN}) == len(names) + 2:
            return names
    if folders:
        raise UsageError(f"{folders[0]}: its name is that of another; rename it")
    return []


def _names_beside(sides: Sequence[_Side]) -> list[str]:
    """Returns the names that programs and tables of times give to what may differ on purpose."""
    origins = []
    for side in sides:
        origins += [picture.origin for picture in side.pictures]
    names: list[str] = []
    for origin in origins:
        names += origin.others
    names += [LINKS] if any(origin.wiring for origin in origins) else []
    for side in sides:
        names += names_of_columns(side.times.rows)
    return list(dict.fromkeys(names))


def _configs(
    sides: Sequence[_Side], config: RecordedConfig
) -> dict[str, RecordedConfig]:
    """Returns a configuration for each folder: where calls made different numbers of images, times are those of one."""
    configs = {}
    for side in sides:
        workload = replace(config.workload, batch_size=side.times.images or 1)
        configs[side.name] = replace(config, workload=workload)
    known = {side.times.images for side in sides if side.times.rows}
    if None in known or len(known) < 2:
        return dict.fromkeys(configs, config)
    return configs


def _claims(sides: Sequence[_Side]) -> list[str]:
    """Returns what candidates are to gain: in speed and in memory, as far as every folder tells it."""
    claims = []
    for claim, name in (("latency", "seconds"), ("memory", "memory_gib")):
        if all(side.times.tells(name) for side in sides):
            claims.append(claim)
    return claims


def _copied(
    side: _Side,
    first: Sequence[ImportedPicture],
    output: Path,
    number: int,
    copies: Mapping[str, list[str]],
) -> list[ImageRecord]:
    """Copies the images of a folder to the study's; they keep the baseline's prompts and seeds.

    `copies` are the names of the baseline's files that are copies, by that of the file that counts.
    """
    asked = [
        (picture.prompt or picture.file.stem, picture.negative) for picture in first
    ]
    numbers = {
        prompt_asked: number for number, prompt_asked in enumerate(dict.fromkeys(asked))
    }
    counts: dict[int, int] = {}
    target = output / "images" / f"{number:02d}"
    target.mkdir(parents=True, exist_ok=True)
    records: list[ImageRecord] = []
    for mine, theirs, prompt_asked in zip(side.pictures, first, asked, strict=True):
        prompt = numbers[prompt_asked]
        path = target / f"{len(records):05d}{mine.file.suffix.lower()}"
        shutil.copyfile(mine.file, path)
        image = counts[prompt] = counts.get(prompt, -1) + 1
        records.append(
            ImageRecord(
                theirs.prompt or "", prompt, image, theirs.seed or 0, str(path.relative_to(output)),
                negative=theirs.negative, digest=digest_of(path), file=theirs.file.name,
                copies=copies.get(theirs.file.name, []),
            )
        )  # fmt: skip
    return records


def judgeable(
    result: StudyResult, rules: dict[str, list[Rule]]
) -> tuple[dict[str, list[Rule]], list[str]]:
    """Returns the rules of a gate that can be applied to what was given, and the metrics of those that are left out."""
    claims = set[str]()
    for row in result.variants:
        claims.update(*(promise.claims for promise in row.promises.values()))
    left_out = ["latents_error"]
    left_out += [] if "latency" in claims else _OF_CALLS
    left_out += [] if "memory" in claims else ["memory_ratio"]
    left_out += (
        []
        if all(record.prompt for record in result.baseline_variant.images)
        else ["clip_score"]
    )
    applied = {}
    for contract, of_contract in rules.items():
        applied[contract] = [r for r in of_contract if r.metric not in left_out]
    metrics = set[str]()
    for candidate in result.candidates:
        metrics.update(rule.metric for rule in rules.get(candidate.contract, []))
    return applied, [name for name in left_out if name in metrics]
