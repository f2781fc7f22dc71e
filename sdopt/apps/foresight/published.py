"""Reads published figures: a CSV file whose rows give a time or a memory of one device, with settings and software.

What people wrote freely (device, model, software) is read by words. A row that cannot be read, or that the model does
not describe, is refused with a reason instead of being guessed at.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from sdopt.apps.foresight.names import cards_named
from sdopt.apps.foresight.software import Software
from sdopt.apps.foresight.storage import Storage
from sdopt.apps.foresight.transformer_rows import (
    architecture_of,
    is_guided,
    is_transformer,
    is_undistilled,
    memory_kind,
    moves_layers,
    runs_twice,
    software_of_row,
    storage_of_row,
    why_untimed,
)
from sdopt.config.groups import data_sheets
from sdopt.errors import UsageError
from sdopt.pipelines.catalog import ARCHITECTURES, read_json
from sdopt.pipelines.families import family_of_folder, guidance_from
from sdopt.pipelines.family import Family
from sdopt.schema import Sheet
from sdopt.text_files import read_text

T = TypeVar("T")

COLUMNS = (
    "source", "gpu", "model", "width", "height", "steps", "batch", "precision", "backend", "metric", "value", "unit",
    "note",
)  # fmt: skip

CALL, STEP, IMAGE, UNET, VAE, TEXT = "call", "step", "image", "unet", "vae", "text"
"""What a time is of: a call, a step of it, or an image of it in a stream of full batches; or one network of a call."""

_TIMES = {
    "latency_s": CALL,
    "latency_p90_s": CALL,
    "steps_per_s": STEP,
    "steps_times_batch_per_s": CALL,
    "images_per_s_per_accelerator": IMAGE,
    "images_per_s": IMAGE,
    "seconds_per_image": IMAGE,
    "stage_ms": "stage",
}

_MEMORIES: Mapping[str, str] = {
    "memory_reserved_gb": "reserved",
    "memory_allocated_gb": "allocated",
    "gpu_memory_gb": "device",
}

_PARTS = _TIMES | dict.fromkeys(_MEMORIES, CALL)

STREAM_BATCH = 8
"""Images of a batch where a throughput is given without one."""


@dataclass(frozen=True)
class PublishedWork:
    """What a figure is of: enough to count its operations.

    Attributes:
        architecture: of those that come with sdopt, such as `sd15` or `flux_dev`.
        batch: images of a call.
        samples: of the denoiser per image and call of it: 2 with guidance in one call.
        part: what a time is of, `call`, `step`, `image`, or a network.
        sliced: whether the VAE decodes one image at a time.
        tiny: whether a tiny autoencoder decodes.
        calls: of the denoiser in a step: 2 with guidance in two calls.
        storage: how the weights of a transformer's pipeline are stored.
    """

    architecture: str
    width: int
    height: int
    steps: int
    batch: int
    samples: int = 2
    part: str = CALL
    sliced: bool = False
    tiny: bool = False
    calls: int = 1
    storage: Storage = field(default_factory=Storage)


def upcasts_vae(work: PublishedWork, software: Software) -> bool:
    """Returns whether a library decodes in float32 what it draws in float16, which overflows in SDXL's autoencoder."""
    half = software.application == "library" and software.precision == "fp16"
    return half and work.architecture == "sdxl" and not work.tiny


@dataclass(frozen=True)
class Figure:
    """One published figure.

    Attributes:
        line: of the file.
        gpu: the device as written.
        card: the name of its data sheet in `hardware=`.
        seconds: the time, if it is one.
        gib: the memory, if it is one.
        memory: which memory: `reserved`, `allocated`, `device`, or that of `weights` alone.
        repository: of its publisher, whose figures are of one setting.
    """

    line: int
    publisher: str
    gpu: str
    card: str
    work: PublishedWork
    software: Software
    seconds: float = math.nan
    gib: float = math.nan
    memory: str = ""
    repository: str = ""

    @property
    def sheet(self) -> Sheet:
        """The data sheet of its card."""
        return data_sheets()[self.card]


def read_figures(path: Path) -> tuple[list[Figure], list[str]]:
    """Reads a file of published figures.

    Returns:
        The figures, and why each other row is none.

    Raises:
        UsageError: the file cannot be read, or lacks a column.
    """
    figures: list[Figure] = []
    refusals: list[str] = []
    names = Names()
    try:
        reader = csv.DictReader(StringIO(read_text(path), newline=""))
        lacking = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if lacking:
            raise UsageError(
                f"{path}: lacks the column {lacking[0]}; its columns must be {','.join(COLUMNS)}"
            )
        for line, row in enumerate(reader, 2):
            try:
                figures.append(
                    _figure(
                        line,
                        {name: (row[name] or "").strip() for name in COLUMNS},
                        names,
                    )
                )
            except _RefusedError as reason:
                refusals.append(str(reason))
    except (OSError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    return figures, refusals


class _RefusedError(Exception):
    """Why a row cannot be read or predicted."""


def _figure(line: int, row: Mapping[str, str], names: "Names") -> Figure:
    card = names.card(row["gpu"])
    if card is None:
        raise _RefusedError("no data sheet")
    value, tokens = _positive(row["value"], "value"), is_transformer(row["model"])
    work, software = (
        _of_transformer(row)
        if tokens
        else (_work(row), Software.read(row["backend"], row["precision"]))
    )
    if isinstance(software, str):
        raise _RefusedError(software)
    publisher, repository = publisher_of(row["source"]), repository_of(row["source"])
    figure = Figure(
        line, publisher, row["gpu"], card, work, software, repository=repository
    )
    metric, unit = row["metric"], row["unit"].lower()
    if metric in _MEMORIES:
        kind = (
            memory_kind(row)
            if tokens and metric == "gpu_memory_gb"
            else _MEMORIES[metric]
        )
        return replace(
            figure, gib=value * _in_table(unit, _BYTES, "unit") / 2**30, memory=kind
        )
    return replace(figure, seconds=_seconds(metric, value, unit, work))


def _of_transformer(row: Mapping[str, str]) -> tuple[PublishedWork, Software]:
    """Returns the work and the software of a figure of a transformer. Raises _RefusedError if they cannot be told."""
    architecture = architecture_of(row["model"])
    if architecture is None:
        raise _RefusedError(f"unknown model '{row['model']}'")
    software, timed = software_of_row(row), row["metric"] not in _MEMORIES
    if software is None:
        raise _RefusedError(f"unknown precision '{row['precision']}'")
    storage, part = storage_of_row(row), _in_table(row["metric"], _PARTS, "metric")
    reason = (
        why_untimed(row)
        if timed
        else "it moves weights in each step"
        if moves_layers(row)
        else ""
    )
    if reason or (timed and storage.offload):
        raise _RefusedError(reason or "its host moves weights, how fast is not known")
    if part not in (CALL, STEP, IMAGE):
        raise _RefusedError("no time of a call")
    width, height = (int(_positive(row[name], name)) for name in ("width", "height"))
    if (
        width % 16
        or height % 16
        or not _SIZES[0] <= min(width, height) <= max(width, height) <= _SIZES[1]
    ):
        raise _RefusedError(f"unknown size {row['width']}×{row['height']}")
    steps = int(
        _positive(row["steps"] or ("50" if part == STEP or not timed else ""), "steps")
    )
    batch = int(_positive(row["batch"] or "1", "batch"))
    family, configs = _configs(architecture)
    guidance = guidance_from(family, configs)
    if is_undistilled(row["model"]):
        guidance = family.guidance
    scale = 2 + guidance.above if is_guided(row) else guidance.above
    calls, samples = guidance.calls_a_step(scale), guidance.samples_a_call(scale)
    if guidance.form == "embedded" and runs_twice(row):
        calls = 2
    work = PublishedWork(
        architecture,
        width,
        height,
        steps,
        batch,
        samples,
        part,
        calls=calls,
        storage=storage,
    )
    return work, software


def _configs(architecture: str) -> tuple[Family, dict[str, dict[str, Any]]]:
    """Returns the family of an architecture, and the configurations that say how it is guided."""
    folder = ARCHITECTURES / architecture
    family = family_of_folder(folder)
    index, denoiser = (
        read_json(folder / name)
        for name in ("model_index.json", f"{family.denoiser}/config.json")
    )
    return family, {"": index, family.denoiser: denoiser}


_BYTES = {"gb (1e9)": 1e9, "gb": 2**30, "gib": 2**30, "mb": 2**20, "mib": 2**20}


def _seconds(metric: str, value: float, unit: str, work: PublishedWork) -> float:
    """Returns the time of the work's part that a value means."""
    if metric == "steps_times_batch_per_s":
        return work.steps * work.batch / value
    if metric in ("steps_per_s", "images_per_s_per_accelerator", "images_per_s"):
        return 1 / value
    return value * _in_table(unit, {"s": 1.0, "ms": 1e-3}, "unit")


def _work(row: Mapping[str, str]) -> PublishedWork:
    """Returns the work of a row. Raises _RefusedError if it cannot be told."""
    model, note, backend = (
        row["model"].lower(),
        row["note"].lower(),
        row["backend"].lower(),
    )
    for pattern, text, reason in (
        ("controlnet", f"{note} {model}", "ControlNet is not described"),
        (
            r"sd ?3|flux|pixart|cascade|refiner",
            model,
            f"unknown model '{row['model']}'",
        ),
        (
            r"t-?gate|hypertile|deepcache|\btoma\b|consistency decoder|minsdxl",
            backend,
            f"the software '{row['backend']}' is not described",
        ),
        (r"tome(?!.*r=0%)", backend, "token merging is not described"),
    ):
        if re.search(pattern, text):
            raise _RefusedError(reason)
    if not re.search(r"\bsd\b|\bsd[ -]?(xl|[12])|stable diffusion|sdxl", model):
        raise _RefusedError(f"unknown model '{row['model']}'")
    width, height = (int(_positive(row[name], name)) for name in ("width", "height"))
    if (
        width % 8
        or height % 8
        or min(width, height) < _SIZES[0]
        or max(width, height) > _SIZES[1]
    ):
        raise _RefusedError(f"unknown size {row['width']}×{row['height']}")
    part = _in_table(row["metric"], _PARTS, "metric")
    if part == "stage":
        part = _in_table(
            note.partition(" ")[0], {"clip": TEXT, "unet": UNET, "vae": VAE}, "stage"
        )
    # A rate of steps does not depend on their number.
    steps = int(_positive(row["steps"] or ("50" if part == STEP else ""), "steps"))
    batch = int(
        _positive(row["batch"] or str(STREAM_BATCH if part == IMAGE else 1), "batch")
    )
    single = re.search(r"turbo|lightning|hyper|lcm", model) or re.search(
        r"no guidance|guidance (1\b|off)", note
    )
    return PublishedWork(
        "sdxl"
        if "xl" in model
        else "sd21"
        if re.search(r"\b2\.|sd turbo|sd 2", model)
        else "sd15",
        width,
        height,
        steps,
        batch,
        samples=1 if single else 2,
        part=part,
        sliced="vae slicing when batch > 16" in note and batch > _SLICED_ABOVE,
        tiny="taesd" in backend or "tiny vae" in backend,
    )


_SIZES = (64, 4096)

_SLICED_ABOVE = 16


def _positive(text: str, name: str) -> float:
    """Reads a positive number, or raises _RefusedError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise _RefusedError(
            f"its {name} is no positive number: '{text}'"
            if text
            else f"its {name} is not stated"
        )
    return number


def _in_table(key: str, table: Mapping[str, T], name: str) -> T:
    """Looks a word up, or raises _RefusedError."""
    if key not in table:
        raise _RefusedError(f"unknown {name} '{key}'")
    return table[key]


def repository_of(source: str) -> str:
    """Returns the owner and repository, or the page of a site, that a source begins with."""
    return (
        re.split(r"[:@ ?]", re.sub(r"^https?://", "", source.strip()))[0].removesuffix(
            "/"
        )
        or "unknown"
    )


def publisher_of(source: str) -> str:
    """Returns who published a figure: the owner of the repository that a source begins with, or the site.

    Repositories of one owner share machines and habits: they are one publisher.
    """
    owner, _, rest = repository_of(source).partition("/")
    return (
        f"{owner}/{rest.partition('/')[0]}".removesuffix("/") if "." in owner else owner
    )


class Names:
    """Finds a card's data sheet by a name as people write it."""

    def __init__(self) -> None:
        self._cards: dict[str, str] = {}
        for card, sheet in data_sheets().items():
            for name in (*sheet.device_names, sheet.name, card.replace("_", " ")):
                for form in forms(name):
                    self._cards.setdefault(form, card)
        # A name without form factor stands for the card that most people mean by it.
        for name, card in _USUAL.items():
            self._cards.setdefault(plain(name), card)

    def card(self, name: str) -> str | None:
        """Returns the card of a name; None if there is none. Of several, it is the one that most people mean."""
        named = _cards_named(name)
        if len(named) == 1:
            return named[0]
        return next(
            (card for form in forms(name) if (card := self._cards.get(form))), None
        )


@cache
def _cards_named(name: str) -> list[str]:
    return cards_named(name, data_sheets())


_USUAL = {
    "A100": "a100_40",
    "A800": "a800",
    "H800": "h800",
    "A100 SXM4 80GB": "a100_80",
    "A100 80GB": "a100_80",
    "A100-40GB": "a100_40",
    "H100": "h100",
    "H100 SXM": "h100",
    "H100-SXM-80GB": "h100",
    "H200 SXM": "h200",
    "V100": "v100",
    "V100 SXM2": "v100",
    "P100": "p100",
    "B200 SXM": "b200",
    "MI250 1 GCD": "mi250",
    "GTX 1060": "gtx1060",
    "TITAN X": "titan_x_pascal",
}


def plain(name: str) -> str:
    """Returns a name without case, makers, series and punctuation."""
    text = re.sub(r"\(r\)|\(tm\)|®|™", " ", name.lower())
    text = re.sub(r"[^a-z0-9.]+", " ", text)
    text = re.sub(
        r"\b(nvidia|amd|geforce|tesla|quadro|radeon|instinct|graphics|gpu|pcie \d+ ?gb|generation|"
        r"virtualized|card|edition)\b",
        lambda found: "pcie" if found[0].startswith("pcie") else " ",
        text,
    )
    return " ".join(
        re.sub(
            r"(?<=[a-z])(?=\d{4})|(?<=\d{4})(?=(ti|super|xtx|xt)\b)", " ", text
        ).split()
    )


def forms(name: str) -> Iterator[str]:
    """Yields the plain forms of a name: whole, and without the size and kind of its memory."""
    whole = plain(name)
    yield whole
    bare = " ".join(re.sub(r"\b\d+ ?gb?\b|\bhbm\w+", " ", whole).split())
    yield bare
    yield " ".join(re.sub(r"\b(pcie|sxm\d?)\b", " ", bare).split())
