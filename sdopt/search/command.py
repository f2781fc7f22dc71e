"""Sets up a search from a command line, or finds the search that an earlier call of the same command line began."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets, require_overrides
from sdopt.config.parse import RunConfig
from sdopt.errors import (
    OccupiedError,
    UnavailableError,
    UsageError,
    print_problems,
    without_passwords,
)
from sdopt.forecast import foreseen
from sdopt.hardware.probe import busy_with_other_work, slowed_by_other_work
from sdopt.locks import lock_folder
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.preparation import awaits_clip, fetch, fetch_clip
from sdopt.record.files import inside, read_result, short_digest, write_atomically
from sdopt.record.records import StudyResult
from sdopt.report.columns import tracked_metrics, tracked_tags
from sdopt.report.sentences.changes import duration_text
from sdopt.schema import Tracking
from sdopt.search.answer import record_of
from sdopt.search.answered import Answered, numbered, read_answered, write_answered
from sdopt.search.config import SearchConfig, search_config, split
from sdopt.search.expectation import expected_speedups, planned_speedups
from sdopt.search.record import (
    PAGE,
    PLOT,
    RECORD,
    TABLES,
    SearchEntry,
    SearchRecord,
    markdown_of,
    page_of,
)
from sdopt.search.run import Search
from sdopt.search.space import Space
from sdopt.search.studies import Studies
from sdopt.search.trials import Trials
from sdopt.study.fingerprint import changed_inputs, of_model
from sdopt.study.plan import describe_environment
from sdopt.study.resume import other_surroundings
from sdopt.tracking import client
from sdopt.tracking.client import DIGEST, NOTE, ROLE, STUDY, Logged, TrackedRun
from sdopt.tracking.contents import common_tags, note_of, time_of
from sdopt.tracking.runs import digest_of
from sdopt.tracking.store import ask, require_store
from sdopt.worker.forkserver import StartContext, start_fork_server
from sdopt.worker.machine import Machine, find_machine

_MANY = 10_000
"""Combinations that a dry run counts."""

RESULTS = Path("outputs")
"""Folder of the results that this machine has measured."""

_HOW_LONG = ("budget_s", "trials", "folder", "storage")
"""Keys that another call of the same search may change."""

_SEARCH = "sdopt.search"
"""Tag of all runs of a search: its folder's name."""


@dataclass(frozen=True)
class Prepared:
    """The search that a command line asks for, before anything is written.

    Attributes:
        given: overrides for the studies, which compose `baseline`.
        config_dir: a folder with the user's own config groups.
        machine: where they would run.
    """

    config: SearchConfig
    given: Sequence[str]
    config_dir: Path | None
    baseline: RunConfig
    space: Space
    machine: Machine
    context: StartContext

    def foreseen(self) -> tuple[list[str], bool]:
        """Returns lines on what is tried, for how long, and what a call takes here; and whether the baseline's fits."""
        alone = self.space.candidates(self.space.alone())
        whole = sum(1 for _ in islice(self.space.points(), _MANY))
        variants = [*self.space.variants([]), *self.space.variants(alone)]
        call_s, lines, too_large = foreseen(variants, self.machine, self.context)
        if not lines and call_s is not None:
            call = duration_text(call_s)
            lines = [f"a call of the baseline takes about {call}, by `sdopt plan`"]
        fits = variants[0].name not in too_large
        if not fits:
            lines.append(
                f"the baseline does not fit in the memory of {self.machine.device.name}, and nothing can be held against "
                "it: begin with what `sdopt plan` says that fits"
            )
        told = [
            f"{whole}{' or more' if whole == _MANY else ''} combinations: the {len(alone)} single options come first",
            f"it ends after {self.config.budget_s / 60:.3g} min (search.budget_s), or later where judging takes longer",
            *lines,
        ]
        return told, fits

    def expected_call_s(self) -> float | None:
        """Returns the seconds that are expected of a call of the baseline; None where it expects none."""
        call_s, _, _ = foreseen(self.space.variants([]), self.machine, self.context)
        if call_s is None or self.machine.device.is_cuda:
            return call_s
        return call_s * slowed_by_other_work()


def prepare(
    overrides: Sequence[str], config_dir: Path | None, dry: bool = False
) -> Prepared:
    """Reads a command line: `search.…` overrides, and those of the studies; `dry` measures and downloads nothing.

    Raises:
        UsageError: an override cannot be read or composed, or no option can run here.
    """
    config = search_config(overrides, config_dir)
    _, overrides_of_studies = split(overrides)
    require_overrides(overrides_of_studies)
    with composer_of(overrides_of_studies, config_dir) as composer:
        if not dry and awaits_clip(composer):
            fetch_clip(composer)
        run = composer.current
        context = start_fork_server(dry)
        machine, context = find_machine(context, run.hardware, data_sheets, dry)
        space = Space.of(config, composer, machine.device, config_dir)
        alone = space.variants(space.candidates(space.alone()))
        planned = {} if dry else planned_speedups(alone, machine, context)
        expected = expected_speedups(machine.device, RESULTS, planned)
        space = replace(space, expected=expected)
        return Prepared(
            config, overrides_of_studies, config_dir, run, space, machine, context
        )


@contextmanager
def begun(
    prepared: Prepared,
    began: float,
    say: Callable[[str], None],
    brief: bool = False,
    again: bool = False,
) -> Iterator[Search]:
    """Yields a search, new or as an earlier call left it, and locks its folder for the duration.

    Args:
        prepared: what the command line asks for.
        began: when the command began, in seconds of the monotonic clock.
        say: as for `Search`.
        brief: likewise.
        again: whether it begins anew, in a folder of its own, where an earlier call has begun.

    Raises:
        UsageError: a storage cannot be written, or an earlier call's files and trials do not belong together.
    """
    config = prepared.config
    if warning := require_store(prepared.baseline.tracking, config.title):
        say(warning)
    if not prepared.machine.device.is_cuda and (busy := busy_with_other_work()):
        say(f"{busy}: calls take longer here, and their times differ more")
    folder = _folder_of(prepared, again)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder) as ours:
        if not ours:
            raise OccupiedError(
                f"{folder}: another search runs in this folder; wait for it, or add --again"
            )
        trials = Trials.open(folder.name, prepared.space, config)
        _require_same(folder, trials, prepared)
        answered = read_answered(folder)
        goes_on = False
        if answered is not None:
            goes_on = not answered.covers(config.budget_s, config.trials)
        search = Search(
            config,
            prepared.space,
            Studies(prepared.given, config, prepared.config_dir, folder),
            trials,
            began + config.budget_s,
            say,
            brief,
            expected_call_s=prepared.expected_call_s,
            ready_s=time.monotonic() - began,
            answered=answered is not None,
            goes_on=goes_on,
        )
        try:
            yield search
        finally:
            with suppress(OSError):  # of all that measured something
                folder.rmdir()


def _require_same(folder: Path, trials: Trials, prepared: Prepared) -> None:
    """Raises UsageError if what an earlier call left in a folder is not of the trials, or of other surroundings."""
    there = {path.parent.name for path in folder.glob("screen-*/result.json")}
    if trials.measured - there or there - trials.stages:
        storage = prepared.config.storage
        raise UsageError(
            f"search.storage={storage} and {folder} do not belong together: one of them was removed; begin another "
            "search with --again"
        )
    if not there:
        return
    problems = []
    for reason in _since(read_result(folder / min(there)), prepared):
        problems.append(
            f"{folder}: cannot go on, since its studies were of others: {reason}; begin another search with --again"
        )
    if problems:
        raise UsageError(problems)


def _since(earlier: StudyResult, prepared: Prepared) -> Iterator[str]:
    """Yields what has changed since a study of a search: what it is called by, and its settings, are the same."""
    was = earlier.environment
    threads = earlier.config.hardware.threads
    now = describe_environment(prepared.machine, [], threads)
    yield from other_surroundings(was, now)
    if was.code != now.code:
        yield f"sdopt: was {was.sdopt}, now {now.sdopt}"
    [baseline] = prepared.space.variants([])
    row = earlier.baseline_variant
    # Else the next study fetched what a repository holds by now, beside what the earlier ones measured.
    fetch([baseline], prepared.context)
    changed = changed_inputs(baseline, row.inputs, of_model)
    for name, (digest, there) in changed.items():
        yield f"the contents of its {name}: was {digest}, now {there}"
    count = max((image.prompt_index + 1 for image in row.images), default=0)
    if count:
        workload = replace(baseline.workload, prompt_count=count)
        prompts = resolve_prompts(workload, baseline.model)
        if any(prompts[image.prompt_index] != image.prompt for image in row.images):
            yield "its prompts"


def _folder_of(prepared: Prepared, again: bool) -> Path:
    """Returns the folder of the newest search of those that are the same, or that of one more."""
    config = prepared.config
    name = f"{config.title}-{_identity(prepared)}"
    base = Path(config.folder).expanduser() / name
    there = numbered(base)
    if not there:
        return base
    if not again:
        return there[-1]
    newest = re.fullmatch(rf"{re.escape(base.name)}\.(\d+)", there[-1].name)
    return base.with_name(f"{base.name}.{int(newest[1]) + 1 if newest else 2}")


def _identity(prepared: Prepared) -> str:
    """Returns a key that two calls share if they are the same search: the same settings, on the same device."""
    settings = {
        key: value
        for key, value in asdict(prepared.config).items()
        if key not in _HOW_LONG
    }
    recorded = replace(prepared.baseline.recorded, tracking=Tracking())
    identity = repr((settings, recorded, prepared.space.device.name))
    return short_digest(identity.encode())[:10]


def answered(search: Search, question: str) -> None:
    """Writes that a search is answered, so that the same question within the same budget has its answer at once.

    Does nothing where the budget ended before the best candidate was judged: another call judges it. Raises OSError.
    """
    if search.unjudged is not None:
        return
    folder = search.studies.folder
    config = search.config
    longest = Answered(config.budget_s, config.trials, question)
    earlier = read_answered(folder)
    if earlier is not None and earlier.covers(config.budget_s, config.trials):
        longest = replace(earlier, question=question)
    write_answered(folder, longest)


def concluded(search: Search, ended: bool = True) -> SearchRecord:
    """Writes what a search has found so far to its folder, and returns it; see `record_of`. Raises OSError."""
    record, folder = record_of(search, ended), search.studies.folder
    write_atomically(
        folder / RECORD,
        json.dumps(asdict(record), indent=1, ensure_ascii=False).encode(),
    )
    write_atomically(folder / TABLES, markdown_of(record).encode())
    try:
        # What draws is large, and a machine that only measures may lack it.
        from sdopt.report.charts.spec import picture
        from sdopt.report.page.html import html_page
        from sdopt.search.plot import search_chart, search_plot

        plot, chart = search_plot(record), search_chart(record)
        if plot is not None:
            write_atomically(folder / PLOT, picture(plot))
        write_atomically(
            folder / PAGE, html_page(page_of(record, [chart] if chart else []))
        )
    except (UnavailableError, ModuleNotFoundError) as error:
        print_problems([f"no {PLOT} and {PAGE}: {error}"])
    return record


def logged(search: Search, record: SearchRecord, tracking: Tracking) -> Logged:
    """Logs a search to MLflow, replacing its earlier runs: a run above those of its trials and of the judged studies.

    Raises:
        UsageError: one of its files is a link that leads out of its folder.
        TrackingError: the server cannot be reached or refuses.
    """
    folder = search.studies.folder
    files = [
        path
        for name in (RECORD, TABLES, PLOT, PAGE)
        if (path := inside(folder, name)).is_file()
    ]
    judged = [summary.result for summary in search.judgements.studies.values()]
    screened = next(iter([*search.results.of("screen-"), *judged]), None)
    tags = common_tags(screened, screened.config) if screened else {}
    tags.pop(STUDY, None)
    # The studies that screen have none of the user's.
    tags |= {**tracking.own_tags, _SEARCH: folder.name}
    started = time_of(record.started) if record.started else int(1000 * time.time())
    name = f"{record.name} {time.strftime('%Y-%m-%d %H:%M')}"
    run = TrackedRun(
        name=name,
        tags={
            **tags,
            ROLE: "search",
            "answer": record.sentence,
            NOTE: note_of(markdown_of(record)),
        },
        started=started,
        parameters=parameters_of(search.config, search.studies.given),
        files={_artifact(file): file for file in files},
        below=_trials(record, tags, started),
    )
    digest = short_digest(b"".join(file.read_bytes() for file in files))
    complete = [
        f"tags.`{STUDY}` = '{study.id}' and tags.`{DIGEST}` = '{digest_of(study)}'"
        for study in judged
    ]
    mine = [f"tags.`{_SEARCH}` = '{folder.name}'"]
    note = note_of(f"**{name}:** {record.sentence}")
    return ask(client.put, tracking, record.name, run, mine, digest, complete, note)


def parameters_of(config: SearchConfig, given: Sequence[str]) -> dict[str, str]:
    """Returns the parameters of a search's run: its keys, and what was given for all studies, without passwords."""
    parameters = {f"search.{key}": str(value) for key, value in asdict(config).items()}
    parameters["given"] = " ".join(given)
    return {name: without_passwords(value) for name, value in parameters.items()}


_TAGS = {
    "workload.steps": "steps",
    "workload.batch_size": "batch",
    "workload.size": "size",
}
"""Tags of the work of a run, by the keys that they have the values of."""


def _artifact(file: Path) -> str:
    """Returns the path of a file among the artifacts of a run."""
    return f"images/{file.name}" if file.suffix == ".png" else file.name


def _trials(
    record: SearchRecord, tags: Mapping[str, str], started: int
) -> list[TrackedRun]:
    """Returns the runs of the candidates that were not judged: the others have one of the study that judged them."""
    trials = []
    # MLflow lists the latest run first.
    for rank, entry in enumerate(reversed(record.entries), start=1):
        if not entry.judged:
            trials.append(trial_run(entry, record, tags, started + rank))
    return trials


def trial_run(
    entry: SearchEntry, record: SearchRecord, tags: Mapping[str, str], started: int
) -> TrackedRun:
    """Returns the run of one candidate, with the tags that all of them have."""
    figures = {
        "speedup": entry.speedup,
        "speedup_low": entry.low,
        "speedup_high": entry.high,
        "memory_ratio": entry.memory_ratio,
        "latency/p50_s": entry.latency_s,
        "latency/image_s": entry.image_s if entry.per_image else None,
        "memory_gib": entry.memory_gib,
        f"quality/{record.distance}": entry.distance,
        "processes": float(entry.processes),
        "compile/recompiles": entry.recompiles,
    }
    if entry.start is not None:
        figures |= {
            "start/first_image_s": entry.start.first_image_s,
            "start/extra_s": entry.start.extra_s,
            "break_even/images": entry.start.images,
        }
    answer = f"{entry.fate}: {entry.because}" if entry.because else str(entry.fate)
    words = {
        "fate": str(entry.fate),
        "answer": answer[:5000],
        "command": entry.command,
        NOTE: note_of(answer),
    }
    parameters = dict(
        override.lstrip("+").partition("=")[::2] for override in entry.overrides
    )
    # The tags that all have are of the baseline's work; a combination may choose other steps, or more images.
    own = {
        tag: parameters[key]
        for key, tag in _TAGS.items()
        if tag in tags and key in parameters
    }
    return TrackedRun(
        name=entry.name,
        tags={**tags, **own, ROLE: "trial", **tracked_tags(entry.columns), **words},
        started=started,
        parameters=parameters,
        metrics=tracked_metrics(entry.columns)
        | {name: value for name, value in figures.items() if value is not None},
    )
