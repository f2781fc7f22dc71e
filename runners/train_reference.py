"""`sdopt train-reference`: fetch the data and train the packaged models, or run one stage of it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.errors import UsageError

from . import Arguments, end_with_code, indented

if TYPE_CHECKING:
    from sdopt.apps.training.config import TrainReferenceConfig

_HELP = """\
usage: sdopt train-reference [key=value ...]

Fetch the openly licensed emoji and train the packaged reference models, or run one stage of it.

examples:
  sdopt train-reference budget_minutes=90
  sdopt train-reference stage=denoiser resume=true device=cuda

A run that was interrupted continues from its last checkpoint.

stages, in their order: {stages}; stage=all runs all of them

keys and their defaults:
{keys}

Exit codes: 0 done; 2 usage or configuration; 3 the data cannot be fetched, or the training diverges."""


def _help() -> str:
    from sdopt.apps.training.config import STAGES

    from .keys import own_keys

    return _HELP.format(
        stages=", ".join(STAGES), keys=indented(own_keys(training_config([])))
    )


def training_config(overrides: Sequence[str]) -> "TrainReferenceConfig":
    """Returns `conf/train_reference.yaml` with overrides applied. Raises UsageError for all wrong ones together."""
    from sdopt.apps.training.config import TrainReferenceConfig
    from sdopt.config.own import own_config

    config = own_config("train-reference", TrainReferenceConfig, overrides)
    if Path(config.export.companions).resolve() == Path(config.folder).resolve():
        raise UsageError(
            f"export.companions={config.export.companions}: must be another folder than `folder`, in which "
            "the stages that train the companions keep their files"
        )
    return config


@end_with_code
def main(argv: list[str]) -> int:
    """Runs the stages that the overrides ask for; returns the exit code."""
    parser = Arguments(prog="sdopt train-reference", text=_help)
    parser.add_argument("overrides", nargs="*")
    config = training_config(parser.parsed(argv).overrides)
    # A heavy import, made only now so that a usage error is reported at once.
    from sdopt.apps.training.stages import run

    run(config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
