"""Logs a search to MLflow: a run above the runs of its trials and above the study that judged the finalists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdopt.results.records import StudyResult
from sdopt.schema import Tracking
from sdopt.tracking.projection import NOTE, STUDY, common_tags, note_of, time_of
from sdopt.tracking.runs import log_params, logged_run
from sdopt.tracking.store import find_experiment, set_experiment_tag, with_store

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SEARCH = "sdopt.search"


@dataclass(frozen=True)
class TrialRun:
    """Content of the run of one trial."""

    name: str
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class SearchRun:
    """Content of the run of a search.

    Attributes:
        identity: id of the search, the same for everyone who logs it.
        experiment: the name of the MLflow experiment.
        name: the name of the run.
        started: when the first trial was proposed, as an ISO date; "" if none was.
        note: Markdown, shown first.
        parameters: what was searched.
        files: files for its artifacts.
        trials: the trials, each logged as a run below it, in this order.
        sentence: the answer, for the experiment's note and the leaderboard.
        screened: a study of the search, whose model, device and versions become tags.
    """

    identity: str
    experiment: str
    name: str
    started: str
    note: str
    parameters: Mapping[str, str]
    files: Sequence[Path]
    trials: Sequence[TrialRun]
    sentence: str
    screened: StudyResult | None


def log_search(search: SearchRun, judged: StudyResult | None, tracking: Tracking) -> str:
    """Logs a search, replacing its earlier runs; returns the id of its run.

    Args:
        search: the content of the runs.
        judged: the study of the finalists; if it is logged, its run is put below the search's.
        tracking: the store.

    Raises:
        TrackingError: the server cannot be reached or refuses.
    """
    run, _ = with_store(tracking, search.identity, lambda client: (_log(client, search, judged, tracking), True))
    return run


def _log(client: "MlflowClient", search: SearchRun, judged: StudyResult | None, tracking: Tracking) -> str:
    from mlflow.entities import Metric
    from mlflow.utils.time import get_current_time_millis

    experiment = find_experiment(client, search.experiment, tracking)
    before = client.search_runs([experiment], f"tags.`{_SEARCH}` = '{search.identity}'", max_results=50_000)
    shown = search.screened
    common = common_tags(shown, shown.config) if shown else {}
    own = {name: str(value) for name, value in (tracking.tags or {}).items()}  # the studies that screen have none
    common = {name: value for name, value in common.items() if name != STUDY} | own | {_SEARCH: search.identity}
    tags = {**common, "sdopt.role": "search", "answer": search.sentence, NOTE: note_of(search.note)}
    started = time_of(search.started, "") if search.started else get_current_time_millis()
    parent = str(client.create_run(experiment, started, tags, search.name).info.run_id)
    log_params(client, parent, dict(search.parameters))
    for file in search.files:
        if file.suffix == ".png":
            client.log_artifact(parent, str(file), "images")
        else:
            client.log_artifact(parent, str(file))
    for rank, trial in enumerate(reversed(search.trials), start=1):
        below = {**common, "sdopt.role": "trial", "mlflow.parentRunId": parent, **trial.tags}
        # MLflow lists the latest run first.
        run = str(client.create_run(experiment, started + rank, below, trial.name).info.run_id)
        log_params(client, run, dict(trial.parameters))
        now = get_current_time_millis()
        client.log_batch(run, metrics=[Metric(name, value, now, 0) for name, value in trial.metrics.items()])
        client.set_terminated(run)
    study = logged_run(client, experiment, judged) if judged else None
    if study is not None:
        client.set_tag(study, "mlflow.parentRunId", parent)
    for run in before:
        client.delete_run(run.info.run_id)
    set_experiment_tag(client, experiment, NOTE, note_of(f"**{search.name}:** {search.sentence}"))
    client.set_terminated(parent)
    return parent
