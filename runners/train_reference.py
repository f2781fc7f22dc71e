"""`sdopt train-reference`: fetch the data and train the packaged model, or one stage of it."""

from __future__ import annotations

import sys
from pathlib import Path

from sdopt.errors import UsageError
from sdopt.training.config import TrainReferenceConfig, validate

CONFIGS = Path(__file__).resolve().parents[1] / "conf"

HELP = """\
sdopt train-reference [key=value ...]

Fetch the openly licensed emoji and train the packaged reference model, or one stage of it, for example

  sdopt train-reference budget_minutes=90
  sdopt train-reference stage=denoiser resume=true device=cuda

A run that was stopped goes on from its last checkpoint. Everything that can be set, with its present value:
"""


def configure(overrides: list[str]) -> TrainReferenceConfig:
    """Compose `conf/train_reference.yaml` with command-line overrides into a typed, validated configuration.

    Raises:
        UsageError: an override names no key, or its value does not fit the key.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store("train_reference_schema", TrainReferenceConfig)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = OmegaConf.to_object(compose("train_reference", overrides))
    except (HydraException, OmegaConfBaseException) as mistake:
        # Hydra says which override failed and leaves why to the cause.
        parts = [str(mistake)] + ([str(mistake.__cause__)] if mistake.__cause__ else [])
        lines = [line.strip() for part in parts for line in part.splitlines()]
        # `+key=value` would not help: the schema is closed.
        kept = [
            line for line in lines if line and not line.startswith(("object_type=", "reference_type=", "To append"))
        ]
        raise UsageError(list(dict.fromkeys(kept))) from mistake
    assert isinstance(config, TrainReferenceConfig)
    validate(config)
    return config


def main(argv: list[str]) -> int:
    """Do what the overrides ask for.

    Returns:
        0 when it is done, 2 for a mistake in the command, 3 when data cannot be had or training diverges.
    """
    try:
        if {"-h", "--help"} & set(argv):
            from omegaconf import OmegaConf

            print(HELP)
            print(OmegaConf.to_yaml(OmegaConf.structured(configure([]))))
            return 0
        config = configure(argv)
        from sdopt.training.data import DataError
        from sdopt.training.stages import run

        try:
            run(config)
        except (DataError, FloatingPointError) as failure:
            print(f"train-reference: {failure}", file=sys.stderr)
            return 3
    except UsageError as mistake:
        print("\n".join(f"train-reference: {problem}" for problem in mistake.problems), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
