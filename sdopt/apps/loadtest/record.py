"""What a load test found: the record as a file, and its figures."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sdopt.apps.traffic.figures import Window, interval_of, max_rate, wanted_share
from sdopt.errors import UsageError, first_line
from sdopt.record.comparisons import Interval

RECORD = "load.json"

ROUNDED = 1e-9
"""By which share a mean of logarithms may miss the one rate that it is the mean of."""


@dataclass(frozen=True)
class Predicted:
    """What the simulated queue of a row does at a rate, on the same trace, from its service times alone."""

    rate: float
    attainment: float
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass
class Replicate:
    """What one process of a row did."""

    number: int
    windows: list[Window]
    predicted: list[Predicted]
    """Of the same rates; none for a server that is only known by its address."""


@dataclass
class LoadRow:
    """A variant with a policy of batching.

    Attributes:
        service_s: seconds of a call by its number of images, without load.
        rates: requests a second.
        replicates: what its processes did.
        memory_gib: what its worker held after the last call.
        reason: why it was not measured, or not whole.
        columns: what further columns of tables have, by their names, of calls without load.
        own_seeds: whether each request had a seed that no other one had.
        asked_size: the size of image that requests named; "" if they named none.
        asked_kind: the kind of file that requests named, as in `webp`; "" if they named none.
        chosen: in words, what it chooses of the work otherwise than the baseline, as fewer steps.
        unlike: in words, what makes its work another one than the baseline's.
        tags: its work, its choices and where it ran, by which MLflow finds its run.
    """

    name: str
    variant: str
    policy: str
    service_s: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    replicates: list[Replicate] = field(default_factory=list)
    memory_gib: float | None = None
    reason: str = ""
    columns: dict[str, float | str] = field(default_factory=dict)
    own_seeds: bool = True
    asked_size: str = ""
    asked_kind: str = ""
    chosen: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def windows(self) -> list[Window]:
        """Those of all replicates."""
        replicates = (replicate.windows for replicate in self.replicates)
        return list(chain.from_iterable(replicates))

    @property
    def images(self) -> int:
        """How many images it gave."""
        return sum(
            window.requests - window.rejected - window.errors for window in self.windows
        )

    @property
    def repeated(self) -> int:
        """How many of them are the same as another one."""
        return sum(window.repeated for window in self.windows)

    def came(self, key: str) -> list[str]:
        """Returns the `sizes` or `kinds` of all its images."""
        of_windows = (getattr(window, key) for window in self.windows)
        return sorted(set(chain.from_iterable(of_windows)))


@dataclass
class LoadRecord:
    """A load test.

    Attributes:
        header: what was measured, and where.
        requests: requests of each window.
        attainment: the share that is to be in time.
        limit_s: what in time means.
        rows: the baseline first.
        interference: the share of the processor time above which a window counts as disturbed.
        early_stopping: whether each window must show with 99 % confidence that the share is in time.
    """

    name: str
    header: list[str]
    began: str
    command: str
    requests: int
    attainment: float
    limit_s: float
    arrivals: str
    price_per_hour: float | None
    rows: list[LoadRow] = field(default_factory=list)
    early_stopping: bool = False
    interference: float | None = None

    def wanted(self, requests: int) -> float:
        """Returns the share of a window's requests that must be in time."""
        return wanted_share(self.attainment, requests, self.early_stopping)

    def disturbed(self, windows: Sequence[Window]) -> list[float]:
        """Returns of the windows that count as disturbed which share of the processor time other work took."""
        limit = self.interference or 0.0
        shares = [window.disturbed or 0.0 for window in windows]
        return [share for share in shares if 0 < limit < share]

    @property
    def windows(self) -> list[Window]:
        """Those of all rows."""
        return list(chain.from_iterable(row.windows for row in self.rows))

    @property
    def figures(self) -> list["RowFigures"]:
        """The figures of the measured rows; the baseline first."""
        measured = [row for row in self.rows if row.replicates]
        return [figures_of(row, measured[0], self.wanted) for row in measured]

    def write(self, folder: Path) -> None:
        """Writes it to a folder. Raises OSError."""
        (folder / RECORD).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> "LoadRecord":
        """Reads it from a folder. Raises UsageError."""
        try:
            return TypeAdapter(cls).validate_json((folder / RECORD).read_bytes())
        except (OSError, ValidationError) as error:
            raise UsageError(
                f"{folder / RECORD}: is no load test that can be read: {first_line(error)}"
            ) from error


@dataclass(frozen=True)
class RowFigures:
    """The figures of a row over its replicates.

    Attributes:
        most: the highest rate at which enough requests are in time.
        bound: `=`, or `>` or `<` if it lies beyond the measured rates in some replicate.
        ratio: `most` over the baseline's, of the same traces; None for the baseline, and where two bounds say nothing.
        ratio_bound: `=`, or `>` or `<` if it is only a bound.
        windows: by rate, those of all replicates that count.
    """

    row: LoadRow
    most: Interval
    bound: str
    ratio: Interval | None
    ratio_bound: str
    windows: dict[float, list[Window]]

    def mean(self, rate: float, key: str) -> float | None:
        """Returns the mean of a figure at a rate over the replicates; None if one has none."""
        values = [getattr(window, key) for window in self.windows[rate]]
        if not values or None in values:
            return None
        return float(sum(values) / len(values))

    @property
    def typical(self) -> float:
        """The rate whose figures are shown: not above `most`, and the highest that most replicates had."""
        most = self.most.estimate * (1 + ROUNDED)
        below = [rate for rate in self.windows if rate <= most] or [min(self.windows)]
        return max(below, key=lambda rate: (len(self.windows[rate]), rate))

    def cost(self, price_per_hour: float | None) -> float | None:
        """Returns what 1,000 images cost at `typical`, idle time included, in the unit of the price."""
        achieved = self.mean(self.typical, "achieved")
        if price_per_hour is None or not achieved:
            return None
        return 1000 / achieved * price_per_hour / 3600

    @property
    def gap(self) -> float | None:
        """Measured over predicted 95th percentile at `typical`; None where there is none."""
        logs = []
        for replicate in self.row.replicates:
            windows = zip(replicate.windows, replicate.predicted, strict=False)
            for window, predicted in windows:
                if window.rate != self.typical or window.p95_s is None:
                    continue
                if math.isfinite(predicted.p95_s):
                    logs.append(math.log(window.p95_s / predicted.p95_s))
        if not logs:
            return None
        return math.exp(sum(logs) / len(logs))


def figures_of(
    row: LoadRow, baseline: LoadRow, wanted: Callable[[int], float]
) -> RowFigures:
    """Returns the figures of a row, beside those of the baseline in the same replicates; `wanted` as in `max_rate`."""
    rates = _max_rates(row, wanted)
    most, bound = _over(
        [rate for rate, _ in rates.values()],
        [relation for _, relation in rates.values()],
    )
    of_baseline = {} if row is baseline else _max_rates(baseline, wanted)
    ratios = []
    relations = []
    for number, (base_rate, base_relation) in of_baseline.items():
        if number in rates:
            rate, relation = rates[number]
            ratios.append(rate / base_rate)
            relations += [relation, _OPPOSITE[base_relation]]
    ratio, ratio_bound = None, "="
    if ratios:
        ratio, ratio_bound = _over(ratios, relations)
    if ratio_bound == "?":
        ratio = None
    windows: dict[float, list[Window]] = {}
    for window in row.windows:
        windows.setdefault(window.rate, []).append(window)
    return RowFigures(row, most, bound, ratio, ratio_bound, windows)


_OPPOSITE = {"=": "=", "<": ">", ">": "<"}
"""How a ratio relates to the true one, by how what it is divided by does."""


def shared_rate(figures: Sequence[RowFigures]) -> float | None:
    """Returns the highest rate that all rows had in all replicates and carried; if they carried none, the lowest.

    None if they had none in common, as where each has rates of its own.
    """
    in_common: set[float] | None = None
    for of_row in figures:
        count = len(of_row.row.replicates)
        rates = set()
        for rate, windows in of_row.windows.items():
            if len(windows) == count:
                rates.add(rate)
        in_common = rates if in_common is None else in_common & rates
    if not in_common:
        return None
    most = min(of_row.most.estimate for of_row in figures) * (1 + ROUNDED)
    carried = [rate for rate in in_common if rate <= most]
    return max(carried, default=min(in_common))


def _max_rates(
    row: LoadRow, wanted: Callable[[int], float]
) -> dict[int, tuple[float, str]]:
    """Returns the highest rate of each replicate by its number, as `max_rate` does."""
    return {
        replicate.number: max_rate(replicate.windows, wanted)
        for replicate in row.replicates
    }


def _over(values: Sequence[float], relations: Sequence[str]) -> tuple[Interval, str]:
    """Returns the mean of figures, and how it relates to the true one; of bounds without an interval."""
    mean = interval_of(values)
    bounds = set(relations) - {"="}
    if not bounds:
        return mean, "="
    relation = bounds.pop() if len(bounds) == 1 else "?"
    return Interval(mean.estimate), relation
