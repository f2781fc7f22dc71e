"""A study as a picture: bars with intervals, the waterfall of a cumulative study, the heat map of a factorial one."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sdopt.analysis.timing import latency, within_floor
from sdopt.results.records import Comparison, Effect, Interval, StudyResult

_GOOD, _BAD, _PLAIN = "#2b8a3e", "#c92a2a", "#868e96"


def study_plot(result: StudyResult, folder: Path) -> Path | None:
    """Draws `plot.png` in the run's folder; nothing where no comparison has a figure."""
    edges = [edge for edge in result.comparisons if edge.speedup and result.variant(edge.candidate).role != "control"]
    if not edges:
        return None
    effects = [effect for effect in result.effects if effect.speedup]
    figure = Figure(figsize=(8, 1.6 + 0.42 * (len(edges) + 1)), layout="constrained")
    if effects:
        names = list(dict.fromkeys(name for effect in effects for name in effect.options))
        figure.set_size_inches(3.2 + 1.2 * len(names), 2.4 + 0.8 * len(names))
        _heat_map(figure.add_subplot(), effects, names)
    elif result.design == "cumulative":
        _waterfall(figure.add_subplot(), result, edges)
    else:
        _bars(figure.add_subplot(), result, edges)
    figure.suptitle(f"{result.name} on {result.environment.device['name']}", fontsize=11)
    path = folder / "plot.png"
    FigureCanvasAgg(figure).print_png(path)
    return path


def _bars(axes: Axes, result: StudyResult, edges: list[Comparison]) -> None:
    """A bar per comparison, from 1; grey where its interval includes 1 or it is within the floor, which is shaded."""
    references = {edge.reference for edge in edges}
    for row, edge in enumerate(reversed(edges)):
        assert edge.speedup is not None
        value, low, high = edge.speedup.estimate, edge.speedup.low, edge.speedup.high
        open_ = low is not None and high is not None and low <= 1 <= high
        colour = _PLAIN if open_ or within_floor(edge) else _GOOD if value > 1 else _BAD
        axes.barh(row, value - 1, left=1, color=colour, height=0.6)
        axes.errorbar(value, row, xerr=_whiskers(edge.speedup), color="black", capsize=3, linewidth=1)
    labels = [edge.candidate + ("" if len(references) == 1 else f"\nagainst {edge.reference}") for edge in edges]
    axes.set_yticks(range(len(edges)), labels[::-1], fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8)
    if result.floor:
        axes.axvspan(1 / result.floor, result.floor, color=_PLAIN, alpha=0.2, linewidth=0)
        axes.annotate("shaded: A/A floor", (0.99, 0.02), xycoords="axes fraction", ha="right", fontsize=8, color=_PLAIN)
    against = f" against {references.pop()}" if len(references) == 1 else ""
    axes.set_xlabel(f"speed-up{against} (above 1 is faster)")


def _waterfall(axes: Axes, result: StudyResult, edges: list[Comparison]) -> None:
    """Latency from the baseline down, a step per option."""
    steps = [result.variant(result.baseline), *(result.variant(edge.candidate) for edge in edges)]
    times = [latency(step, result.config["protocol"]["estimator"], result.confidence) for step in steps]
    values = [time.estimate for time in times if time]
    for row, value in enumerate(values):
        before = values[row - 1] if row else 0.0
        colour = _PLAIN if not row else _GOOD if value < before else _BAD
        axes.barh(-row, value - before, left=before, color=colour, height=0.6)
        axes.annotate(f" {value:.3g} s", (max(value, before), -row), va="center", fontsize=9)
    axes.set_yticks([-row for row in range(len(steps))], [step.name for step in steps], fontsize=9)
    axes.set_xlim(0, 1.15 * max(values))
    axes.set_xlabel("latency of one call in seconds")


def _heat_map(axes: Axes, effects: list[Effect], names: list[str]) -> None:
    """Main effects on the diagonal, interactions below it."""
    cells = [[float("nan")] * len(names) for _ in names]
    labels: list[tuple[str, int, int]] = []
    for effect in effects:
        assert effect.speedup is not None
        places = sorted(names.index(name) for name in effect.options)
        row, column = places[-1], places[0]
        cells[row][column] = effect.speedup.estimate
        low, high = effect.speedup.low, effect.speedup.high
        bounds = "" if low is None else f"\n[{low:.2f}, {high:.2f}]"
        labels.append((f"{effect.speedup.estimate:.2f}×{bounds}", column, row))
    spread = max(abs(value - 1) for row in cells for value in row if value == value)
    image = axes.imshow(cells, cmap="PiYG", vmin=1 - spread, vmax=1 + spread)
    for text, column, row in labels:
        # The ends of the scale are dark.
        colour = "white" if abs(cells[row][column] - 1) > 0.7 * spread else "black"
        axes.annotate(text, (column, row), ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xlabel("diagonal: an option, averaged over the others\nbelow: interaction of two", fontsize=9)
    axes.figure.colorbar(image, shrink=0.8)


def _whiskers(interval: Interval) -> list[list[float]] | None:
    if interval.low is None or interval.high is None:
        return None
    return [[interval.estimate - interval.low], [interval.high - interval.estimate]]
