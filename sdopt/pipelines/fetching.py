"""Fetches the models of variants from the hub, and checks what came."""

from collections.abc import Iterable

from sdopt.errors import UsageError
from sdopt.pipelines.checks import require_folder, require_model
from sdopt.pipelines.hub import fetch_base, hub_folder
from sdopt.pipelines.transformer_files import is_transformer
from sdopt.schema import Model


def fetch_models(models: Iterable[Model]) -> None:
    """Downloads missing files of the models on the hub into the local cache, where the workers read them.

    Raises:
        UsageError: a model cannot be fetched, or is not a pipeline that sdopt runs; reports all of them together.
    """
    problems = []
    for model in dict.fromkeys(models):
        try:
            if model.weights == "hub":
                require_folder(hub_folder(model, fetch=True), model)
            elif is_transformer(model):
                fetch_base(model)
                require_model(model)
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(problems)
