"""Pictures of a study that stand alone, as a tracker shows them: the same plots as in the report, with more figures."""

from collections.abc import Callable

from sdopt.report.charts.comparisons import forest, interactions, waterfall
from sdopt.report.charts.spec import Spec, picture
from sdopt.report.charts.times import stages_plot
from sdopt.report.charts.tradeoff import tradeoffs
from sdopt.results.records import StudyResult


def main_plot(result: StudyResult) -> Callable[[StudyResult], Spec | None]:
    """Returns which plot is the main one of a study: the map of its interactions, its waterfall, or the speed-ups."""
    if interactions(result):
        return interactions
    if result.design == "cumulative" and waterfall(result):
        return waterfall
    return forest


def study_plot(result: StudyResult) -> bytes | None:
    """Draws the main plot of a study as a PNG, the speed-ups with more details; None if no comparison has a figure."""
    plot = main_plot(result)
    return _picture(result, forest(result, detailed=True) if plot is forest else plot(result))


def tradeoff_picture(result: StudyResult) -> bytes | None:
    """Draws speed against quality as a PNG; None if there are no images to judge quality by."""
    found = tradeoffs(result, named=True)
    return _picture(result, found[0].spec if found else None)


def stages_picture(result: StudyResult) -> bytes | None:
    """Draws the time by stage as a PNG; None if stages were not measured."""
    return _picture(result, stages_plot(result))


def _picture(result: StudyResult, spec: Spec | None) -> bytes | None:
    if spec is None:
        return None
    where = f"{result.name} on {result.environment.device['name']}"
    return picture({**spec, "title": {"text": where, "anchor": "start", "fontSize": 14, "offset": 8}})
