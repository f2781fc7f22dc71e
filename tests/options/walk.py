"""What every option does on every tiny pipeline of a transformer: tried, kept as data, and written as a table.

`python -m tests.options.walk` tries all and writes `outputs/records/transformers/`; with names of pipelines or options,
such as `flux attention`, it tries those alone. Each option is applied and proved as a program does it, with two prompts
of different lengths in a batch, as a study's quality pass has.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import sdopt
from sdopt.config.groups import data_sheets, optimization_options
from sdopt.config.paths import CONF
from sdopt.errors import ConflictError, UnavailableError, UsageError
from sdopt.hardware.cards import planned_device
from sdopt.options.base import Context, Optimization
from sdopt.options.magcache import Magnitudes, magnitudes_as_json
from sdopt.pipelines.family import family_named
from sdopt.pipelines.loading import LoadedModel, guidance_of
from sdopt.report.markdown import markdown
from sdopt.schema import Scheduler, Workload
from tests.fixtures import CPU
from tests.reference import axis_of, class_of

FOLDER = CONF.parent / "outputs" / "records" / "transformers"

PROMPTS = ["a red circle", "a much longer prompt about a blue house at dawn"]

CARD = "h200"
"""The data sheet of the card whose features an option may lack here."""

ELSEWHERE = ("patch",)
"""Groups whose options are a program's own."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    # With random weights, no two steps are alike.
    "caching=first_block": ("caching.threshold=10",),
    "caching=taylorseer": ("caching.warmup=2",),
    "caching=magcache": ("caching.threshold=10",),
    "caching=dbcache": ("caching.threshold=0.99", "caching.warmup=2"),
}
"""Keys without which an option would do nothing to pictures this small with random weights."""


@dataclass(frozen=True)
class Cell:
    """What an option did on a pipeline.

    Attributes:
        outcome: `took effect`; `no effect` by its own proof; `refused`; `needs a card`, on which nothing is known to be
            in its way; `needs a file`, which has to be named or fetched; `failed` with an error that is no refusal.
        why: the proof's line, or the reason.
    """

    outcome: str
    why: str


SIGNS = {
    "took effect": "✓",
    "no effect": "∅",
    "refused": "–",
    "needs a card": "card",
    "needs a file": "file",
    "failed": "✗",
}


ALONE = {"caching=dbcache"}
"""Options that take one prompt a call, so that they are not tried with two in a batch."""

PACKAGES_OF = {
    "caching=dbcache": "cache_dit",
    "compiler=onnxruntime": "onnxruntime",
    "compiler=openvino": "openvino",
    "precision=nf4_bitsandbytes": "bitsandbytes",
}
"""Packages that options need, and that may not be installed where the table is checked."""


def chosen_options() -> list[tuple[str, str]]:
    """Returns the options to try, by group and name."""
    return sorted(
        option for option in optimization_options() if option[0] not in ELSEWHERE
    )


def every_option() -> dict[str, tuple[str, Optimization]]:
    """Returns the axis and the option of each yaml file, by what chooses it."""
    options = {}
    for group, name in optimization_options():
        file = CONF / group / f"{name}.yaml"
        cls: Any = class_of(group, file)
        node: Any = OmegaConf.to_container(OmegaConf.load(file))
        keys = {key: value for key, value in node.items() if key != "_target_"}
        options[f"{group}={name}"] = axis_of(file), cls(**keys)
    return options


def tried(pipeline: str, chosen: str, axis: str, option: Optimization) -> Cell:
    """Applies an option to a pipeline and proves it; returns what came of it."""
    from tests.pipelines.tiny import tiny

    pipe = tiny(pipeline)
    prompts = PROMPTS[: batch_of(chosen)]
    on_card = context_on_card(pipe, {axis: option}, len(prompts))
    reasons = option.obstacles(replace(on_card, device=CPU)) or option.broken(pipe)
    if reasons:
        return Cell(
            "refused"
            if option.obstacles(on_card) or option.broken(pipe)
            else "needs a card",
            reasons[0],
        )
    call = call_of(pipe, len(prompts))
    group, _, name = chosen.partition("=")
    groups: Any = {group: [name] if group == "memory" else name}
    try:
        with (
            contextlib.redirect_stderr(io.StringIO()),
            tempfile.TemporaryDirectory() as folder,
        ):
            settings = [*SETTINGS.get(chosen, ())]
            if chosen == "caching=magcache":
                file = measured_ratios(tiny(pipeline), call, Path(folder))
                settings.append(f"caching.path={file}")
            sdopt.optimize(pipe, *settings, prompts=[*PROMPTS, ""], **groups)
            report = sdopt.prove(pipe, prompts, **call, output_type="np")
    except (ConflictError, UsageError) as error:
        why = error.problems[0].removeprefix(f"{chosen}: ")
        return Cell(
            "needs a file", why.partition(" (")[0]
        )  # without the path of a cache
    except UnavailableError as error:
        return Cell("failed", plain_line(str(error)))
    except Exception as error:  # whatever a library raises is what the table has to say
        return Cell("failed", plain_line(f"{type(error).__name__}: {error}"))
    if report.broken:
        return Cell("failed", report.broken)
    [evidence] = report.evidence
    return Cell("took effect" if report.engaged else "no effect", evidence.summary)


def call_of(pipe: Any, prompts: int) -> dict[str, Any]:
    """Returns the arguments of a small call that is guided, without its prompts."""
    family = family_named(type(pipe).__name__)
    call = {**family.call, "height": 64, "width": 64, family.guidance.argument: 4.0}
    if family.guidance.needs_negative:
        call["negative_prompt"] = [""] * prompts
    return call


def plain_line(error: str) -> str:
    """Returns the first line of an error without colours of a terminal, and without folders of this machine."""
    line = re.sub(r"\x1b\[[\d;]*m", "", error.splitlines()[0])
    return re.sub(r"/\S+/(?=\S+\.onnx)", "", line)


def measured_ratios(pipe: Any, call: Mapping[str, Any], folder: Path) -> Path:
    """Measures the ratios that MagCache needs of a pipeline, for six steps; returns their file."""
    sdopt.optimize(pipe, "caching.measure=true", caching="magcache")
    report = sdopt.prove(pipe, PROMPTS, **call, num_inference_steps=6, output_type="np")
    file = folder / "ratios.json"
    file.write_bytes(
        magnitudes_as_json(Magnitudes("tiny", 6, **report.evidence[0].facts))
    )
    return file


def is_installed(chosen: str) -> bool:
    """Returns whether the package that an option needs is there."""
    return chosen not in PACKAGES_OF or find_spec(PACKAGES_OF[chosen]) is not None


def batch_of(chosen: str) -> int:
    """Returns the number of prompts with which an option is tried."""
    return 1 if chosen in ALONE else len(PROMPTS)


def context_on_card(pipe: Any, options: Mapping[str, Any], batch: int = 2) -> Context:
    """Returns from what options decide on a card whose features include all that a card may have."""
    from sdopt.pipelines.factory import configs_of

    name = type(pipe).__name__
    model = LoadedModel(
        "pipeline", "path", size=64, class_name=name, configs=configs_of(pipe)
    )
    scale = guidance_of(model).above + 3
    workload = Workload(size=64, batch_size=batch, guidance_scale=scale)
    scheduler = Scheduler(type(pipe.scheduler).__name__)
    return Context(
        planned_device(data_sheets()[CARD]), model, workload, options, scheduler
    )


def walked(
    pipelines: Sequence[str],
    only: Sequence[str] = (),
    kept: Mapping[str, Mapping[str, Cell]] | None = None,
) -> Iterator[tuple[str, str, Cell]]:
    """Yields pipeline, option and what came of it, of those options that begin as one of `only`.

    Those that are in `kept` are not tried again.
    """
    options = every_option()
    for pipeline in pipelines:
        for group, option in chosen_options():
            name = f"{group}={option}"
            if pipeline in (kept or {}).get(name, ()):
                continue
            if not only or name.startswith(tuple(only)):
                yield pipeline, name, tried(pipeline, name, *options[name])


def read() -> dict[str, dict[str, Cell]]:
    """Returns what was kept: the cells by option and pipeline."""
    kept = json.loads((FOLDER / "options.json").read_text(encoding="utf-8"))["options"]
    return {
        option: {name: Cell(**cell) for name, cell in row.items()}
        for option, row in kept.items()
    }


def page(cells: Mapping[str, Mapping[str, Cell]], versions: Mapping[str, str]) -> str:
    """Returns the table of options and pipelines, with a numbered note for each reason."""
    from tests.pipelines.tiny import TINY

    notes: dict[str, int] = {}
    rows = []
    for option, row in cells.items():
        rows.append([f"`{option}`", *(_shown(row.get(name), notes) for name in TINY)])
    said = ", ".join(f"{name} {number}" for name, number in versions.items())
    reasons = "\n".join(f"{number}. {why}" for why, number in notes.items())
    return (
        "\n\n".join(
            [
                _ABOUT,
                markdown(("option", *TINY), rows).rstrip(),
                reasons,
                f"With {said}.",
                _WRITTEN,
            ]
        )
        + "\n"
    )


def _shown(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return ""
    if cell.outcome == "took effect":
        return SIGNS[cell.outcome]
    return f"{SIGNS[cell.outcome]} {notes.setdefault(_in_common(cell.why), len(notes) + 1)}"


def _in_common(why: str) -> str:
    """Returns a reason without the names by which it would differ from one kind of pipeline to the other."""
    own = re.sub(r"^not for .+?, whose denoiser is a transformer: ", "", why)
    return re.sub(r"\w+Transformer2DModel", "transformer", own)


_ABOUT = """\
# Options on diffusion transformers

Each option on each kind of pipeline, as tried on a CPU: the pipelines have the published classes, half a million
parameters and random weights, and were called with two prompts of different lengths in a batch, and with one where an
option takes no batch.

**✓** took effect, as its proof shows from the trace of a call. **∅** ran without effect, which the proof says too.
**–** is refused before anything is changed. **card**: nothing is in its way on an NVIDIA H200 by its data sheet, and a
CPU cannot try it. **file**: needs one to be named or fetched. **✗** fails in its first call, which says so. Numbers
name the reasons below. What each proof saw is in [options.json](options.json)."""

_WRITTEN = "<!-- Written by python -m tests.options.walk -->"

PACKAGES = ("diffusers", "transformers", "torch")

LOUD = {
    "compiler=aot": {"lumina2", "qwen_image", "z_image"},
    # Sana's graph draws what is not finite, which the check of its images says.
    "compiler=onnxruntime": {"lumina2", "pixart", "qwen_image", "sana", "z_image"},
    "compiler=openvino": {"lumina2", "z_image"},
}
"""Pipelines of which an option fails with an error in the first call: those that they cannot export, or load."""


def write(cells: Mapping[str, Mapping[str, Cell]], folder: Path = FOLDER) -> None:
    """Writes data and page."""
    versions = {name: version(name) for name in PACKAGES}
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        option: {name: asdict(cell) for name, cell in row.items()}
        for option, row in sorted(cells.items())
    }
    text = json.dumps(
        {"versions": versions, "options": plain}, indent=1, ensure_ascii=False
    )
    (folder / "options.json").write_text(f"{text}\n", encoding="utf-8")
    (folder / "README.md").write_text(
        page(dict(sorted(cells.items())), versions), encoding="utf-8"
    )


def main(argv: Sequence[str]) -> int:
    """Tries options on pipelines, adds what came of it to what is kept, and writes data and page."""
    from tests.pipelines.tiny import TINY

    parser = argparse.ArgumentParser(prog="python -m tests.options.walk")
    parser.add_argument(
        "names", nargs="*", help="pipelines, and how options begin; all without any"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only what was not tried yet"
    )
    arguments = parser.parse_args(argv)
    pipelines = [name for name in arguments.names if name in TINY] or list(TINY)
    only = [name for name in arguments.names if name not in TINY]
    kept = read() if (FOLDER / "options.json").is_file() else {}
    before = (
        {option: dict(row) for option, row in kept.items()}
        if arguments.missing
        else None
    )
    for pipeline, option, cell in walked(pipelines, only, before):
        print(
            f"{time.strftime('%X')} {pipeline:10} {option:32} {cell.outcome}: {cell.why[:150]}",
            flush=True,
        )
        kept.setdefault(option, {})[pipeline] = cell
        write(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
