"""Derives the table of a study with several shapes: time and memory at each, and the cost of a new shape."""

from sdopt.analysis.figures import Figures, figures_by_variant
from sdopt.report.words import memory_text, seconds_text
from sdopt.results.comparisons import Interval
from sdopt.results.records import StudyResult

SHAPE_HEADINGS = ("shape", "variant", "latency", "memory", "first call", "compiled in it", "compiled later")


def shape_rows(result: StudyResult) -> list[tuple[str, ...]]:
    """Returns a row of cells, by `SHAPE_HEADINGS`, for each variant at each shape; [] if there is only one shape."""
    rows = [
        figures
        for figures in figures_by_variant(result).values()
        if figures.further and figures.latency and figures.variant.role != "control"
    ]
    return [
        (str(at.shape), at.variant.name, *_cells_at(at))
        for of_shape in zip(*(figures.shapes for figures in rows), strict=True)
        for at in of_shape
    ]


def _cells_at(figures: Figures) -> tuple[str, ...]:
    """Returns a variant's time and memory at one shape, and the cost of its first call there."""
    first, compiled = (figures.latency_s.get(name) for name in ("cold_start", "compile"))
    graphs, later = (
        "" if count is None else f"{count:g} graph{'s' if count != 1 else ''}"
        for count in (figures.graphs, figures.recompiles)
    )
    return (
        seconds_text(figures.latency) if figures.latency else "",
        memory_text(figures),
        "" if first is None else seconds_text(Interval(first)),
        graphs + ("" if compiled is None or not figures.graphs else f", {seconds_text(Interval(compiled))}"),
        later,
    )
