"""Reports per option, model and task what records show of the option on a device, or why it cannot run there."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from sdopt.apps.doctor.options import alternatives, compose_options, fit_on
from sdopt.apps.suite.outcomes import ORDER, OptionOutcome, Standing, outcomes_of
from sdopt.errors import UsageError
from sdopt.hardware.cards import sheet_of
from sdopt.hardware.device import Device
from sdopt.pipelines.catalog import architecture_folder
from sdopt.record.files import read_result
from sdopt.record.records import Status, StudyResult
from sdopt.schema import Model, Sheet
from sdopt.study.designs import Composer
from sdopt.variant import Variant

RECORDS = Path("outputs") / "records"
"""Folder of the results that show the effects of options."""

_CPU = "CPU"


Key = tuple[str, str, str, str]
"""Group, option, model and task."""

Shown = Mapping[Key, Mapping[str, OptionOutcome]]
"""The state that records show, by device."""


class Matrix:
    """Every option with every model and every task.

    A model on the hub is judged by its architecture, so that the local cache makes no difference.
    A model that lacks a key, such as the user's own folder, is left out; tasks have the packaged images.
    """

    def __init__(
        self,
        composer: Composer,
        options: Iterable[tuple[str, str]],
        models: Iterable[str],
        tasks: Iterable[str],
    ) -> None:
        self._made = compose_options(composer, options)
        self._models = {
            name: model
            for name in models
            if (model := _model(composer, name)) is not None
        }
        # A task's input images do not affect options; the reference model has images of its own.
        self._tasks = {
            name: composer.variant(name, ["model=emoji", f"task={name}"]).task
            for name in tasks
        }

    def cells(
        self, device: Device, shown: Shown, sheets: Mapping[str, Sheet]
    ) -> list[OptionOutcome]:
        """Returns what is known of each option with each model and each task on a device."""
        label = label_of(device.type, device.name, sheets, device.memory_total_gib)
        others = alternatives(self._made)
        found = []
        for (group, option), made in self._made.items():
            for model, task in product(self._models, self._tasks):
                standing = Standing.IMPOSSIBLE
                if isinstance(made, Variant):
                    variant = replace(
                        made, model=self._models[model], task=self._tasks[task]
                    )
                    fit = fit_on(device, group, variant, others)
                    why = "; ".join(fit.remarks)
                    if fit.runs:
                        standing = Standing.NOT_MEASURED
                else:
                    why = "; ".join(made)
                here = shown.get((group, option, model, task), {}).get(label)
                if standing is not Standing.IMPOSSIBLE and here is not None:
                    standing = here.standing
                    if standing is not Standing.TOOK_EFFECT:
                        why = here.why
                found.append(OptionOutcome(group, option, model, task, standing, why))
        return found


def _model(composer: Composer, name: str) -> Model | None:
    """Returns a model that needs no hub; None if a key of it is missing, or only a hub has its architecture."""
    try:
        model = composer.variant(name, [f"model={name}"]).model
    except UsageError:
        return None
    if model.weights != "hub":
        return model
    return (
        None if architecture_folder(model) is None else replace(model, weights="random")
    )


def records_in(folder: Path) -> list[StudyResult]:
    """Returns the results below a folder. Raises UsageError if one cannot be read."""
    return [read_result(path) for path in sorted(folder.rglob("result.json"))]


def shown_in(
    records: Iterable[StudyResult], sheets: Mapping[str, Sheet]
) -> dict[Key, dict[str, OptionOutcome]]:
    """Returns the state that records show for each option, model and task, by device; the best of several counts.

    Skipped variants are left out: their conflicts are found anew by the matrix itself.
    """
    found: dict[Key, dict[str, OptionOutcome]] = {}
    for record in records:
        device = record.environment.device
        memory_gib = device.get("memory_total_gib")
        label = label_of(str(device["type"]), str(device["name"]), sheets, memory_gib)
        skipped = {
            variant.reason
            for variant in record.variants
            if variant.status is Status.SKIPPED
        }
        for outcome in outcomes_of(record):
            if outcome.standing is Standing.CANNOT_RUN and outcome.why in skipped:
                continue
            known = found.setdefault(outcome.key, {})
            best = known.setdefault(label, outcome)
            if ORDER.index(outcome.standing) < ORDER.index(best.standing):
                known[label] = outcome
    return {key: dict(sorted(known.items())) for key, known in found.items()}


def label_of(
    kind: str,
    name: str,
    sheets: Mapping[str, Sheet],
    memory_gib: float | None = None,
) -> str:
    """Returns a device's name in the matrix: the name on the card's data sheet, or one name for all processors."""
    if kind == "cpu":
        return _CPU
    sheet = sheet_of(name, sheets.values(), memory_gib)
    return name if sheet is None else sheet.name


def grouped(texts: Mapping[tuple[str, str], str]) -> Iterator[tuple[str, str, str]]:
    """Yields models and tasks grouped by their common statement, with as few groups as possible."""
    models = list(dict.fromkeys(model for model, _ in texts))
    tasks = list(dict.fromkeys(task for _, task in texts))
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for model in models:
        by_text: dict[str, list[str]] = {}
        for task in tasks:
            by_text.setdefault(texts[model, task], []).append(task)
        for text, of_tasks in by_text.items():
            alike.setdefault((tuple(of_tasks), text), []).append(model)
    for (same, text), of_models in alike.items():
        yield _listed(of_models, models), _listed(same, tasks), text


def _listed(names: Sequence[str], everything: Sequence[str]) -> str:
    return "all" if len(names) == len(everything) else ", ".join(names)
