"""What margins are made of: how much a model's images differ from prompt to prompt, measured once and kept in a file.

A margin that is a multiple of the noise of the run that it judges is circular: the noisier the run, the more it lets
pass. So the spread is measured beforehand, with `sdopt calibrate`, on the model as it is, and a gate's margins are
stated as shares of it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sdopt.errors import UsageError
from sdopt.results.files import write_atomically
from sdopt.results.records import Spread, StudyResult

FOLDER = Path(__file__).parent / "calibrations"


@dataclass(frozen=True)
class Calibration:
    """The spread of each quality metric between two images of a prompt that start from other noise.

    `model` and `workload` are the sections of the configuration it was measured with, `digests` the hashes of the
    weights (of the model, and of each feature extractor by name).
    """

    model: str
    workload: dict[str, Any]
    digests: dict[str, str]
    metrics: dict[str, Spread]


_ADAPTER = TypeAdapter(Calibration)


def calibration_file(model: str) -> Path:
    """Where the calibration of a model is that comes with sdopt."""
    return FOLDER / f"{model}.json"


def read_calibration(path: Path) -> Calibration:
    """Raises UsageError where the file is missing or is none."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); `sdopt calibrate` writes one") from error
    except ValidationError as error:
        raise UsageError(f"{path}: not a calibration: {error.errors()[0]['msg']}") from error


def calibration_for(result: StudyResult, path: str | None) -> Calibration | None:
    """The calibration that a result is judged with: a file, or the one that comes with sdopt for its model.

    Returns:
        None where there is none, or where it is of other weights: margins of one model say nothing of another's.

    Raises:
        UsageError: the file that was named is missing or no calibration.
    """
    model = result.config.model.name
    file = Path(path).expanduser() if path else calibration_file(model)
    if not path and not file.is_file():
        return None
    found = read_calibration(file)
    ours = {"model": getattr(result.variant(result.baseline), "inputs", {}).get("model", ""), **result.feature_digests}
    return found if all(found.digests.get(name, digest) == digest for name, digest in ours.items()) else None


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Replaces the file in one step. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(asdict(calibration), indent=1) + "\n").encode())
