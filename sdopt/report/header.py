"""Describes what was measured, or would be: the work, the device and the versions, and the plan of a dry run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from sdopt.record.choices import NONE, difference, is_plain, listed
from sdopt.record.records import Status, StudyResult, VariantResult
from sdopt.report.blocks import Prose, Table
from sdopt.report.terminal import shown
from sdopt.schema import Model
from sdopt.statistics.words import gib_text
from sdopt.terminal import print_line

if TYPE_CHECKING:
    from sdopt.study.cost import StudyCost

_PACKAGES = ("torch", "diffusers")


def header_of(result: StudyResult) -> list[str]:
    """Returns a line on the work and one on the machine, to print above a table and before a measurement."""
    if result.is_imported:  # Nobody told the model, the steps or the machine.
        what = "images and times that came as files"
        by = f"judged by sdopt {result.environment.sdopt_version}"
        return [f"{result.name}: {what}, {by}"]
    return [f"{result.name}: {work_of(result)}", _machine(result)]


def announce(result: StudyResult, console: Console) -> None:
    """Prints, before measuring, the variants to be measured, and those that are skipped with the reason."""
    for line in header_of(result):
        print_line(console, line, "bold", whole=False)
    options = []
    skipped = []
    for row in result.candidates:
        if row.status is Status.SKIPPED:
            skipped.append(f"not measured: {row.name}: {row.reason}")
        else:
            options.append(row.name)
    measured = f"{result.baseline} alone"
    if options:
        # Names of combinations contain commas.
        names = "; ".join(options)
        measured = f"{len(options)} against {result.baseline}: {names}"
    print_line(console, measured, whole=False)
    for line in skipped:
        print_line(console, line, "dim", whole=False)


def show_plan(result: StudyResult, expected: "StudyCost", console: Console) -> None:
    """Prints the variants of a plan, conflicts of those that cannot run, the comparisons, and the expected effort.

    A reason is one line, however long, since it may hold a command to copy.
    """
    device = result.environment.device
    where = ""
    # A planned device comes from a data sheet, which names no driver; a real one has a driver.
    if result.environment.sheet is not None and device["driver"] is None:
        where = f" on {device['name']}, by its data sheet"
    title = f"{result.name}: what would be measured{where}"
    _print_titled(console, title, _planned_variants(result))
    for line in _remarks_on_plan(result):
        print_line(console, f"  {line}")
    _print_titled(console, "what would be compared", _planned_comparisons(result))
    for line in _effort(result, expected):
        print_line(console, line)


def _print_titled(console: Console, title: str, table: Table) -> None:
    heading = Prose(title, strong=True)
    console.print(shown([heading, table], console.width))


def effort_of_sweep(seconds: Sequence[float | None]) -> str:
    """Returns what the jobs of a sweep take together, from what each is expected to take; "" if none is known."""
    known = [of_job for of_job in seconds if of_job is not None]
    if not known:
        return ""
    text = f"all jobs: about {_duration(sum(known))}"
    unknown = len(seconds) - len(known)
    return f"{text}, and {unknown} of unknown time" if unknown else text


def _planned_variants(result: StudyResult) -> Table:
    baseline = result.baseline_variant.choices
    rows = []
    for row in result.variants:
        choices = difference(row.choices, baseline)
        if row.name == result.baseline:
            choices = _beyond_plain(baseline)
        rows.append((row.name, listed(choices), row.contract, _would_run(row)))
    headings = ("variant", "choices beside the baseline", "contract", "would run?")
    return Table(headings, rows)


def _beyond_plain(choices: Mapping[str, str]) -> dict[str, str]:
    """Returns the choices by axis that are not the defaults."""
    chosen = {}
    for axis, option in choices.items():
        if not is_plain(axis, option):
            chosen[axis] = option
    return chosen


def _would_run(row: VariantResult) -> str:
    return "no" if row.status is Status.SKIPPED else "yes"


def _planned_comparisons(result: StudyResult) -> Table:
    rows = []
    for edge in result.comparisons:
        measures = edge.credit
        if result.variant(edge.candidate).is_control:
            measures = "how far two equal variants differ"
        rows.append((edge.candidate, edge.reference, measures))
    return Table(("candidate", "against", "measures"), rows)


def _remarks_on_plan(result: StudyResult) -> Iterator[str]:
    yield work_of(result)
    if len(result.shapes) > 1:
        yield f"each process is timed at {'; '.join(map(str, result.shapes))}"
    for row in result.variants:
        if row.reason:
            yield f"{row.name}: {_would_run(row)}: {row.reason}"


def _effort(result: StudyResult, expected: "StudyCost") -> Iterator[str]:
    """Yields what a study is expected to take."""
    # `sdopt show` prints headers, too, and shall import nothing that measures.
    from sdopt.study.cost import PATIENCE_S, SHORTER

    time = memory = "unknown"
    limit_s = result.config.protocol.budget_s
    seconds = expected.seconds
    if seconds is not None:
        time = f"about {_duration(seconds)}"
        if limit_s and limit_s < seconds:
            time = f"protocol.budget_s={limit_s:g}, and all of it would take {time}"
        if expected.compiling:
            time += f", without compiling ({expected.compiling} of {len(result.variants)} variants)"
    if expected.memory_gib is not None:
        memory = f"about {gib_text(expected.memory_gib)} per process"
    yield f"calls of the pipeline: about {expected.calls}, by {expected.processes} processes"
    yield f"time: {time}; memory: {memory} ({expected.based_on})"
    if not limit_s and (seconds or 0.0) > PATIENCE_S:
        yield SHORTER
    for repository, size in expected.downloads.items():
        if size is None:
            amount = "unknown, the hub cannot be asked"
        elif size:
            amount = f"up to {size / 2**30:.2f} GiB"
        else:
            amount = "nothing, it is in the cache"
        yield f"download of {repository}: {amount}"


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


def work_of(result: StudyResult) -> str:
    """Returns model, LoRA, size, steps, batch and task in one line, as `emoji 64×64, 20 steps (DDIM), batch 1`.

    The LoRA is the baseline's, which all variants have unless one of them says otherwise.
    """
    config = result.config
    workload = config.workload
    shapes = config.shapes
    scheduler = config.scheduler.class_name.removesuffix("Scheduler")
    sampler = scheduler.removesuffix("Multistep")
    model = f"{_model(config.model)}{_with_lora(result.baseline_variant)}"
    words = [model, f"{workload.steps} steps ({sampler})"]
    if len(shapes) == 1:
        [shape] = shapes
        words[0] += f" {shape.size}×{shape.size}"
        words.append(f"batch {shape.batch_size}")
    if workload.images_per_prompt > 1:
        words.append(f"{workload.images_per_prompt} images per prompt")
    if config.task.kind != "txt2img":
        words.append(config.task.kind)
    if len(shapes) > 1:
        words.append(f"{len(shapes)} shapes: {'; '.join(map(str, shapes))}")
    return ", ".join(words)


def _model(model: Model) -> str:
    """Returns a model with where its weights are from, as `sd15 (random weights)`."""
    sources = {
        "random": "random weights",
        "hub": model.hub_id,
        "path": model.path,
        "factory": model.factory,
    }
    if model.weights not in sources:
        return model.name
    return f"{model.name} ({sources[model.weights]})"


def _with_lora(baseline: VariantResult) -> str:
    """Returns the LoRA of the baseline, as in ` with LoRA styles/ink.safetensors`; "" without one."""
    chosen = baseline.choices.get("lora", NONE)
    return "" if chosen == NONE else f" with LoRA {baseline.config.lora or chosen}"


def _machine(result: StudyResult) -> str:
    environment = result.environment
    limits = [environment.device.get("type", "")]
    threads = result.config.hardware.threads
    if threads:
        limits.append("1 thread" if threads == 1 else f"{threads} threads")
    words = [f"on {environment.device['name']} ({', '.join(limits)})"]
    for name in _PACKAGES:
        if name in environment.packages:
            words.append(f"{name} {environment.packages[name]}")
    return ", ".join([*words, f"sdopt {environment.sdopt_version}"])
