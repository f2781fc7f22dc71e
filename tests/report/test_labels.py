"""Labels of points do not overlap, and many points are numbered, with a key."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from sdopt.report.charts.labels import MOST_NAMES, LabelPlace, box_of, overlap, places
from sdopt.search.plot import search_chart, search_plot
from sdopt.search.record import SearchEntry, SearchRecord


def overlaps(
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    found: Sequence[LabelPlace],
) -> int:
    """Counts pairs of labels that cover each other."""
    boxes = [
        box_of(place, x, y, text)
        for (x, y), text, place in zip(points, texts, found, strict=True)
    ]
    return sum(overlap(one, other) > 0 for one, other in combinations(boxes, 2))


@pytest.mark.parametrize(
    ("count", "long"), [(3, True), (MOST_NAMES, True), (30, False)]
)
@pytest.mark.parametrize("spread", [1.0, 0.3])
def test_labels_do_not_overlap_even_where_points_lie_together(
    count: int, long: bool, spread: float
) -> None:
    random = np.random.default_rng(count)
    shares = 0.5 + spread * (random.random((count, 2)) - 0.5)
    points = [(float(800 * x), float(380 * y)) for x, y in shares]
    texts = [
        f"caching=deepcache {number}" if long else str(number)
        for number in range(count)
    ]
    naive = [(13.0, -13.0, "left")] * count
    found = places(points, texts, 800, 380)
    assert overlaps(points, texts, found) == 0
    if spread < 1 and count > MOST_NAMES:
        assert overlaps(points, texts, naive), "the test would pass without placing"


def record(count: int) -> SearchRecord:
    entries = [
        SearchEntry(
            f"option {n}",
            [],
            "not judged",
            "",
            math.exp(n / count),
            1.0,
            1.0,
            1.0,
            1e-4 * n,
            1,
        )
        for n in range(count)
    ]
    return SearchRecord(
        "s", "folder", "", [], ["latency"], "mse", "Nothing.", entries, {}, [], []
    )


@pytest.mark.parametrize("count", [3, 29])
def test_every_point_of_a_search_has_a_name(count: int) -> None:
    searched = record(count)
    text = str(search_plot(searched))
    chart = search_chart(searched)
    assert chart is not None
    assert {name for _, name, _ in chart.legend} == {
        "baseline",
        *(entry.name for entry in searched.entries),
    }
    for entry in searched.entries:
        assert f"{entry.name}'" in text or f"  {entry.name}'" in text
    data = search_plot(searched)
    assert data is not None
    assert all(point["label"] for point in data["data"]["values"])


def test_of_many_points_the_fastest_have_a_label_and_all_have_a_tooltip() -> None:
    searched = record(70)
    chart = search_chart(searched)
    assert chart is not None
    names = [name for _, name, _ in chart.legend]
    assert len(names) == MOST_NAMES
    assert names[0] == "baseline", "which needs no judgement"
    assert names[1:] == [f"option {number}" for number in range(69, 58, -1)]
    data = search_plot(searched)
    assert data is not None
    assert sum(bool(point["label"]) for point in data["data"]["values"]) == MOST_NAMES
    assert str(data).count("'field': 'aria_text'") == 1
    assert data["height"] <= 430
