"""Describes what was measured, or would be: the work, the device and the versions, and the plan of a dry run."""

from typing import TYPE_CHECKING

from rich.console import Console

from sdopt.record.choices import difference, listed
from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import Status, StudyResult
from sdopt.report.blocks import Prose, Table
from sdopt.report.terminal import shown
from sdopt.statistics.words import gib_text

if TYPE_CHECKING:
    from sdopt.study.cost import StudyCost

_PACKAGES = ("torch", "diffusers")


def header_of(result: StudyResult) -> list[str]:
    """Returns a line on the work and one on the machine, to print above a table and before a measurement."""
    if result.is_imported:  # Nobody told the model, the steps or the machine.
        return [
            f"{result.name}: images and times that came as files, judged by sdopt {result.environment.sdopt_version}"
        ]
    return [f"{result.name}: {work_of(result.config)}", _machine(result)]


def announce(result: StudyResult, console: Console) -> None:
    """Prints, before measuring, the variants to be measured, and those that are skipped with the reason."""
    for line in header_of(result):
        console.print(line, style="bold", markup=False, highlight=False)
    options = [
        row.name for row in result.candidates if row.status is not Status.SKIPPED
    ]
    # Names of combinations contain commas.
    against = f"{len(options)} against {result.baseline}: {'; '.join(options)}"
    console.print(
        against if options else f"{result.baseline} alone",
        markup=False,
        highlight=False,
    )
    for row in result.candidates:
        if row.status is Status.SKIPPED:
            console.print(
                f"not measured: {row.name}: {row.reason}",
                style="dim",
                markup=False,
                highlight=False,
            )


def show_plan(result: StudyResult, expected: "StudyCost", console: Console) -> None:
    """Prints the variants of a plan, conflicts of those that cannot run, the comparisons, and the expected effort.

    A reason is one line, however long, since it may hold a command to copy.
    """
    # `sdopt show` prints headers, too, and shall import nothing that measures.
    from sdopt.study.cost import PATIENCE_S, SHORTER

    environment, baseline = result.environment, result.baseline_variant.choices
    # A planned device comes from a data sheet, which names no driver; a real one has a driver.
    planned = environment.sheet is not None and environment.device["driver"] is None
    where = f" on {environment.device['name']}, by its data sheet" if planned else ""
    variants = [
        (
            row.name,
            listed(difference(row.choices, baseline)),
            row.contract,
            "no" if row.status is Status.SKIPPED else "yes",
        )
        for row in result.variants
    ]
    compared = [
        (
            edge.candidate,
            edge.reference,
            "how far two equal variants differ"
            if result.variant(edge.candidate).is_control
            else edge.credit,
        )
        for edge in result.comparisons
    ]
    told = [work_of(result.config)]
    if len(result.shapes) > 1:
        told.append(f"each process is timed at {'; '.join(map(str, result.shapes))}")
    would = {
        row.name: "no" if row.status is Status.SKIPPED else "yes"
        for row in result.variants
    }
    told += [
        f"{row.name}: {would[row.name]}: {row.reason}"
        for row in result.variants
        if row.reason
    ]
    time = (
        "unknown"
        if expected.seconds is None
        else f"about {_duration(expected.seconds)}"
    )
    memory = (
        "unknown"
        if expected.memory_gib is None
        else f"about {gib_text(expected.memory_gib)} per process"
    )
    effort = [
        f"calls of the pipeline: about {expected.calls}, by {expected.processes} processes",
        f"time: {time}; memory: {memory} ({expected.based_on})",
    ]
    if (
        expected.seconds is not None
        and expected.seconds > PATIENCE_S
        and not result.config.protocol.budget_s
    ):
        effort.append(SHORTER)
    for repository, size in expected.downloads.items():
        size_text = (
            "unknown, the hub cannot be asked"
            if size is None
            else f"up to {size / 2**30:.2f} GiB"
        )
        effort.append(
            f"download of {repository}: {'nothing, it is in the cache' if size == 0 else size_text}"
        )
    tables = [
        (
            f"{result.name}: what would be measured{where}",
            Table(
                ("variant", "choices beyond the defaults", "contract", "would run?"),
                variants,
            ),
            [f"  {line}" for line in told],
        ),
        (
            "what would be compared",
            Table(("candidate", "against", "measures"), compared),
            effort,
        ),
    ]
    for heading, table, lines in tables:
        console.print(shown([Prose(heading, strong=True), table], console.width))
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min"
        if minutes
        else f"{seconds:.0f} s"
    )


def work_of(config: RecordedConfig) -> str:
    """Returns model, size, steps, batch and task in one line, as `emoji 64×64, 20 steps (DDIM), batch 1`."""
    model, workload, shapes = config.model, config.workload, config.shapes
    sampler = config.scheduler.class_name.removesuffix("Scheduler").removesuffix(
        "Multistep"
    )
    source = {
        "random": " (random weights)",
        "hub": f" ({model.hub_id})",
        "path": f" ({model.path})",
        "factory": f" ({model.factory})",
    }
    steps = f"{workload.steps} steps ({sampler})"
    images = (
        [f"{workload.images_per_prompt} images per prompt"]
        if workload.images_per_prompt > 1
        else []
    )
    task = [config.task.kind] if config.task.kind != "txt2img" else []
    name = f"{model.name}{source.get(model.weights, '')}"
    if len(shapes) > 1:
        return ", ".join(
            [
                name,
                steps,
                *images,
                *task,
                f"{len(shapes)} shapes: {'; '.join(map(str, shapes))}",
            ]
        )
    [shape] = shapes
    return ", ".join(
        [
            f"{name} {shape.size}×{shape.size}",
            steps,
            f"batch {shape.batch_size}",
            *images,
            *task,
        ]
    )


def _machine(result: StudyResult) -> str:
    environment = result.environment
    kind = environment.device.get("type", "")
    threads = result.config.hardware.threads
    limit = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    where = f"{environment.device['name']} ({kind}{limit})"
    versions = [
        f"{name} {environment.packages[name]}"
        for name in _PACKAGES
        if name in environment.packages
    ]
    return f"on {where}, {', '.join([*versions, f'sdopt {environment.sdopt_version}'])}"
