"""Makes the sections of a study's report, in the order of a reader's questions: from answer to environment."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sdopt.report.answer import answer_blocks
from sdopt.report.blocks import (
    Block,
    Code,
    Facts,
    Fold,
    Notes,
    Page,
    Prose,
    Section,
    Table,
    charts_of,
)
from sdopt.report.charts.comparisons import forest, interactions, main_plot, waterfall
from sdopt.report.charts.spec import Spec
from sdopt.report.charts.times import rounds_plot, stages_plot
from sdopt.report.charts.tradeoff import tradeoffs
from sdopt.report.header import work_of
from sdopt.report.notes import notes_of
from sdopt.report.page.gallery import gallery_of, has_images
from sdopt.report.summary import Summary
from sdopt.report.tables import (
    effects_table,
    evidence,
    headline_columns,
    published_blocks,
    quality_notes,
    quality_table,
    shapes_table,
    stage_memory_table,
    worst_table,
)
from sdopt.report.verdicts import footing_of, verdict_blocks
from sdopt.statistics.break_even import images_text, start_text
from sdopt.statistics.disturbance import count_rounds
from sdopt.statistics.figures import floor_range
from sdopt.statistics.reproduction import claims_of, published_of

IMAGES_BYTES = 3_000_000
"""Maximum bytes of all images of a page."""


def study_page(summary: Summary, folder: Path, budget: int = IMAGES_BYTES) -> Page:
    """Returns the report of a study, with images of its folder that take `budget` bytes."""
    *first, method, environment = text_sections(summary)
    sections = (*first, _images(summary, folder, budget), method, environment)
    return Page(
        summary.result.name,
        _facts(summary),
        [section for section in sections if section.blocks],
    )


def text_sections(summary: Summary) -> Iterator[Section]:
    """Yields all sections of a report but its images."""
    result = summary.result
    yield Section("answer", "Answer", answer_blocks(summary))
    yield _results(summary)
    # An article's figures of its main card; `published.md` has all cards.
    published = published_of(result)
    claims = [
        claim
        for claim in claims_of(result)
        if published and claim.gpu in ("", published.gpu)
    ]
    yield Section(
        "published", "Published and measured", published_blocks(result, claims)
    )
    yield Section(
        "tradeoff", "Speed against quality", [*filter(None, [tradeoffs(summary)])]
    )
    caption = "Each bar begins where the step before it ended. The interval is that of the step alone."
    steps = (
        _comparisons(summary, waterfall, caption)
        if result.design == "cumulative"
        else []
    )
    yield Section("steps", "Step by step", steps)
    caption = (
        "Diagonal: an option, averaged over the others. Below: the interaction of two; above 1 they are faster "
        "together than the product of their separate effects."
    )
    effects = [
        *_comparisons(summary, interactions, caption),
        *filter(None, [effects_table(summary)]),
    ]
    yield Section("effects", "Effects and interactions", effects)
    views = [
        (str(shape), rounds_plot(summary, index))
        for index, shape in enumerate(result.shapes)
    ]
    caption = (
        "Every timed call; a line joins the calls of one process. Drift of the machine moves all lines alike."
        + (
            " Calls that other work disturbed have a mark of their own."
            if count_rounds(result)
            else ""
        )
    )
    yield Section(
        "latency", "Time of each call", charts_of(views, caption, choice="shape")
    )
    caption = "From calls that were timed stage by stage, after the rounds and without an interval: read shares, not totals."
    stages = charts_of([("", stages_plot(summary))], caption, "stages.png")
    if memory := stage_memory_table(summary):
        stages.append(memory)
    yield Section("stages", "Time and memory by stage", stages)
    yield _break_even(summary)
    yield _method(summary)
    yield _environment(summary)


def sweep_page(
    name: str, blocks: Sequence[Block], studies: Sequence[tuple[str, Summary, Path]]
) -> Page:
    """Returns the report of a sweep: the blocks of its answer, then each study as in its own report.

    `studies` are the number of each job, its study and its folder.
    """
    budget = IMAGES_BYTES // max(1, len(studies))
    pages = [
        replace(
            study_page(study, folder, budget),
            title=f"job {number}: {study.result.name}",
        )
        for number, study, folder in studies
    ]
    return Page(
        f"sweep {name}",
        [("jobs", str(len(studies)))],
        [Section("answer", "Answer", blocks)],
        pages,
    )


def _facts(summary: Summary) -> list[tuple[str, str]]:
    result, environment = summary.result, summary.result.environment
    when = f"{result.started[:16].replace('T', ' ')} UTC"  # a run's folder is named by the local time
    if result.is_imported:
        return [
            ("work", "images and times that came as files"),
            ("judged", f"{when} by sdopt {environment.sdopt_version}"),
        ]
    return [
        ("work", work_of(result)),
        ("device", str(environment.device["name"])),
        (
            "versions",
            f"sdopt {environment.sdopt_version}, PyTorch {environment.packages.get('torch')}",
        ),
        ("measured", f"{when} ({result.status})"),
    ]


def _comparisons(
    summary: Summary, plot: Callable[[Summary], Spec | None], caption: str
) -> list[Block]:
    """Returns a chart of comparisons, of which the study's picture shows the main one."""
    return charts_of(
        [("", plot(summary))], caption, "plot.png" if main_plot(summary) is plot else ""
    )


def _results(summary: Summary) -> Section:
    result = summary.result
    caption = "Each mark is a speed-up over the baseline, with its interval where there is one."
    if floor_range(result) is not None:
        caption += (
            " What lies in a shaded band is too close to call: two identical baselines differed by as much, "
            "or protocol.smallest_speedup is as large."
        )
    blocks = _comparisons(summary, forest, caption)
    blocks += [table] if (table := shapes_table(summary)) else []
    if (table := quality_table(summary)) is not None:
        blocks += [table, Notes(quality_notes(headline_columns(result)))]
        blocks += (
            [Fold("Prompts that lost most, by metric", [worst])]
            if (worst := worst_table(summary))
            else []
        )
    if result.judgements:
        verdicts = [*verdict_blocks(result), Notes(footing_of(result))]
        blocks.append(Fold(f"What the gate says (gate={result.gate})", verdicts))
    if lines := evidence(summary):
        blocks.append(Fold("What shows that each option was active", [Notes(lines)]))
    return Section("results", "Results", blocks)


def _break_even(summary: Summary) -> Section:
    """Returns which variants start more slowly than their references, and after how many images that is repaid."""
    rows = []
    for row in [row for row in summary.figures if not row.variant.is_control]:
        if (level := row.break_even) is not None and level.is_slower:
            extra = f"{level.extra_s:+z.1f} s{'' if level.shapes == 1 else f' {start_text(level)}'}"
            rows.append(
                (
                    row.variant.name,
                    row.reference,
                    f"{level.first_image_s:.1f} s",
                    extra,
                    images_text(level),
                )
            )
    headings = (
        "variant",
        "against",
        "first image after",
        "more than the reference",
        "images until repaid",
    )
    left_out = "The other variants start no more slowly than their reference, so that there is nothing to repay."
    blocks: list[Block] = [Table(headings, rows), Notes([left_out])] if rows else []
    return Section("break-even", "Break-even", blocks)


def _images(summary: Summary, folder: Path, budget: int) -> Section:
    result = summary.result
    gallery = gallery_of(result, folder, budget)
    if gallery is not None:
        return Section("images", "Images", [gallery])
    absent = (
        "This report was made without the folder of the run, which holds the images."
    )
    return Section(
        "images", "Images", [] if has_images(result, folder) else [Prose(absent)]
    )


def _method(summary: Summary) -> Section:
    result = summary.result
    environment = result.environment
    facts = [
        ("design", result.design),
        ("gate", result.gate or "none"),
        ("study id", result.id),
    ]
    commit = environment.sdopt_commit
    checkout = [f"git checkout {commit}"] if commit else []
    changed = (
        ["The checkout had changes that were not committed."]
        if environment.sdopt_dirty
        else []
    )
    again = Code("Reproduce", [*checkout, shlex.join(environment.command)])
    return Section("method", "Method and reproduction",
                   [again, Notes([*changed, *notes_of(summary)]), Facts(facts)])  # fmt: skip


def _environment(summary: Summary) -> Section:
    environment = summary.result.environment
    facts = {
        "device": environment.device,
        "processor": environment.cpu,
        "gpu": environment.gpu,
        "platform": environment.platform,
        "python": environment.python,
        **environment.packages,
        **environment.variables,
    }
    pairs = []
    for name, value in facts.items():
        if value:
            pairs.append((name, value if isinstance(value, str) else _listed(value)))
    blocks: list[Block] = [
        Facts(pairs),
        *([Notes(environment.warnings)] if environment.warnings else []),
    ]
    heading = (
        "Of the machine that judged"
        if summary.result.is_imported
        else "Device, processor and versions"
    )
    return Section("environment", "Environment", [Fold(heading, blocks)])


def _listed(values: object) -> str:
    if not isinstance(values, dict):
        return str(values)
    listed = []
    for key, value in values.items():
        if value in (None, "", {}, []):
            continue
        plain = isinstance(value, str | int | float)
        listed.append(f"{key} {value if plain else json.dumps(value)}")
    return ", ".join(listed)
