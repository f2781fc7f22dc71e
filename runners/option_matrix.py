"""Renders the section of `conf/README.md` on which options are proven or impossible, on which device."""

from functools import cache

from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets, optimization_options
from sdopt.config.paths import CONF, options_of
from sdopt.doctor.matrix import RECORDS, Cell, Matrix, State, grouped, records_in, shown_in
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.report.markdown import markdown

TITLE = "Options, models and tasks"

CARDS = ("h200", "rtx4090")
"""Example cards: one of data centres, one of workstations."""


@cache
def option_matrix() -> str:
    """Returns the matrix of options, models and tasks. It depends on options and records, and on no machine."""
    sheets = data_sheets()
    shown = shown_in(records_in(CONF.parent / RECORDS), sheets)
    devices = {"cpu": Device("cpu", name="a CPU"), **{card: planned_device(sheets[card]) for card in CARDS}}
    with composer_of([]) as composer:
        matrix = Matrix(composer, optimization_options(), options_of("model"), options_of("task"))
    notes: dict[str, int] = {}
    columns = [matrix.cells(device, shown, sheets) for device in devices.values()]
    by_option: dict[str, dict[tuple[str, str], str]] = {}
    for cells in zip(*columns, strict=True):
        [key] = {(cell.group, cell.option, cell.model, cell.task) for cell in cells}
        by_option.setdefault(f"`{key[0]}={key[1]}`", {})[key[2:]] = "\n".join(_short(cell, notes) for cell in cells)
    rows = [
        (option, models, tasks, *states.split("\n"))
        for option, found in by_option.items()
        for models, tasks, states in grouped(found)
    ]
    numbered_notes = "\n".join(f"{number}. {note}" for note, number in notes.items())
    return "\n\n".join(
        [f"## {TITLE}", _ABOUT, markdown(("option", "model", "task", *devices), rows, []).rstrip(), numbered_notes]
    )


def _short(cell: Cell, notes: dict[str, int]) -> str:
    """Returns the state of a cell, with the number of a note that says why."""
    if cell.state is State.PROVEN or not cell.reasons:
        return str(cell.state)
    return f"{cell.state} ({notes.setdefault('; '.join(cell.reasons), len(notes) + 1)})"


_ABOUT = """\
`sdopt doctor --matrix` prints this table for your machine, and with `hardware=a10` for a card, by its data sheet.
The states come from the results in `outputs/records/`. An option is **proven** if a variant with it ended well, and its
traced call showed that it took effect. It is **refuted** if it ran but brought no gain: its trace showed no effect, or
it was measured alone and its intervals showed none of the gains that it claims. It **cannot run** if it failed. It is
**impossible** if it conflicts with the device, the model or the task. The notes say why. Everything else is
**unproven**: nothing speaks against it, and no record shows it. Requirements of installed software are left out here.
`sdopt gpu-suite` measures all of them on a GPU, and its results belong in `outputs/records/`. On a CPU, a study of
whole groups does so for a task:

```bash
sdopt run study=one_at_a_time "study.options=[attention,caching,grad_mode,layout,lora,memory]" \\
  study.skip_conflicts=true protocol=smoke workload.steps=8 workload.size=80 workload.batch_size=2 task=img2img
```"""
