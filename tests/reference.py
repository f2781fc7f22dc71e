"""Writes `conf/README.md`: every group, option and key, from the yaml files and the docstrings of their classes.

Beside it, `conf/MATRIX.md` says what records show of each option with each model and task, and what is impossible; and
a file says which speed-up a search expects of each option, from `outputs/records/`.
`python -m tests.reference` writes the pages of a checkout; `--check` fails if one is out of date.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from runners import Arguments, end_with_code
from runners.keys import key_rows, option_comment
from sdopt.apps.suite.outcomes import OptionOutcome, Standing
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets, default_options, optimization_options
from sdopt.config.parse import SECTIONS
from sdopt.config.paths import CONF, SHEETS, options_of
from sdopt.errors import UsageError
from sdopt.hardware.cards import ANY_CARD, planned_device
from sdopt.hardware.device import Device
from sdopt.options.base import Optimization
from sdopt.options.compiler import Eager
from sdopt.options.declarations import Excludes, Extra
from sdopt.record.records import StudyResult
from sdopt.report.markdown import markdown
from sdopt.search.expectation import RECORDED, medians
from sdopt.study.designs import Design
from tests.matrix import (
    RECORDS,
    Matrix,
    grouped,
    records_in,
    shown_in,
)

HEAD, PAGE, MATRIX_PAGE = (
    CONF / "README.head.md",
    CONF / "README.md",
    CONF / "MATRIX.md",
)
PRESETS = "experiment"
MATRIX = "Options, models and tasks"
CARDS = ("h200", "rtx4090")
"""Example cards of the matrix: one of data centres, one of workstations."""


_WRITTEN = "<!-- Written by python -m tests.reference from the yaml files, docstrings and records. -->"


def page() -> str:
    """Returns the whole page: the hand-written head, then a section for each group."""
    groups = [*(group for group in default_options() if group != PRESETS), PRESETS]
    contents = " · ".join(f"[`{group}`](#{group})" for group in groups)
    contents += f" · [{MATRIX}]({MATRIX_PAGE.name})"
    parts = [
        HEAD.read_text(encoding="utf-8").rstrip(),
        "# Groups, options and keys",
        contents,
    ]
    for group in groups:
        parts += _section(group)
    parts.append(_WRITTEN)
    return "\n\n".join(parts) + "\n"


def _section(group: str) -> Iterator[str]:
    yield f"## {group}"
    files = sorted((CONF / group).glob("*.yaml"))
    default = default_options().get(group)
    files.sort(key=lambda path: path.stem != default)
    classes = {path: class_of(group, path) for path in files}
    known = list(dict.fromkeys(cls for cls in classes.values() if cls is not None))
    if group in SECTIONS and len(known) == 1:
        yield str(inspect.getdoc(known[0]))
    rows = [_option_row(path, classes[path], path.stem == default) for path in files]
    promises = any(cls is not None and issubclass(cls, Optimization) for cls in known)
    headings = (
        "option",
        "what it is",
        *(("images", "is for", "needs", "not with") if promises else ()),
    )
    yield markdown(headings, [row[: len(headings)] for row in rows]).rstrip()
    if group == "hardware":
        yield "\n".join(_card_rows())
    if isinstance(default, list):
        shown = ",".join(path.stem for path in files[-2:])
        yield f"These options combine, as in `{group}=[{shown}]`; none is the default."
    for cls in known:
        if found := list(
            key_rows(
                next(axis_of(path) for path, other in classes.items() if other is cls),
                cls,
            )
        ):
            users = ", ".join(
                f"`{path.stem}`" for path, other in classes.items() if other is cls
            )
            if issubclass(cls, Optimization | Design):
                yield f"{users}: {inspect.getdoc(cls)}"
            yield markdown(("key", "type", "default", "meaning"), found).rstrip()


def _card_rows() -> Iterator[str]:
    """Yields a line for each family of cards, with the names of its data sheets."""
    for path in sorted(SHEETS.glob("*.yaml")):
        names: Any = OmegaConf.to_container(OmegaConf.load(path))
        yield f"- {option_comment(path).split(':')[0]}: {', '.join(f'`{name}`' for name in sorted(map(str, names)))}"


def columns() -> dict[str, Device]:
    """Returns the devices that the matrix has columns for, by their headings."""
    sheets = data_sheets()
    devices = {"cpu": Device("cpu", name="a CPU")}
    for card in CARDS:
        devices[card] = planned_device(sheets[card])
    return devices


@cache
def option_matrix() -> str:
    """Returns the matrix of options, models and tasks. It depends on options and records, and on no machine."""
    sheets, devices = data_sheets(), columns()
    shown = shown_in(records(), sheets)
    with composer_of([]) as composer:
        matrix = Matrix(
            composer, optimization_options(), options_of("model"), options_of("task")
        )
    notes: dict[str, int] = {}
    by_device = [matrix.cells(device, shown, sheets) for device in devices.values()]
    by_option: dict[str, dict[tuple[str, str], str]] = {}
    for cells in zip(*by_device, strict=True):
        [key] = {(cell.group, cell.option, cell.model, cell.task) for cell in cells}
        by_option.setdefault(f"`{key[0]}={key[1]}`", {})[key[2:]] = "\n".join(
            _short(cell, notes) for cell in cells
        )
    rows = []
    for option, found in by_option.items():
        for models, tasks, states in grouped(found):
            rows.append((option, models, tasks, *states.split("\n")))
    numbered_notes = "\n".join(f"{number}. {note}" for note, number in notes.items())
    return "\n\n".join(
        [
            f"# {MATRIX}",
            _ABOUT,
            markdown(("option", "model", "task", *devices), rows).rstrip(),
            numbered_notes,
        ]
        + [f"{_WRITTEN}\n"]
    )


def _short(cell: OptionOutcome, notes: dict[str, int]) -> str:
    """Returns the standing of an option, with the number of a note that says why."""
    if cell.standing is Standing.TOOK_EFFECT or not cell.why:
        return str(cell.standing)
    return f"{cell.standing} ({notes.setdefault(cell.why, len(notes) + 1)})"


_ABOUT = """\
What was seen comes from the results in `outputs/records/`. **took effect**: a variant with the option ended well, and
its traced call shows that the option was active; whether images stay as good is the gate's question, and is in the record.
**no gain**: it ran, but its trace showed no effect, or it was measured alone and its intervals showed none of the gains
that it claims. **cannot run**: it failed. **impossible**: it conflicts with the device, the model or the task. The notes
say why. **not measured**: nothing speaks against it, and no record shows it. Requirements of installed software do not
count here.
`sdopt gpu-suite` measures all of them on a GPU, and its results belong in `outputs/records/`. On a CPU, a study of
whole groups does so for a task:

```bash
sdopt run study=one_at_a_time "study.options=[attention,caching,grad_mode,layout,lora,memory]" \\
  study.skip_conflicts=true protocol=smoke workload.steps=8 workload.size=80 workload.batch_size=2 task=img2img
```"""


@cache
def _keys_in(path: Path) -> dict[str, Any]:
    """Returns the keys of an option's file, with their values."""
    node: Any = OmegaConf.to_container(OmegaConf.load(path))
    return node if isinstance(node, dict) else {}


def class_of(group: str, path: Path) -> type | None:
    """Returns the class that types an option's keys; None for a preset."""
    if group == PRESETS:
        return None
    target = _keys_in(path).get("_target_")
    return SECTIONS.get(group) if target is None else get_class(target)


def _option_row(path: Path, cls: type | None, is_default: bool) -> tuple[str, ...]:
    name = f"`{path.stem}`" + (" (default)" if is_default else "")
    comment = option_comment(path)
    if cls is None or not issubclass(cls, Optimization):
        return name, comment
    keys = dict(_keys_in(path))
    del keys["_target_"]
    option = cls(**keys)
    needs, excluded = "; ".join(_needs(cls)), "; ".join(_excluded(cls))
    return (
        name,
        comment,
        str(option.promised()),
        ", ".join(sorted(option.claimed())),
        needs,
        excluded,
    )


def _needs(cls: type[Optimization]) -> Iterator[str]:
    """Yields what an option declares that it needs: a kind of denoiser, a card, packages."""
    if cls.unet_only is not None:
        yield "a UNet"
    for need in cls.all_needs():
        if isinstance(need, Extra):
            yield f"`sdopt[{need.extra}]`"
        elif need.capability == ANY_CARD:
            yield "CUDA"
        else:
            yield f"CUDA {'.'.join(map(str, need.capability))}"


def _excluded(cls: type[Optimization]) -> Iterator[str]:
    """Yields for each axis which options an option excludes: their names, or all but a few."""
    for rule in cls.all_excludes():
        group, _, member = rule.axis.partition(".")
        if member:
            yield f"`{group}={member}`"
            continue
        forbidden, possible = options_excluded(rule)
        if len(forbidden) <= len(possible):
            yield ", ".join(f"`{group}={name}`" for name in forbidden)
        else:
            yield f"`{group}`, but for {', '.join(f'`{name}`' for name in possible)}"


def options_excluded(rule: Excludes) -> tuple[list[str], list[str]]:
    """Returns the options of a rule's group that it excludes, and the others."""
    forbidden, possible = list[str](), list[str]()
    for path in sorted((CONF / rule.axis).glob("*.yaml")):
        cls = class_of(rule.axis, path)
        compiles_nothing = cls is Eager
        if (
            cls is not None
            and issubclass(cls, Optimization)
            and not compiles_nothing
            and rule.forbids(cls)
        ):
            forbidden.append(path.stem)
        else:
            possible.append(path.stem)
    return forbidden, possible


def axis_of(path: Path) -> str:
    """Returns where an option's keys stand: in its group, or where Hydra's package line puts them."""
    package = re.match(r"# @package ([\w.]+)", path.read_text(encoding="utf-8"))
    return package[1] if package else path.parent.name


@cache
def records() -> list[StudyResult]:
    """Returns the results in `outputs/records`, each read once."""
    return records_in(CONF.parent / RECORDS)


def expected_speedups() -> str:
    """Returns the median speed-up of each option in the records, by kind of device, as a search expects it."""
    by_kind: dict[str, list[StudyResult]] = {}
    for result in records():
        by_kind.setdefault(result.environment.device["type"], []).append(result)
    expected = {
        kind: rounded(medians(results)) for kind, results in sorted(by_kind.items())
    }
    return json.dumps(expected, indent=1) + "\n"


def rounded(speedups: Mapping[str, float]) -> dict[str, float]:
    """Returns speed-ups to two digits after the point: they order options, and no more."""
    return {choice: round(speedup, 2) for choice, speedup in speedups.items()}


@end_with_code
def main(argv: list[str]) -> int:
    """Writes the page, or with `--check` compares it; returns the exit code."""
    parser = Arguments(prog="python -m tests.reference", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 2 if the page is out of date",
    )
    arguments = parser.parsed(argv)
    for path, content in (
        (PAGE, page()),
        (MATRIX_PAGE, option_matrix()),
        (RECORDED, expected_speedups()),
    ):
        if not arguments.check:
            path.write_text(content, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != content:
            raise UsageError(f"{path} is out of date; run python -m tests.reference")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
