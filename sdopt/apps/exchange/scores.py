"""Gives out a study's images and times as folders that `sdopt judge` reads, and takes in scores of its images.

A table of scores has a row for each image: `variant` and `file`, as in the `images.csv` that `export` writes, or
`variant`, `prompt` and `seed`; every other column is a metric.
"""

import csv
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdopt.apps.exchange.own import settings_of_variant
from sdopt.apps.exchange.pictures import ImportedRow, columns_of, read_table
from sdopt.apps.exchange.times import TIMES
from sdopt.errors import UnavailableError, UsageError, os_problem
from sdopt.quality.by_prompt import by_prompt
from sdopt.quality.metrics import slug
from sdopt.record.files import inside
from sdopt.record.images import remarks_on_images
from sdopt.record.records import StudyResult, VariantResult
from sdopt.record.scores import ImageRecord, Score

_IMAGES = "images.csv"

_COLUMNS = ("variant", "file", "prompt", "negative_prompt", "seed")

_INDEX = re.compile(r"(unnamed: \d+|index)?")
"""The number of a row, which pandas adds when it writes a table, and names when it reads it again."""


_LESS = re.compile(
    r"(?:^|_)(?:(?:st_?)?lpips|dists|[a-z]*fid\d*k?|fd|fdd|kid|c?mmd|n?r?mse|mae|l[12]|il_?niqe|niqe|brisque|piqe|"
    r"pieapp|dreamsim|dssim|gmsd|mdsi|nlpd|flip|delta_?e\w*|ciede\w*|wasserstein|kl|js|loss|errors?|distance|"
    r"artifacts?|ranks?|swd|ppl|perplexity|toxicity|nsfw|seconds|latency|time|ms)(?:_|$)"
)
"""Words in the names of metrics of which less is better."""


def export(result: StudyResult, folder: Path, target: Path) -> None:
    """Writes a folder for each variant that has images, with `prompts.csv` and `times.csv`, and a list of all images.

    Times are per image, since folders of several studies may be held against each other.

    Raises:
        UsageError: the study has no images, one was replaced since it was recorded, or the target holds something.
        UnavailableError: the target cannot be written.
    """
    pictured = [variant for variant in result.variants if variant.images]
    if not pictured:
        raise UsageError(
            f"{folder}: has no images to export; measure with quality=default"
        )
    if replaced := remarks_on_images(result, folder):
        raise UsageError(replaced)
    require_new(target)
    try:
        listed = []
        for variant in pictured:
            listed += _written(result, variant, folder, target)
        _write(target / _IMAGES, _COLUMNS, listed)
    except OSError as error:
        raise UnavailableError(os_problem(error, target)) from error


def require_new(target: Path) -> None:
    """Raises UsageError if a folder to export to holds something."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            f"--export {target}: holds something already; choose a new folder"
        )


def folder_name(variant: str) -> str:
    """Returns a variant's name as that of a folder."""
    return re.sub(r"[^\w.+=()-]+", "_", variant).strip("._") or "variant"


def _written(
    result: StudyResult, variant: VariantResult, folder: Path, target: Path
) -> list[list[Any]]:
    images = variant.config.images_per_call
    images_folder = target / folder_name(variant.name)
    while images_folder.exists():  # another variant's name differs only by signs
        images_folder = images_folder.with_name(f"{images_folder.name}_")
    images_folder.mkdir(parents=True)
    rows = []
    for record in variant.images:
        source = inside(folder, record.path)
        name = f"{record.prompt_index:05d}_{record.image_index:02d}{source.suffix}"
        shutil.copyfile(source, images_folder / name)
        rows.append([variant.name, name, record.prompt, record.negative, record.seed])
    settings = settings_of_variant(result, variant)
    listed = [[*row[1:], *settings.values()] for row in rows]
    _write(images_folder / "prompts.csv", [*_COLUMNS[1:], *settings], listed)
    where = _where(result, variant)
    timed = []
    for process in variant.measurements:
        peak = "" if process.peak is None else process.peak[1]
        for call in process.shapes[0].calls:
            if not call.left_out:
                seconds = call.seconds / images
                place = process.replicate, call.round
                timed.append([*where.values(), *place, seconds, peak])
    if timed:
        _write(
            images_folder / TIMES,
            (*where, "replicate", "round", "seconds", "memory_gib"),
            timed,
        )
    return rows


def _where(result: StudyResult, variant: VariantResult) -> dict[str, Any]:
    """Returns what calls of two machines or versions are not compared by; see `study.TIMES`."""
    if result.is_imported:
        return {}
    environment = result.environment
    memory_gib = ""
    if environment.device.get("type") == "cuda":
        memory_gib = str(round(environment.device.get("memory_total_gib", 0)) or "")
    return {
        "device": environment.device.get("name"),
        # One name may stand for cards of several memories, and of other rates with them.
        "device_memory_gib": memory_gib,
        "driver": environment.device.get("driver") or "",
        "cpu": environment.cpu.get("name") or "",
        "torch": environment.packages.get("torch", ""),
        "threads": variant.config.hardware.threads
        or environment.cpu.get("threads", ""),
    }


def _write(file: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([names, *rows])


def import_scores(
    result: StudyResult, table: Path, lower_is_better: Collection[str]
) -> list[str]:
    """Adds scores of images by another program to a study's variants, and returns the names of the metrics.

    A metric is named `score_…` if more is better, and `penalty_…` otherwise. Where it was there before, it is replaced;
    verdicts that rest on what it was before are dropped.

    Raises:
        UsageError: a row names no image of the study, or an image of a variant has no value.
    """
    rows = read_table(table)
    columns = [
        name
        for name in columns_of(rows)
        if name not in _COLUMNS and not _INDEX.fullmatch(name)
    ]
    lower = {name.lower() for name in lower_is_better}
    if unknown := sorted(lower - {*columns}):
        raise UsageError(
            f"--lower {','.join(unknown)}: {table} has no such column; it has {', '.join(columns) or 'none'}"
        )
    if not columns:
        raise UsageError(
            f"{table}: has no column of scores beside {', '.join(_COLUMNS)}"
        )
    _require_directions(table, columns, lower)
    kinds = dict.fromkeys(columns, "score") | dict.fromkeys(lower, "penalty")
    names = {column: f"{kind}_{slug(column)}" for column, kind in kinds.items()}
    if len({*names.values()}) < len(names):
        raise UsageError(
            f"{table}: of {', '.join(columns)} several would be one metric; rename them"
        )
    by_variant: dict[str, dict[str, ImportedRow]] = {}
    for row in rows:
        variant = result.variant(row.need("variant"))
        record = _image(variant, row)
        if record.path in by_variant.setdefault(variant.name, {}):
            raise UsageError(
                f"{row.place}: this image of '{variant.name}' has a row already"
            )
        by_variant[variant.name][record.path] = row
    before = {name: dict(result.variant(name).quality) for name in by_variant}
    for name, by_path in by_variant.items():
        variant = result.variant(name)
        if lacking := [
            record for record in variant.images if record.path not in by_path
        ]:
            raise UsageError(
                f"{table}: {len(lacking)} images of '{name}' have no row, as that of the seed {lacking[0].seed} and "
                f"the prompt '{lacking[0].prompt}'; a gate compares the same prompts"
            )
        prompts = [record.prompt_index for record in variant.images]
        for column, metric in names.items():
            values = [_value(by_path[record.path], column) for record in variant.images]
            for other in ("score", "penalty"):  # of an import with another --lower
                variant.quality.pop(f"{other}_{slug(column)}", None)
            variant.quality[metric] = by_prompt(prompts, values)
    _drop_verdicts(result, before)
    return list(names.values())


def _require_directions(
    table: Path, columns: Sequence[str], lower: Collection[str]
) -> None:
    """Raises UsageError for metrics of which less is better by their names: else a gate would ask for worse images."""
    untold = [
        name for name in columns if name not in lower and _LESS.search(slug(name))
    ]
    if untold:
        asked = ",".join((*sorted(lower), *untold))
        raise UsageError(
            f"{table}: of {', '.join(untold)} less is usually better: give --lower {asked}, or rename the column if "
            "more is better"
        )


def _drop_verdicts(
    result: StudyResult, before: Mapping[str, Mapping[str, Score]]
) -> None:
    """Drops the verdicts of a gate if they rest on scores that have changed; the looks that they took stay spent.

    `before` are the scores of variants as they were, by name.
    """
    changed: set[str] = set()
    for name, scores in before.items():
        now = result.variant(name).quality
        changed.update(metric for metric in scores if scores[metric] != now.get(metric))
    for judgement in result.judgements:
        if any(ruling.metric in changed for ruling in judgement.rulings):
            result.gate, result.judgements = "", []
            return


def _value(row: ImportedRow, column: str) -> float:
    value = row.number(column)
    if value is None:
        raise UsageError(
            f"{row.place}: no {column}; each image of a variant needs a score"
        )
    return value


def _image(variant: VariantResult, row: ImportedRow) -> ImageRecord:
    """Returns the image that a row is about. Raises UsageError if there is none, or several."""
    file, prompt, seed = row.text("file"), row.text("prompt"), row.whole("seed")
    if file is not None:
        stem = Path(file).stem
        fitting = [
            r
            for r in variant.images
            if stem == f"{r.prompt_index:05d}_{r.image_index:02d}"
        ]
    else:
        fitting = [r for r in variant.images if (r.prompt, r.seed) == (prompt, seed)]
    if len(fitting) != 1:
        what = (
            f"file {file}" if file is not None else f"prompt '{prompt}' and seed {seed}"
        )
        raise UsageError(
            f"{row.place}: '{variant.name}' has {len(fitting)} images of the {what}; name one by its file"
        )
    return fitting[0]
