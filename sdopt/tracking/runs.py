"""Logs studies, variants and sweeps as MLflow runs, from `result.json`; `contents` derives what the runs hold.

A study is a run whose note is the result table; each variant is a run below it. Everything can be logged again
from the file; what is there already is not logged twice.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from sdopt.errors import UnavailableError, UsageError
from sdopt.record.files import inside, parse_result, short_digest, to_json
from sdopt.record.records import StudyResult
from sdopt.report import catalog
from sdopt.report.catalog import HTML, MARKDOWN
from sdopt.report.page.gallery import has_images
from sdopt.report.summary import Summary, summary_of
from sdopt.report.sweep import Sweep
from sdopt.schema import Tracking
from sdopt.statistics.row_figures import PASSED
from sdopt.tracking import client
from sdopt.tracking.client import (
    DIGEST,
    NOTE,
    ROLE,
    STUDY,
    Logged,
    TrackedRun,
)
from sdopt.tracking.contents import (
    OF_THE_BEST,
    config_yaml,
    judged_tags,
    logged_metrics,
    note_of,
    run_name,
    study_metrics,
    study_parameters,
    study_tags,
    sweep_metrics,
    sweep_parameters,
    sweep_tags,
    swept_parameters,
    time_of,
    variant_run,
    verdict_tags,
)
from sdopt.tracking.store import ask, store_exists

_SWEEP = "sdopt.sweep"

_SHORT = 12  # digits of a study's id in lists


def log_study(
    result: StudyResult,
    folder: Path,
    tracking: Tracking,
    summary: Summary | None = None,
    rendered: Mapping[str, bytes] | None = None,
) -> Logged:
    """Logs a finished study with all its variants, once.

    The study's run has the result table and the verdicts as its note, the machine, versions and answer as tags
    (`study_tags`), a few parameters and metrics (`study_metrics`), and as artifacts `result.json`, `config.yaml`, each
    report and, with `tracking.images`, each picture. Below it, each variant's run (`variant_run`) has its verdicts and
    choices as tags, the parameters in which variants differ, its figures as metrics (`logged_metrics`),
    `evidence.json`, and with `tracking.images` images of the first prompts.

    They go to the experiment that has the study's name, in the database or server `tracking.uri`; artifacts go to
    `tracking.artifacts`, or where a server keeps them. `client.put` writes them, in MLflow's process.

    Args:
        result: the study.
        folder: where its images and pictures are.
        tracking: where it goes.
        summary: the study summed up, where that was done.
        rendered: its reports by their files, where they were rendered; None to render those that are texts.

    Raises:
        UsageError: the result names files that are not in its folder; nothing was logged.
        TrackingError: the server cannot be reached or refuses.
    """
    summary = summary or summary_of(result)
    run = _run_of(summary, folder, tracking.images, rendered)
    # That of the experiment, above the leaderboard: the answer of its newest study that compared something.
    note = None
    if _compares(summary):
        note = _note_of_experiment(run.name, summary.sentence)
    return ask(
        client.put,
        tracking,
        result.name,
        run,
        [_of_study(result)],
        digest_of(result),
        (),
        note,
    )


def _run_of(
    summary: Summary,
    folder: Path,
    images: bool,
    rendered: Mapping[str, bytes] | None,
) -> TrackedRun:
    """Returns what the run of a study holds, and those of its variants below it."""
    result = summary.result
    drawn = [
        inside(folder, report.file)
        for report in catalog.REPORTS
        if report.is_picture and images
    ]
    return TrackedRun(
        name=run_name(result, folder),
        tags=study_tags(summary),
        status="FINISHED" if result.status == "finished" else "KILLED",
        started=time_of(result.started),
        ended=time_of(result.finished or result.started),
        parameters={
            **swept_parameters(result, folder),
            **study_parameters(result, result.config),
        },
        metrics=study_metrics(summary),
        # Not from the files, which may be outdated if the disk is full.
        files={
            "result.json": to_json(result),
            "config.yaml": config_yaml(result).encode(),
            **_texts(summary, folder, images, rendered),
        },
        pictures=[(file.stem, None, file) for file in drawn if file.is_file()],
        below=[
            variant_run(summary, variant, folder, images) for variant in result.variants
        ],
    )


def _compares(summary: Summary) -> bool:
    return any(row.speed or row.images for row in summary.candidates)


def _note_of_experiment(name: str, answer: str) -> str:
    return note_of(
        f"**{name}:** {answer}\n\nStudies have notes with all verdicts and figures."
    )


def update_verdicts(
    summary: Summary, folder: Path, tracking: Tracking, rendered: Mapping[str, bytes]
) -> str | None:
    """Updates the runs of a logged study with a gate's later verdicts; returns the id of its run, None if it has none.

    `rendered` are its reports by their files. Raises TrackingError if the server cannot be reached or refuses.
    """
    result = summary.result
    if tracking.kind == "none" or not store_exists(tracking):
        return None
    metrics, mine = study_metrics(summary), [_of_study(result)]
    judged = {}
    gone = {"": [name for name in OF_THE_BEST if name not in metrics]}
    for variant in result.variants:
        logged = logged_metrics(summary, variant)
        judged[variant.name] = {PASSED: logged[PASSED]} if PASSED in logged else {}
        gone[variant.name] = [] if PASSED in logged else [PASSED]
    # Of an option that the verdicts have refused, or no longer decide. MLflow deletes no metric, and shows no run with
    # one that is NaN.
    outdated = ask(client.holds, tracking, result.name, mine, gone)
    if outdated and has_images(result, folder):
        return log_study(result, folder, tracking, summary, rendered).run
    files = {
        **_texts(summary, folder, images=False, rendered=rendered),
        "result.json": to_json(result),
    }
    # The logged file must equal this result, else a later sync would log it a second time.
    tags = {**judged_tags(summary), DIGEST: digest_of(result)}
    changes = {"": TrackedRun(tags=tags, files=files, metrics=metrics)}
    for variant in result.variants:
        changes[variant.name] = TrackedRun(
            tags=verdict_tags(summary, variant), metrics=judged[variant.name]
        )
    return ask(client.amend, tracking, result.name, mine, changes) or None


def download_run(run: str, tracking: Tracking) -> tuple[StudyResult, str | None]:
    """Returns the study that a run belongs to, and the name of the variant whose run it is; None for the study's own.

    Raises:
        UsageError: there is no such run, it is not a study's run, or its result cannot be read.
        TrackingError: the server cannot be reached.
    """
    if not store_exists(tracking) and find_spec("mlflow") is not None:
        raise client.unknown(run, f"at {tracking.uri}, which does not exist")
    content, variant = ask(client.read, tracking, run)
    try:
        return parse_result(content), variant
    except UsageError as error:
        raise UsageError(
            [f"{run}: its result.json: {problem}" for problem in error.problems]
        ) from error


def log_sweep(sweep: Sweep, table: str, tracking: Tracking) -> Logged:
    """Logs a run above a sweep's studies, once, with their table as its note.

    It has the sweep's answer as a tag, what its studies are of, and their metrics (`sweep_metrics`). Its artifacts are
    the table, and the report if the folder has one.

    Raises:
        UsageError: the report is a link that leads out of the folder; nothing was logged.
        TrackingError: the server cannot be reached or refuses.
    """
    folder, studies = sweep.folder, list(sweep.studies.values())
    pages = {
        name: page
        for name in (HTML, MARKDOWN)
        if (page := inside(folder, name)).is_file()
    }
    # Made from the sweep's studies, not from its folder, which may be a copy from another machine; a resumed sweep
    # shares some studies with its earlier run.
    ids = " ".join(sorted(study.id[:_SHORT] for study in studies))
    ends = [study.finished or study.started for study in studies]
    run = TrackedRun(
        name=f"sweep {folder.name}",
        status="FINISHED" if sweep.ended else "KILLED",
        started=min(time_of(study.started) for study in studies),
        ended=max(map(time_of, ends)),
        tags={
            NOTE: note_of(table),
            ROLE: "sweep",
            _SWEEP: ids,
            **sweep_tags(sweep),
        },
        parameters=sweep_parameters(sweep),
        metrics=sweep_metrics(sweep),
        files={"sweep.md": table.encode(), **pages},
    )
    digest = short_digest((ids + table).encode())
    compared = any(map(_compares, sweep.summaries.values()))
    complete = [
        f"{_of_study(study)} and tags.`{DIGEST}` = '{digest_of(study)}'"
        for study in studies
    ]
    return ask(
        client.put,
        tracking,
        studies[0].name,
        run,
        [_of_sweep(study) for study in studies],
        digest,
        complete,
        _note_of_experiment(run.name, sweep.sentence) if compared else None,
    )


def log_report(
    studies: Sequence[StudyResult],
    files: Sequence[Path],
    tracking: Tracking,
    *,
    swept: bool,
    replace: bool,
) -> str | None:
    """Adds files to the artifacts of a study that is logged, or of the run above the studies of a sweep (`swept`).

    They take the place of artifacts of the same name, or not (`replace`). Returns the id of the run; None if none is
    logged. Raises TrackingError if the server cannot be reached or refuses.
    """
    mine = (
        _of_sweep(studies[0])
        if swept
        else f"{_of_study(studies[0])} and tags.`{ROLE}` = 'study'"
    )
    added = {"": TrackedRun(files={file.name: file for file in files})}
    return ask(client.amend, tracking, studies[0].name, [mine], added, replace) or None


def digest_of(result: StudyResult) -> str:
    """Returns what identifies exactly this result, in the tag of its run if that is complete."""
    return short_digest(to_json(result))


def _of_study(study: StudyResult) -> str:
    return f"tags.`{STUDY}` = '{study.id}'"


def _of_sweep(study: StudyResult) -> str:
    return f"tags.`{_SWEEP}` LIKE '%{study.id[:_SHORT]}%'"


def _texts(
    summary: Summary,
    folder: Path,
    images: bool,
    rendered: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """Returns the reports that are no pictures, of those that were `rendered`, or else renders them."""
    texts: dict[str, bytes] = {}
    rendering = catalog.Rendering(summary, folder)
    for report in catalog.REPORTS:
        # Without the images beside it, a page would take the place of the logged one, which has them.
        if report.is_picture or (
            report.file == HTML
            and not images
            and not has_images(summary.result, folder)
        ):
            continue
        try:
            content = (
                report.render(rendering)
                if rendered is None
                else rendered.get(report.file)
            )
        except UnavailableError:  # as `write_reports` has said
            continue
        if content is not None:
            texts[report.file] = content
    return texts
