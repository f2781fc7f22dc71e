"""Scores, judges, reports and logs images and times that other programs made (`sdopt judge`)."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from sdopt.apps.exchange.pictures import unread_below
from sdopt.apps.exchange.study import GivenFolder, import_study, judgeable
from sdopt.conclusion import Conclusion
from sdopt.config.composer import composer_of, with_gate
from sdopt.config.groups import data_sheets
from sdopt.errors import OccupiedError, UnavailableError, UsageError, print_problems
from sdopt.quality.images import image_files
from sdopt.quality.metrics import features_of, require_quality
from sdopt.record.files import write_result
from sdopt.record.records import StudyResult, now
from sdopt.report.sentences.notes import copy_notes
from sdopt.report.summary import summary_of
from sdopt.report.sweep import exit_code
from sdopt.schema import THRESHOLDS
from sdopt.statistics.comparing import compare
from sdopt.study.plan import describe_environment
from sdopt.worker.forkserver import start_fork_server
from sdopt.worker.machine import find_machine

_SECTIONS = (
    "gate",
    "quality",
    "tracking",
    "hardware",
    *(f"protocol.{name}" for name in THRESHOLDS),
)
"""The parts of the configuration that decide on images of other programs; the others configure calls."""


_IN_WORDS = {
    "speedup": "speed (times.csv)",
    "tail_ratio": "the slowest calls (times.csv)",
    "memory_ratio": "memory (times.csv)",
    "clip_score": "the fit of images to their prompts (prompts.csv)",
    "latents_error": "latents, from which images are decoded",
}
"""What is not judged where folders do not give it, by the metric of the rule."""


def judge_folders(
    given: GivenFolder,
    overrides: Sequence[str],
    output: Path | None,
    command: Sequence[str],
) -> tuple[int, Path]:
    """Judges folders of images; writes the result, and returns the exit code and the result's folder.

    Raises:
        UsageError: folders, tables, metrics or rules do not fit together; nothing was judged.
    """
    folder = (
        output
        or Path("outputs/runs/judge")
        / f"{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S-%f}"
    )
    if (folder / "result.json").exists():
        raise OccupiedError(
            f"{folder}: holds a result; choose another folder with --output"
        )
    if strangers := sorted(
        {key.partition("=")[0] for key in overrides if not key.startswith(_SECTIONS)}
    ):
        raise UsageError(
            f"{', '.join(strangers)}: configures calls, and these were made elsewhere; choose from "
            f"{', '.join(_SECTIONS)}"
        )
    for images in given.folders:
        image_files(images)  # what is missing is said before PyTorch is imported
    with composer_of(with_gate(overrides)) as composer:
        config = composer.current.recorded
    context = start_fork_server(torch_alone=True)
    machine, context = find_machine(context, config.hardware, data_sheets)
    environment = describe_environment(machine, list(command))
    try:
        result = import_study(given, config, environment, now(), folder)
    except OSError as error:
        raise UnavailableError(
            f"{folder}: {error.strerror}; choose another folder with --output"
        ) from error
    print_problems(unread_below(given.folders))
    _fit_rules(result)
    require_quality(result.config.quality, result.config.gate, result.config.model)
    compare(result)
    result.status, result.finished = "finished", now()
    write_result(result, folder)
    end = Conclusion(result.config, folder, context)
    end.evaluate(result, machine.device.torch_name)
    end.judge(result)
    summary = summary_of(result)
    end.track(summary, end.report(summary))
    return exit_code(folder), folder


def calibrate_folders(
    first: Path, second: Path, overrides: Sequence[str], folder: Path
) -> StudyResult:
    """Scores two folders of a baseline's images that start from other noise, for a calibration of that model.

    Raises:
        UsageError: the folders or the metrics do not fit together.
    """
    with composer_of([*overrides, "tracking=none"]) as composer:
        config = composer.current.recorded
    context = start_fork_server(torch_alone=True)
    machine, context = find_machine(context, config.hardware, data_sheets)
    environment = describe_environment(machine, ["sdopt", "calibrate"])
    result = import_study(
        GivenFolder(first, [], other_noise=second), config, environment, now(), folder
    )
    print_problems(copy_notes(result))
    require_quality(result.config.quality, result.config.gate, result.config.model)
    Conclusion(result.config, folder, context).evaluate(
        result, machine.device.torch_name
    )
    return result


def _fit_rules(result: StudyResult) -> None:
    """Leaves out rules on what was not given, and says so."""
    kept, left_out = judgeable(result, result.config.gate.rules)
    result.config = replace(result.config, gate=replace(result.config.gate, rules=kept))
    problems = []
    if left_out:
        lacking = ", ".join(_IN_WORDS.get(name, name) for name in left_out)
        problems.append(f"not judged, because it was not given: {lacking}")
    timed = any(variant.measurements for variant in result.variants)
    if timed and result.control is None:
        problems.append(
            "without a second folder of the baseline (--again FOLDER) nobody knows how far two equal runs differ, and "
            "no gain in speed or memory can pass"
        )
    if result.config.gate.judges and not features_of(
        result.config.quality, result.config.model
    ):
        problems.append(
            "no network scores these images: add quality.features=[effnet] (pip install 'sdopt[effnet]') or "
            "[clip:<folder or hub id>] for perceptual distance, CLIP score and CMMD"
        )
    print_problems(problems)
