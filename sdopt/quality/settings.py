"""Reads and checks the quality settings of a configuration, before anything runs."""

from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.quality.metrics import features_of, measured_metrics
from sdopt.schema import Gate, Model, Quality


def reference_of(quality: Quality, model: Model) -> str:
    """Returns the reference set of FID, KID and CMMD."""
    if quality.reference is not None:
        return quality.reference
    return "packaged" if (PACKAGED / model.name).is_dir() else "baseline"


def require_quality(quality: Quality, gate: Gate, model: Model) -> None:
    """Raises UsageError if features or networks are missing, or if a gate judges images and none is scored."""
    from sdopt.quality.features import require_features
    from sdopt.quality.paired import require_lpips

    problems = []
    if gate.judges and not quality.metrics:
        problems.append(
            f"gate={gate.name}: judges images, but quality.metrics=false computes no metrics; leave one of them out"
        )
    for name in features_of(quality, model) if quality.metrics else ():
        try:
            require_features(name)
        except UsageError as error:
            problems += [f"quality.features: {problem}" for problem in error.problems]
    try:
        measured_metrics(quality, model)
    except UsageError as error:
        problems += [f"quality.features: {problem}" for problem in error.problems]
    if quality.lpips:
        try:
            require_lpips()
        except UsageError as error:
            problems += [f"quality.lpips: {problem}" for problem in error.problems]
    if problems:
        raise UsageError(problems)
