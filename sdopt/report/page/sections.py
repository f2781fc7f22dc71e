"""Makes the sections of a study's report, in the order of a reader's questions: from answer to environment."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sdopt.analysis.answer import Answer, OptionAnswer, answer_of
from sdopt.analysis.break_even import images_text, start_text
from sdopt.analysis.figures import figures_of
from sdopt.analysis.published import Claim, claims_of, notes_of_published, shown_claims
from sdopt.report.charts.comparisons import break_even_plot, forest, interactions, main_effects, waterfall
from sdopt.report.charts.spec import Spec
from sdopt.report.charts.times import distribution_plot, limit_plot, rounds_plot, stages_plot
from sdopt.report.charts.tradeoff import tradeoffs
from sdopt.report.header import work_of
from sdopt.report.notes import SWEEP_NOTE, notes_of
from sdopt.report.page.blocks import Block, Chart, Code, Facts, Fold, Notes, Page, Prose, Section, Table
from sdopt.report.page.gallery import gallery_of, has_images
from sdopt.report.plots import main_plot
from sdopt.report.published import claims_table
from sdopt.report.quality import headline_columns, quality_heading, quality_notes, quality_rows
from sdopt.report.rows import ANSWER_HEADINGS, EFFECT_HEADINGS, Row, answer_cells, effect_cells, rows_of, table_of
from sdopt.report.shapes import SHAPE_HEADINGS, shape_rows
from sdopt.report.verdicts import VERDICT_HEADINGS, verdict_notes, verdict_rows
from sdopt.report.words import intervals_text
from sdopt.results.comparisons import BreakEven
from sdopt.results.records import StudyResult

IMAGES_BYTES = 3_000_000
"""Maximum bytes of all images of a page."""


def study_page(result: StudyResult, folder: Path, budget: int = IMAGES_BYTES) -> Page:
    """Returns the report of a study.

    Args:
        result: the study.
        folder: the run's, where its images are.
        budget: bytes that its images may take.
    """
    answer = answer_of(result)
    sections = (
        _answer(answer),
        _results(result),
        _published(result),
        _tradeoff(result),
        *_design(result),
        _latency(result),
        _stages(result),
        _limit(result),
        _break_even(result),
        _images(result, folder, budget),
        _method(result),
        _environment(result),
    )
    return Page(result.name, _summary(result), [section for section in sections if section.blocks])


def sweep_page(name: str, rows: Sequence[tuple[str, Row]], studies: Sequence[tuple[str, StudyResult, Path]]) -> Page:
    """Returns the report of a sweep: one table of all, then each study as in a report of its own.

    Args:
        name: the sweep's.
        rows: the number of a job and a row of its table.
        studies: the number of each job, its study and its folder.
    """
    headings, cells = table_of([row for _, row in rows])
    numbered = [(number, *row) for (number, _), row in zip(rows, cells, strict=True)]
    table = Table(("job", *headings), numbered, 1 + headings.index("status"))
    section = Section("jobs", "All jobs", [table, Notes([SWEEP_NOTE])])
    budget = IMAGES_BYTES // max(1, len(studies))
    pages = [study_page(study, folder, budget) for _, study, folder in studies]
    titled = [
        Page(f"job {number}: {page.title}", page.summary, page.sections)
        for (number, _, _), page in zip(studies, pages, strict=True)
    ]
    summary = [("jobs", str(len({number for number, _ in rows})))]
    return Page(f"sweep {name}", summary, [section], titled)


def _summary(result: StudyResult) -> list[tuple[str, str]]:
    environment = result.environment
    return [
        ("work", work_of(result.config)),
        ("device", str(environment.device["name"])),
        ("versions", f"sdopt {environment.sdopt_version}, PyTorch {environment.packages.get('torch')}"),
        ("measured", f"{result.started[:16].replace('T', ' ')} ({result.status})"),
    ]


def _answer(answer: Answer) -> Section:
    blocks: list[Block] = [Prose(answer.sentence, strong=True)]
    if answer.best is not None:
        blocks += list(_adoption(answer.best))
    if answer.options:
        blocks.append(Table(ANSWER_HEADINGS, list(map(answer_cells, answer.options)), ANSWER_HEADINGS.index("verdict")))
    return Section("answer", "Answer", [*blocks, Notes(answer.notes)])


def _adoption(option: OptionAnswer) -> Iterator[Block]:
    yield Code(f"Measure {option.option} again", [option.command])
    if option.lines:
        yield Code("Turn it on in a program of your own, for a pipeline pipe", list(option.lines))


def _results(result: StudyResult) -> Section:
    headings, cells = table_of(rows_of(result))
    blocks: list[Block] = [Table(headings, cells, headings.index("status"))]
    if at_shapes := shape_rows(result):
        blocks.append(Table(SHAPE_HEADINGS, at_shapes))
    plot = forest(result)
    if plot is not None:
        caption = (
            "Each dot is a speed-up, with its interval. The shaded band is the A/A floor: the difference between two "
            "identical baselines."
        )
        blocks.append(Chart([("", plot)], caption, file=_file_of(forest, result)))
    if columns := headline_columns(result):
        blocks.append(Table(("images", *map(quality_heading, columns)), quality_rows(result, columns)))
        blocks.append(Notes(quality_notes(columns)))
    if result.judgements:
        table = Table(VERDICT_HEADINGS, verdict_rows(result.judgements), VERDICT_HEADINGS.index("verdict"))
        notes = Notes(verdict_notes(result, result.judgements))
        blocks.append(Fold(f"What the gate says (gate={result.gate})", [table, notes]))
    return Section("results", "Results", blocks)


def _file_of(plot: Callable[[StudyResult], Spec | None], result: StudyResult) -> str:
    """Returns the picture that shows the same as a plot; "" if the study's picture shows another one."""
    return "plot.png" if main_plot(result) is plot else ""


def _published(result: StudyResult) -> Section:
    """Returns an article's figures beside the measured ones: for this card or the article's main one; then for all."""
    claims = claims_of(result)
    shown = shown_claims(result, claims)
    blocks: list[Block] = [_claims(shown), Notes(notes_of_published(result, shown))] if shown else []
    if len(claims) > len(shown):
        blocks.append(Fold(f"All {len(claims)} published figures, on every card", [_claims(claims)]))
    return Section("published", "Published and measured", blocks)


def _claims(claims: Sequence[Claim]) -> Table:
    headings, cells = claims_table(claims)
    return Table(headings, cells, headings.index("verdict"))


def _tradeoff(result: StudyResult) -> Section:
    found = tradeoffs(result)
    if not found:
        return Section("tradeoff", "Speed against quality", [])
    chart = Chart(
        [(plot.metric, plot.spec) for plot in found],
        "Up is faster, left is closer to the reference. The area is the peak memory; the dashed line joins the "
        "variants that no other one beats in both.",
        choice="quality as",
        legend=sorted({symbol for view in found for symbol in view.legend}),
        file="tradeoff.png",
    )
    return Section("tradeoff", "Speed against quality", [chart])


def _design(result: StudyResult) -> Iterator[Section]:
    """Returns the waterfall of a cumulative study, or the effects of a factorial one."""
    steps = waterfall(result) if result.design == "cumulative" else None
    if steps is not None:
        caption = "Each bar begins where the step before it ended. The interval is that of the step alone."
        yield Section("steps", "Step by step", [Chart([("", steps)], caption, file=_file_of(waterfall, result))])
    blocks: list[Block] = []
    effects, pairs = main_effects(result), interactions(result)
    if effects is not None:
        blocks.append(Chart([("", effects)], "What an option does, averaged over the others."))
    if pairs is not None:
        blocks.append(
            Chart(
                [("", pairs)],
                "Diagonal: an option, averaged over the others. Below: the interaction of two; above 1 they are faster "
                "together than the product of their separate effects.",
                file=_file_of(interactions, result),
            )
        )
    if result.effects:
        blocks.append(Table(EFFECT_HEADINGS, [effect_cells(effect) for effect in result.effects]))
    yield Section("effects", "Effects and interactions", blocks)


def _latency(result: StudyResult) -> Section:
    blocks: list[Block] = []
    at = {str(shape): result.at(index) for index, shape in enumerate(result.shapes)}
    calls = (
        "Every timed call; a line joins the calls of one process. Drift of the machine moves all lines alike. "
        "Calls of rounds that other work disturbed have a mark of their own."
    )
    spread = "Each stroke is a call that decides; the dot is the latency, with its interval."
    for plot, caption in ((rounds_plot, calls), (distribution_plot, spread)):
        views = [(shape, drawn) for shape, one in at.items() if (drawn := plot(one)) is not None]
        if views:
            blocks.append(Chart(views, caption, choice="shape"))
    return Section("latency", "Latency by round", blocks)


def _stages(result: StudyResult) -> Section:
    plot = stages_plot(result)
    caption = (
        "From calls that were timed stage by stage, after the rounds and without an interval: read shares, not totals."
    )
    blocks: list[Block] = [Chart([("", plot)], caption, file="stages.png")] if plot is not None else []
    return Section("stages", "Time by stage", blocks)


def _limit(result: StudyResult) -> Section:
    plot = limit_plot(result)
    if plot is None:
        return Section("limit", "Distance to the hardware's limit", [])
    sheet = result.environment.sheet
    source = (
        f"Peak rates are those of the data sheet of {sheet.name}."
        if sheet is not None
        else "The peak rate of this device is not known; `sdopt doctor --save my_conf/hardware/mine.yaml` measures it "
        "and writes a data sheet."
    )
    return Section("limit", "Distance to the hardware's limit", [Chart([("", plot)], source)])


def _break_even(result: StudyResult) -> Section:
    plot = break_even_plot(result)
    rows = [
        (row.variant.name, row.reference, f"{level.first_image_s:.1f} s", _extra(level), _repaid(level))
        for row in figures_of(result)
        if (level := row.break_even) is not None and row.variant.role != "control"
    ]
    if not rows:
        return Section("break-even", "Break-even", [])
    headings = ("variant", "against", "first image after", "more than the reference", "images until repaid")
    blocks: list[Block] = [Chart([("", plot)], "After how many images the slower start is repaid.")] if plot else []
    return Section("break-even", "Break-even", [*blocks, Table(headings, rows)])


def _extra(level: BreakEven) -> str:
    extra = f"{level.extra_s:+z.1f} s"
    return extra if level.shapes == 1 else f"{extra} {start_text(level)}"


def _repaid(level: BreakEven) -> str:
    return "at once" if level.images == 0 else images_text(level)


def _images(result: StudyResult, folder: Path, budget: int) -> Section:
    found = gallery_of(result, folder, budget)
    if found is not None:
        return Section("images", "Images", [found])
    absent = "This report was made without the folder of the run, which holds the images."
    return Section("images", "Images", [] if has_images(result, folder) else [Prose(absent)])


def _method(result: StudyResult) -> Section:
    protocol, environment = result.config.protocol, result.environment
    facts = [
        ("design", result.design),
        ("baseline", result.baseline),
        ("rounds", f"{protocol.rounds} of each process, {result.schedule.kind}"),
        ("processes", f"{result.config.replicates} per variant"),
        ("intervals", intervals_text(result)),
        ("gate", result.gate or "none"),
        ("study id", result.id),
    ]
    commit = environment.sdopt_commit
    checkout = [f"git checkout {commit}"] if commit else []
    changed = ["The checkout had changes that were not committed."] if environment.sdopt_dirty else []
    again = Code("Reproduce", [*checkout, shlex.join(environment.command)])
    return Section("method", "Method and reproduction",
                   [again, Notes([*changed, *notes_of(result)]), Facts(facts)])  # fmt: skip


def _environment(result: StudyResult) -> Section:
    environment = result.environment
    facts = {
        "device": environment.device,
        "processor": environment.cpu,
        "gpu": environment.gpu,
        "platform": environment.platform,
        "python": environment.python,
        **environment.packages,
        **environment.variables,
    }
    pairs = [(name, value if isinstance(value, str) else _listed(value)) for name, value in facts.items() if value]
    blocks: list[Block] = [Facts(pairs), *([Notes(environment.warnings)] if environment.warnings else [])]
    return Section("environment", "Environment", blocks, folded=True)


def _listed(values: object) -> str:
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(
        f"{key} {value if isinstance(value, str | int | float) else json.dumps(value)}"
        for key, value in values.items()
        if value not in (None, "", {}, [])
    )
