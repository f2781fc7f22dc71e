"""Pictures of a study that stand alone, as a tracker shows them: the same plots as in the report, with more figures."""

from collections.abc import Callable

from sdopt.report.charts.comparisons import forest, interactions, waterfall
from sdopt.report.charts.spec import Spec, picture
from sdopt.report.charts.times import stages_plot
from sdopt.report.charts.tradeoff import tradeoffs
from sdopt.statistics.summary import Summary


def main_plot(summary: Summary) -> Callable[[Summary], Spec | None]:
    """Returns which plot is the main one of a study: the map of its interactions, its waterfall, or the speed-ups."""
    if interactions(summary):
        return interactions
    if summary.result.design == "cumulative" and waterfall(summary):
        return waterfall
    return forest


def study_plot(summary: Summary) -> bytes | None:
    """Draws the main plot of a study as a PNG, the speed-ups with more details; None if no comparison has a figure."""
    plot = main_plot(summary)
    return _picture(summary, forest(summary, detailed=True) if plot is forest else plot(summary))


def tradeoff_picture(summary: Summary) -> bytes | None:
    """Draws speed against quality as a PNG; None if there are no images to judge quality by."""
    found = tradeoffs(summary, named=True)
    return _picture(summary, found[0].spec if found else None)


def stages_picture(summary: Summary) -> bytes | None:
    """Draws the time by stage as a PNG; None if stages were not measured."""
    return _picture(summary, stages_plot(summary))


def _picture(summary: Summary, spec: Spec | None) -> bytes | None:
    if spec is None:
        return None
    where = f"{summary.result.name} on {summary.result.environment.device['name']}"
    return picture({**spec, "title": {"text": where, "anchor": "start", "fontSize": 14, "offset": 8}})
