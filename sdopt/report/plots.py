"""A study as a picture: bars with intervals, the waterfall of a cumulative study, the heat map of a factorial one."""

import math
from collections.abc import Sequence
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from sdopt.analysis.figures import Ratio, figures_of
from sdopt.report.rows import speedup_text
from sdopt.results.records import Effect, StudyResult

_COLOURS = {1: "#0072B2", 0: "#868E96", -1: "#D55E00"}
"""Of a gain, of what cannot be told from chance, of a loss: blue and vermilion differ for every kind of colour vision
(Okabe and Ito 2008)."""

_STEPS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Between the ticks of a ratio; of ratios that span more than a decade powers of ten are ticked."""

_TICKS = 6


def study_plot(result: StudyResult) -> bytes | None:
    """Draws a study as a PNG; None where no comparison has a figure."""
    # Effects and steps are of the main shape; else there is a bar for each shape.
    main_alone = bool(result.effects) or result.design == "cumulative"
    bars = [
        Bar(row.variant.name + (f", {at.shape}" if len(shapes) > 1 else ""), row.reference, at.speedup)
        for row in figures_of(result)
        if row.variant.role != "control"
        for shapes in [row.shapes[:1] if main_alone else row.shapes]
        for at in shapes
        if at.speedup
    ]
    if not bars:
        return None
    effects = [effect for effect in result.effects if effect.speedup]
    figure = Figure(figsize=(8, 1.6 + 0.42 * (len(bars) + 1)), layout="constrained")
    if effects:
        names = list(dict.fromkeys(name for effect in effects for name in effect.options))
        figure.set_size_inches(3.2 + 1.2 * len(names), 2.4 + 0.8 * len(names))
        _heat_map(figure.add_subplot(), effects, names)
    elif result.design == "cumulative":
        _draw_bars(figure.add_subplot(), _chained(bars), "speed-up over the baseline, step by step", None)
    else:
        references = {bar.reference for bar in bars}
        against = f" against {next(iter(references))}" if len(references) == 1 else ""
        # Each shape has a floor of its own, which the colours go by.
        floor = result.floor if len(result.shapes) == 1 else None
        _draw_bars(figure.add_subplot(), bars, f"speed-up{against}", floor)
    figure.suptitle(f"{result.name} on {result.environment.device['name']}", fontsize=11)
    FigureCanvasAgg(figure)
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


class Bar:
    """One comparison: a bar from `start` by its speed-up, both as ratios."""

    def __init__(self, name: str, reference: str, ratio: Ratio, start: float = 1.0) -> None:
        self.name, self.reference, self.ratio, self.start = name, reference, ratio, start

    @property
    def end(self) -> float:
        """Where the bar ends: of a waterfall the speed-up of all steps so far."""
        return self.start * self.ratio.interval.estimate

    @property
    def whiskers(self) -> tuple[float, float] | None:
        """The bounds of the end, from the interval of this step alone."""
        low, high = self.ratio.interval.low, self.ratio.interval.high
        return None if low is None or high is None else (self.start * low, self.start * high)


def _chained(bars: Sequence[Bar]) -> list[Bar]:
    """The steps of a cumulative study: each begins where the one before it ended, unless that was not measured."""
    chained: list[Bar] = []
    for bar in bars:
        before = chained[-1] if chained else None
        start = before.end if before and before.name == bar.reference else 1.0
        chained.append(Bar(bar.name, bar.reference, bar.ratio, start))
    return chained


def _draw_bars(axes: Axes, bars: Sequence[Bar], title: str, floor: float | None) -> None:
    """A bar per comparison on a logarithmic axis, on which a gain and a loss of the same factor are as long."""
    ends = [1.0]
    for row, bar in enumerate(bars):
        axes.barh(-row, bar.end - bar.start, left=bar.start, color=_COLOURS[bar.ratio.gain], height=0.6)
        right = max(bar.start, bar.end)
        ends += [bar.start, bar.end]
        if bar.whiskers is not None:
            low, high = bar.whiskers
            axes.errorbar(bar.end, -row, xerr=[[bar.end - low], [high - bar.end]], color="black", capsize=3, lw=1)
            right = max(right, high)
            ends += [low, high]
        total = "" if bar.start == 1 else f", {bar.end:.2f}× in all"
        axes.annotate(f" {speedup_text(bar.ratio)}{total}", (right, -row), va="center", fontsize=8)
    # Of bars that begin at 1 it is not plain against what they are, unless all are against the same.
    several = len({bar.reference for bar in bars if bar.start == 1}) > 1
    names = [f"{bar.name}\nagainst {bar.reference}" if several and bar.start == 1 else bar.name for bar in bars]
    axes.set_yticks([-row for row in range(len(bars))], names, fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8)
    if floor:
        axes.axvspan(1 / floor, floor, color=_COLOURS[0], alpha=0.2, linewidth=0, zorder=0)
        ends += [1 / floor, floor]
    _log_axis(axes, min(ends), max(ends))
    shaded = "; shaded: A/A floor" if floor else ""
    axes.set_xlabel(f"{title}\n(right is faster; blue: gain, orange: loss, grey: neither{shaded})", fontsize=9)


def _log_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic axis of ratios around 1, ticked at round figures, with room for the labels on the right."""
    spread = max(math.log(high / low), 0.1)
    axes.set_xscale("log")
    axes.set_xlim(low * math.exp(-0.08 * spread), high * math.exp(0.45 * spread))
    if math.log10(high / low) > 1:
        ticks = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    else:
        step = next((step for step in _STEPS if (high - low) / step <= _TICKS), _STEPS[-1])
        ticks = [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    axes.xaxis.set_major_locator(FixedLocator(sorted({*ticks, 1.0})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def _heat_map(axes: Axes, effects: list[Effect], names: list[str]) -> None:
    """Main effects on the diagonal, interactions below it; the colour is the logarithm of the ratio."""
    cells = [[math.nan] * len(names) for _ in names]
    labels: list[tuple[str, int, int]] = []
    for effect in effects:
        assert effect.speedup is not None
        places = sorted(names.index(name) for name in effect.options)
        row, column = places[-1], places[0]
        cells[row][column] = math.log(effect.speedup.estimate)
        low, high = effect.speedup.low, effect.speedup.high
        bounds = "" if low is None else f"\n[{low:.2f}, {high:.2f}]"
        labels.append((f"{effect.speedup.estimate:.2f}×{bounds}", column, row))
    spread = max(abs(value) for row in cells for value in row if not math.isnan(value)) or 0.01
    image = axes.imshow(cells, cmap="PuOr_r", vmin=-spread, vmax=spread)
    for text, column, row in labels:
        # The ends of the scale are dark.
        colour = "white" if abs(cells[row][column]) > 0.7 * spread else "black"
        axes.annotate(text, (column, row), ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xlabel("diagonal: an option, averaged over the others\nbelow: interaction of two", fontsize=9)
    bar = axes.figure.colorbar(image, shrink=0.8)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{math.exp(value):.2f}×"))
