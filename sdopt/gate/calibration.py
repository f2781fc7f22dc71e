"""Calibrations for margins: how much a model's images differ from prompt to prompt, measured once and kept in a file.

A margin must not be a multiple of the noise in the run that it judges: the noisier the run, the more would pass. So
`sdopt calibrate` measures the spread beforehand, on the model without optimizations, and a gate's margins are stated
as shares of that spread.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sdopt.errors import UsageError
from sdopt.results.files import write_atomically
from sdopt.results.records import RecordedConfig, Spread, StudyResult

FOLDER = Path(__file__).parent / "calibrations"


@dataclass(frozen=True)
class Calibration:
    """The spread of each quality metric between two images of one prompt that start from different noise.

    `model`, `workload` and `scheduler` are sections of the configuration that the spread was measured with. `digests`
    holds the hashes of the weights: those of the model, and those of each feature extractor by name.
    """

    model: str
    workload: dict[str, Any]
    digests: dict[str, str]
    metrics: dict[str, Spread]
    scheduler: dict[str, Any] = field(default_factory=dict)

    def differing(self, config: RecordedConfig) -> dict[str, tuple[Any, Any]]:
        """Returns the settings that affect the spread and that differ between the calibration and a study.

        Args:
            config: the study's configuration.

        Returns:
            for each key, its value in the calibration and its value in the study. Omits keys that the calibration does
            not record, and keys that both leave to the model.
        """
        theirs = work_of(config)
        mine = self.workload | {f"scheduler.{key}": value for key, value in self.scheduler.items()}
        return {
            key if "." in key else f"workload.{key}": (mine[key], value)
            for key, value in theirs.items()
            if mine.get(key) is not None and mine[key] != value
        }


def work_of(config: RecordedConfig) -> dict[str, Any]:
    """Returns the settings that a calibration is valid for: steps, guidance, size and scheduler."""
    own = config.workload.guidance_scale
    return {
        "steps": config.workload.steps,
        "guidance_scale": config.model.guidance_scale if own is None else own,
        "size": config.shapes[0].size,
        "scheduler.class_name": config.scheduler.class_name,
        "scheduler.options": config.scheduler.options,
    }


_ADAPTER = TypeAdapter(Calibration)


def calibration_file(model: str, steps: int) -> Path:
    """Returns the path at which sdopt ships the calibration of a model at a number of steps, if it ships one."""
    return FOLDER / f"{model}-{steps}.json"


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration. Raises UsageError if the file is missing or is not a calibration."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); `sdopt calibrate` writes one") from error
    except ValidationError as error:
        raise UsageError(f"{path}: not a calibration: {error.errors()[0]['msg']}") from error


def calibration_for(result: StudyResult, path: str | None) -> Calibration | None:
    """Returns the calibration to judge a result with: the file at `path`, or one that sdopt ships for the model.

    If sdopt ships several, returns the one whose settings differ least from the study's.

    Returns:
        None if there is no calibration, or none with the same weights: margins of one model do not apply to another.

    Raises:
        UsageError: the file at `path` is missing or is not a calibration.
    """
    files = [Path(path).expanduser()] if path else sorted(FOLDER.glob(f"{result.config.model.name}-*.json"))
    ours = {"model": getattr(result.variant(result.baseline), "inputs", {}).get("model", ""), **result.feature_digests}
    found = [
        calibration
        for calibration in map(read_calibration, files)
        if all(calibration.digests.get(name, digest) == digest for name, digest in ours.items())
    ]
    return min(found, key=lambda calibration: len(calibration.differing(result.config)), default=None)


def fitting_calibration(
    calibration: Calibration | None, config: RecordedConfig, named: bool
) -> tuple[Calibration | None, str]:
    """Returns the calibration if it may be applied to a study, and a note for the reader.

    Two images of one prompt differ more at few steps than at many, so a calibration with other settings does not fit.
    A calibration whose file the user named is applied anyway, and the note says so.

    Args:
        calibration: the calibration found for the study.
        config: the study's configuration.
        named: whether the user named the calibration's file.
    """
    if calibration is None:
        return None, ""
    other = calibration.differing(config)
    if not other:
        return calibration, ""
    settings = ", ".join(f"{key}={mine} (here {theirs})" for key, (mine, theirs) in other.items())
    if named:
        return calibration, f"the calibration was measured with {settings}"
    overrides = " ".join(f"{key}={theirs}" for key, (_, theirs) in other.items() if not key.startswith("scheduler"))
    advice = f"run `sdopt calibrate model={config.model.name} {overrides} --output own.json`".replace("  ", " ")
    return None, f"the calibration was measured with {settings}: {advice} and judge with gate.calibration=own.json"


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Writes the calibration, replacing the file in one step. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(asdict(calibration), indent=1) + "\n").encode())
