"""What margins are made of: how much a model's images differ from prompt to prompt, measured once and kept in a file.

A margin that is a multiple of the noise of the run that it judges is circular: the noisier the run, the more it lets
pass. So the spread is measured beforehand, with `sdopt calibrate`, on the model as it is, and a gate's margins are
stated as shares of it.
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
    """The spread of each quality metric between two images of a prompt that start from other noise.

    `model`, `workload` and `scheduler` are the sections of the configuration it was measured with, `digests` the hashes
    of the weights (of the model, and of each feature extractor by name).
    """

    model: str
    workload: dict[str, Any]
    digests: dict[str, str]
    metrics: dict[str, Spread]
    scheduler: dict[str, Any] = field(default_factory=dict)

    def differing(self, config: RecordedConfig) -> dict[str, tuple[Any, Any]]:
        """Returns what decides how far images from other noise lie apart and is otherwise in a study.

        Args:
            config: of the study.

        Returns:
            by key its value here and in the study. A key that the calibration does not know is left out, and so is
            one that both leave to the model.
        """
        theirs = work_of(config)
        mine = self.workload | {f"scheduler.{key}": value for key, value in self.scheduler.items()}
        return {
            key if "." in key else f"workload.{key}": (mine[key], value)
            for key, value in theirs.items()
            if mine.get(key) is not None and mine[key] != value
        }


def work_of(config: RecordedConfig) -> dict[str, Any]:
    """Returns what a calibration belongs to: steps, guidance, size and scheduler, with what the model decides."""
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
    """Where the calibration of a model at a number of steps is, if it comes with sdopt."""
    return FOLDER / f"{model}-{steps}.json"


def read_calibration(path: Path) -> Calibration:
    """Raises UsageError where the file is missing or is none."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); `sdopt calibrate` writes one") from error
    except ValidationError as error:
        raise UsageError(f"{path}: not a calibration: {error.errors()[0]['msg']}") from error


def calibration_for(result: StudyResult, path: str | None) -> Calibration | None:
    """The calibration that a result is judged with: a file, or one that comes with sdopt for its model.

    Of several that come with sdopt it is the one whose work differs least from the study's.

    Returns:
        None where there is none, or where it is of other weights: margins of one model say nothing of another's.

    Raises:
        UsageError: the file that was named is missing or no calibration.
    """
    files = [Path(path).expanduser()] if path else sorted(FOLDER.glob(f"{result.config.model.name}-*.json"))
    ours = {"model": getattr(result.variant(result.baseline), "inputs", {}).get("model", ""), **result.feature_digests}
    found = [
        calibration
        for calibration in map(read_calibration, files)
        if all(calibration.digests.get(name, digest) == digest for name, digest in ours.items())
    ]
    return min(found, key=lambda each: len(each.differing(result.config)), default=None)


def fitting_calibration(
    calibration: Calibration | None, config: RecordedConfig, named: bool
) -> tuple[Calibration | None, str]:
    """Returns a calibration if it may be applied to a study, and what a reader must know of it.

    Two images of a prompt lie farther apart at few steps than at many: a share of one is no share of the other. One
    that was named is applied all the same, and the verdict says so.

    Args:
        calibration: the one that was found.
        config: of the study.
        named: whether the user named its file.
    """
    if calibration is None:
        return None, ""
    other = calibration.differing(config)
    if not other:
        return calibration, ""
    said = ", ".join(f"{key}={mine} (here {theirs})" for key, (mine, theirs) in other.items())
    if named:
        return calibration, f"the calibration is of {said}"
    overrides = " ".join(f"{key}={theirs}" for key, (_, theirs) in other.items() if not key.startswith("scheduler"))
    advice = f"run `sdopt calibrate model={config.model.name} {overrides} --output own.json`".replace("  ", " ")
    return None, f"the calibration is of {said}: {advice} and judge with gate.calibration=own.json"


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Replaces the file in one step. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(asdict(calibration), indent=1) + "\n").encode())
