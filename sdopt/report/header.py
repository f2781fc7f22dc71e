"""Describes what was measured: the work, the device and the versions."""

from rich.console import Console

from sdopt.record.configuration import RecordedConfig
from sdopt.record.records import Status, StudyResult

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
    options = [row.name for row in result.candidates if row.status is not Status.SKIPPED]
    # Names of combinations contain commas.
    summary = (
        f"{len(options)} against {result.baseline}: {'; '.join(options)}" if options else f"{result.baseline} alone"
    )
    console.print(summary, markup=False, highlight=False)
    for row in result.candidates:
        if row.status is Status.SKIPPED:
            console.print(f"not measured: {row.name}: {row.reason}", style="dim", markup=False, highlight=False)


def work_of(config: RecordedConfig) -> str:
    """Returns model, size, steps, batch and task in one line, as `emoji 64×64, 20 steps (DDIM), batch 1`."""
    model, workload, shapes = config.model, config.workload, config.shapes
    sampler = config.scheduler.class_name.removesuffix("Scheduler").removesuffix("Multistep")
    source = {
        "random": " (random weights)",
        "hub": f" ({model.hub_id})",
        "path": f" ({model.path})",
        "factory": f" ({model.factory})",
    }
    steps = f"{workload.steps} steps ({sampler})"
    images = [f"{workload.images_per_prompt} images per prompt"] if workload.images_per_prompt > 1 else []
    task = [config.task.kind] if config.task.kind != "txt2img" else []
    name = f"{model.name}{source.get(model.weights, '')}"
    if len(shapes) > 1:
        return ", ".join([name, steps, *images, *task, f"{len(shapes)} shapes: {'; '.join(map(str, shapes))}"])
    [shape] = shapes
    return ", ".join([f"{name} {shape.size}×{shape.size}", steps, f"batch {shape.batch_size}", *images, *task])


def _machine(result: StudyResult) -> str:
    environment = result.environment
    kind = environment.device.get("type", "")
    threads = result.config.hardware.threads
    limit = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    where = f"{environment.device['name']} ({kind}{limit})"
    versions = [f"{name} {environment.packages[name]}" for name in _PACKAGES if name in environment.packages]
    return f"on {where}, {', '.join([*versions, f'sdopt {environment.sdopt_version}'])}"
