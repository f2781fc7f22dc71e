"""sdopt calibrate: measure how much a model's images differ by chance, from which gates take their margins.

And, with `--magnitudes`, how much a transformer's blocks add in each step, by which `caching=magcache` skips them.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UnavailableError, UsageError
from sdopt.scratch import scratch_folder

from . import ENDED, Arguments, end_with_code

if TYPE_CHECKING:
    from sdopt.record.records import StudyResult

PROMPTS = 240

_STUDY = (
    "study=explicit",
    "study.name=calibration",
    "study.variants={baseline:[]}",
    "study.edges=[]",
    "protocol=smoke",
    "protocol.rounds=1",
    "tracking=none",
    "gate=none",
)

MAGNITUDE_IMAGES = 8

_MAGNITUDES = (
    *_STUDY,
    "caching=magcache",
    "caching.measure=true",
    f"workload.batch_size={MAGNITUDE_IMAGES}",
    f"workload.prompt_count={MAGNITUDE_IMAGES}",
    "protocol.stage_calls=0",
    "quality.metrics=false",
)
"""What is wanted is the evidence of its traced call."""


@end_with_code
def main(argv: list[str]) -> int:
    """Draws the images of the unoptimized pipeline twice, from different noise, and writes their spread.

    Returns:
        the exit code.
    """
    parser = _parser()
    arguments = parser.parsed(argv)
    if arguments.prompts < 2:
        parser.error("--prompts: must be at least 2")

    if arguments.output:  # before minutes of drawing
        _require_writable(arguments.output)
    if arguments.folders:
        first, second = arguments.folders
        return _of_folders(first, second, arguments.overrides, arguments.output)
    from .run import main as run

    study: tuple[str, ...] = _MAGNITUDES
    if not arguments.magnitudes:
        counts = (
            f"quality.prompt_count={arguments.prompts}",
            f"quality.floor_prompts={arguments.prompts}",
        )
        study = (*_STUDY, *counts)
    with scratch_folder("calibrate") as folder:
        code = run([*study, *arguments.overrides, f"hydra.run.dir={folder}/run"])
        if code not in ENDED or not (folder / "run" / "result.json").is_file():
            return code
        from sdopt.record.files import read_result

        result = read_result(folder / "run")
        write = _write_magnitudes if arguments.magnitudes else _write
        return write(result, arguments.output)


def _parser() -> Arguments:
    parser = Arguments(
        prog="sdopt calibrate",
        description="Measure the spread of a model's images from prompt to prompt and from noise to noise, once, with "
        "no optimization: gates state their margins as shares of it.",
        epilog="example: sdopt calibrate model=sd15 model.weights=hub workload.prompts=prompts.txt --output sd15.json, "
        "and then sdopt run … gate=default gate.calibration=sd15.json",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="model, task, workload, scheduler, quality, hardware",
    )
    parser.add_argument(
        "--from",
        dest="folders",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="instead of drawing images, take those of two folders: the same prompts, from other seeds, by any program",
    )
    parser.add_argument(
        "--magnitudes",
        action="store_true",
        help="measure instead how much a transformer's blocks add in each step, for caching=magcache with this model, "
        f"number of steps and scheduler: the mean of {MAGNITUDE_IMAGES} images",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=PROMPTS,
        help="number of prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="file to write (default: the one that comes with sdopt)",
    )
    return parser


def _require_writable(output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        why = "is a folder" if output.is_dir() else "its folder cannot be written"
        raise UsageError(f"--output {output}: {why}; name another file")


def _of_folders(
    first: Path, second: Path, overrides: list[str], output: Path | None
) -> int:
    from sdopt.apps.exchange.judging import calibrate_folders

    if output is None:
        raise UsageError(
            "--output: name the file to write, and judge with gate.calibration=<file>"
        )
    with scratch_folder("calibrate") as folder:
        return _write(calibrate_folders(first, second, overrides, folder), output)


def _write(result: "StudyResult", output: Path | None) -> int:
    from sdopt.gate.calibration import (
        calibration_file,
        calibration_of,
        write_calibration,
    )

    calibration = calibration_of(result)
    path = output or calibration_file(result.config)
    write_calibration(calibration, path)
    for name, spread in sorted(calibration.metrics.items()):
        print(
            f"{name:<24} mean {spread.mean:10.4g}   deviation {spread.deviation:10.4g}   n {spread.n}"
        )
    print(f"written: {path}")
    return 0


def _write_magnitudes(result: "StudyResult", output: Path | None) -> int:
    from sdopt.options.magcache import Magnitudes, magnitudes_as_json, shipped_file
    from sdopt.record.files import write_atomically

    config = result.config
    [measurement] = result.baseline_variant.measurements
    [evidence] = [item for item in measurement.main.evidence if item.axis == "caching"]
    if not evidence.engaged:
        raise UnavailableError(f"nothing was measured: {evidence.summary}")
    scale = config.workload.guidance(config.model)
    images = config.workload.batch_size * config.workload.images_per_prompt
    magnitudes = Magnitudes(
        config.model.name,
        config.workload.steps,
        guidance_scale=scale,
        images=images,
        **evidence.facts,
    )
    path = output or shipped_file(config.model.name, config.workload.steps)
    write_atomically(path, magnitudes_as_json(magnitudes))
    for branch, ratios in enumerate(magnitudes.ratios):
        print(f"branch {branch}: {' '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
