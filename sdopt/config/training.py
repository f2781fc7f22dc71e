"""Composes the configuration of `sdopt train-reference`."""

from collections.abc import Sequence
from pathlib import Path

from sdopt.config.own import own_config
from sdopt.errors import UsageError
from sdopt.training.config import TrainReferenceConfig


def training_config(overrides: Sequence[str]) -> TrainReferenceConfig:
    """Returns `conf/train_reference.yaml` with overrides applied, typed and within its ranges.

    Raises:
        UsageError: an override names no key, or a value is of another type or out of its range; all such values are
            reported together.
    """
    config = own_config("train-reference", TrainReferenceConfig, overrides)
    if Path(config.export.companions).resolve() == Path(config.folder).resolve():
        raise UsageError(
            f"export.companions={config.export.companions}: must be another folder than `folder`, in which "
            "the stages that train the companions keep their files"
        )
    return config
