"""The latency model: units, monotony, and coefficients that belong to it."""

from dataclasses import replace

import numpy as np
import pytest

from sdopt.apps.foresight.fitting import (
    EXTRAPOLATED,
    KNOWN,
    _Row,
    _tellers,
    half_width,
    labels,
    state_of,
    why_not,
)
from sdopt.apps.foresight.latency import (
    COEFFICIENTS,
    NAMES,
    PARTS,
    Case,
    Costs,
    RateTable,
    averaged,
    coefficients,
    fit,
)
from sdopt.apps.foresight.software import Software
from sdopt.config.groups import data_sheets

SHEETS = data_sheets()
STEP = Costs(9e11, 5e11, 2.5e11, 3.5e9, 1.7e9, 760)
DECODER = Costs(2.5e12, 1e10, 3e10, 4.2e9, 2.9e9, 140)
EAGER = Software("library", "eager", torch=(2, 1))


def case(
    card: str = "rtx4090", steps: int = 25, images: int = 1, **changes: object
) -> Case:
    made = Case(
        SHEETS[card], EAGER, STEP.times(images), DECODER.times(images), steps, images
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def seconds(*cases: Case) -> list[float]:
    return [
        float(each)
        for each in np.exp(RateTable.of(cases).log_seconds(coefficients().all))
    ]


def test_a_call_takes_seconds_of_a_plausible_size() -> None:
    [fast, slow] = seconds(case("rtx4090"), case("t4"))
    assert 0.3 < fast < 3
    assert 2 < slow < 12


@pytest.mark.parametrize("card", ["t4", "rtx3060", "h100", "rx6800_xt"])
def test_more_work_takes_longer(card: str) -> None:
    few, many = seconds(case(card, steps=20), case(card, steps=40))
    assert few < many < 2 * few
    one, four = seconds(case(card), case(card, images=4))
    assert one < four
    small, large = seconds(case(card), case(card, denoiser=STEP.times(4)))
    assert small < large


def test_the_gradient_is_that_of_the_time() -> None:
    table = RateTable.of(
        [case("a10"), case("p100", part="step"), case("h100", images=8, part="image")]
    )
    point = coefficients().all
    _, slope = table.gradient(point)
    for index in range(0, len(NAMES), 7):
        moved = point.copy()
        moved[index] += 1e-5
        numeric = (table.log_seconds(moved) - table.log_seconds(point)) / 1e-5
        assert slope[:, index] == pytest.approx(numeric, abs=1e-4)


def test_a_fit_follows_its_figures() -> None:
    table = RateTable.of([case("rtx4090", steps=steps) for steps in (10, 20, 50)] * 10)
    true = 1.3 * np.exp(table.log_seconds(coefficients().all))
    found = fit(table, true)
    assert np.exp(table.log_seconds(found)) == pytest.approx(true, rel=0.1)


def test_the_packaged_coefficients_are_of_this_model_and_hold_no_figures() -> None:
    found = coefficients()
    assert len(found.all) == len(NAMES)
    assert all(
        len(vector) == len(NAMES)
        for folds in found.without.values()
        for vector in folds.values()
    )
    assert set(found.cards) <= set(SHEETS)
    assert {"GA100", "AD102"} <= set(found.without["chip"])
    assert COEFFICIENTS.stat().st_size < 100_000


def test_a_new_generation_is_extrapolated_with_a_wider_interval() -> None:
    found = coefficients()
    assert state_of(found.cards, SHEETS["rtx4090"]) == KNOWN
    assert state_of(found.cards, SHEETS["rtx5090"]) == EXTRAPOLATED
    assert state_of(found.cards, SHEETS["h100"], without="GH100") == EXTRAPOLATED
    known, wide = (
        half_width(found.widths, labels(state, EAGER, "ada", True))
        for state in (KNOWN, EXTRAPOLATED)
    )
    assert 0.1 < known < wide < 1


def test_software_of_transformers_is_known_by_its_publishers_and_all_else_by_its_cards() -> (
    None
):
    classes = ("transformers", "known")
    rows = [_Row("chip", "h100", name, classes, 1.0) for name in ("one", "other")]
    assert [_tellers(name, rows) for name in classes] == [2, 1]


def test_intervals_are_wider_for_a_new_publisher_and_for_a_pytorch_of_which_there_are_no_figures() -> (
    None
):
    found = coefficients()
    usual, strange = (
        half_width(found.widths, labels(KNOWN, EAGER, "ada", seen))
        for seen in (True, False)
    )
    assert usual < strange
    old, new = (
        RateTable.of([case(software=replace(EAGER, torch=torch))])
        for torch in ((2, 3), (2, 10))
    )
    assert old.untold(found.all)[0] == 0
    assert (
        half_width(
            found.widths, labels(KNOWN, EAGER, "ada", False), new.untold(found.all)[0]
        )
        > strange
    )


@pytest.mark.parametrize(
    ("torch", "age"),
    [((1, 13), 1), ((0, 0), 2), ((2, 3), 2), ((2, 4), 3), ((2, 10), 3)],
)
def test_versions_of_pytorch_have_an_age(torch: tuple[int, int], age: int) -> None:
    software = replace(EAGER, torch=torch)
    assert (software.fixed, software.launcher) == (f"library_{age}", f"eager_{age}")


def test_a_recorded_graph_takes_launches_and_most_gaps_away() -> None:
    cases = [case("h200"), case("h200", software=replace(EAGER, graphs=True))]
    gaps, launches = RateTable.of(cases).parts(coefficients().all)[
        [PARTS.index("kernels"), PARTS.index("launches")]
    ]
    assert gaps[1] < 0.3 * gaps[0]
    assert launches[1] < 0.1 * launches[0]


def test_passes_are_averaged_by_how_often_they_run() -> None:
    mean = averaged([(1, Costs(kernels=9, peak=5)), (2, Costs(kernels=3, peak=7))])
    assert (mean.kernels, mean.peak) == (5, 7)


def test_cards_without_enough_figures_are_refused() -> None:
    assert "CDNA3" in why_not(SHEETS["mi300x"])
    assert "spill" in why_not(SHEETS["rtx3050_laptop"])
    assert why_not(replace(SHEETS["t4"], architecture=None))
    assert not why_not(SHEETS["rx6800"])
