"""Logs a search to MLflow: a run above the runs of its trials and above the study that judged the finalists."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdopt.record.records import StudyResult
from sdopt.schema import Tracking
from sdopt.tracking import client
from sdopt.tracking.client import DIGEST, NOTE, ROLE, STUDY, Logged, Run
from sdopt.tracking.projection import common_tags, note_of, time_of
from sdopt.tracking.runs import digest_of
from sdopt.tracking.store import ask

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


def log_search(search: SearchRun, judged: StudyResult | None, tracking: Tracking) -> Logged:
    """Logs a search, replacing its earlier runs.

    Args:
        search: the content of the runs.
        judged: the study of the finalists; if it is logged, its run is put below the search's.
        tracking: the store.

    Raises:
        TrackingError: the server cannot be reached or refuses.
    """
    shown = search.screened
    common = common_tags(shown, shown.config) if shown else {}
    own = {name: str(value) for name, value in (tracking.tags or {}).items()}  # the studies that screen have none
    common = {name: value for name, value in common.items() if name != STUDY} | own | {_SEARCH: search.identity}
    started = time_of(search.started, "") if search.started else int(1000 * time.time())
    run = Run(
        name=search.name,
        tags={**common, ROLE: "search", "answer": search.sentence, NOTE: note_of(search.note)},
        started=started,
        parameters=search.parameters,
        files={("images/" if file.suffix == ".png" else "") + file.name: file for file in search.files},
        below=[
            Run(
                name=trial.name,
                tags={**common, ROLE: "trial", **trial.tags},
                started=started + rank,  # MLflow lists the latest run first
                parameters=trial.parameters,
                metrics=[(name, value, 0) for name, value in trial.metrics.items()],
            )
            for rank, trial in enumerate(reversed(search.trials), start=1)
        ],
    )
    content = [file.read_bytes() for file in search.files]
    digest = hashlib.sha256(b"".join([*content, repr(search.trials).encode()])).hexdigest()[:16]
    below = [f"tags.`{STUDY}` = '{judged.id}' and tags.`{DIGEST}` = '{digest_of(judged)}'"] if judged else []
    note = note_of(f"**{search.name}:** {search.sentence}")
    mine = [f"tags.`{_SEARCH}` = '{search.identity}'"]
    return ask(client.put, tracking, search.experiment, run, mine, digest, below, note)
