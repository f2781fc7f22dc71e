"""Reads the section `tracking` alone, for commands that measure nothing. Composes only what overrides ask for."""

from collections.abc import Sequence

from sdopt.config.paths import CONF, read_yaml
from sdopt.schema import Tracking

_DEFAULT = CONF / "tracking" / "mlflow.yaml"
"""The option that `conf/config.yaml` chooses."""


def tracking_of(overrides: Sequence[str]) -> Tracking:
    """Returns the section with overrides applied. Raises UsageError, also for keys of other sections."""
    if not overrides:
        return Tracking(**read_yaml(_DEFAULT))
    from sdopt.config.composer import (
        composer_of,
        require_sections,
    )  # composes whole configurations

    require_sections(overrides, "tracking")
    with composer_of(overrides) as composer:
        return composer.current.tracking
