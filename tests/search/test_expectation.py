"""Which options a search tries first."""

import json
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets
from sdopt.forecast import Expected
from sdopt.hardware.cards import CPU_BFLOAT16
from sdopt.hardware.device import Device
from sdopt.record.files import write_result
from sdopt.schema import Shape
from sdopt.search import expectation
from sdopt.search.config import search_config
from sdopt.search.expectation import RECORDED, recorded_for
from sdopt.search.space import Space
from sdopt.worker.machine import Machine
from tests.fakes import Fakes, fake_study, run_fake

CPU, CARD = Device("cpu", name="a CPU"), Device("cuda", name="a card")
GROUPS = ["search.groups=[precision,layout,caching,compiler]"]
OPTIONS = (
    "{precision: [fp32,fp16,bf16], layout: [contiguous,channels_last], caching: [none,tome,deepcache], "
    "compiler: [eager,regional]}"
)


def order(expected: dict[str, float]) -> list[str]:
    """Returns the options alone, in the order in which a search tries them."""
    config = search_config([*GROUPS, f"search.options={OPTIONS}"])
    with composer_of(["tracking=none"]) as composer:
        space = replace(Space.of(config, composer, CPU), expected=expected)
        return [
            override for point in space.alone() for override in space.overrides(point)
        ]


def test_what_promises_most_comes_first_and_what_compiles_last() -> None:
    first, *_, last = order(recorded_for(CPU))
    assert first == "caching=deepcache"
    assert last == "compiler=regional"
    assert "precision=fp16" in order(recorded_for(CPU))[-2:]


def test_without_measurements_the_order_is_that_of_the_groups() -> None:
    assert order({}) == [
        *(
            "precision=fp16",
            "precision=bf16",
            "layout=channels_last",
            "caching=tome",
            "caching=deepcache",
        ),
        "compiler=regional",
    ]


def test_what_this_machine_measured_counts_before_records_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expectation, "results_of", lambda *_: [])
    monkeypatch.setattr(expectation, "medians", lambda _: {"caching=tome": 5.0})
    planned = {"caching=tome": 0.5, "layout=channels_last": 4.0}
    expected = expectation.expected_speedups(CPU, tmp_path, planned)
    first, second, *_ = order(expected)
    assert (first, second) == ("caching=tome", "layout=channels_last")


def test_of_a_card_that_plan_knows_it_says_what_an_option_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half precision gains nothing on the card of the records, and twice as much as caching on slower ones."""
    seconds = {"baseline": 9.0, "precision=fp16": 3.0, "caching=tome": math.nan}
    with composer_of(["tracking=none"]) as composer:
        variants = [
            composer.variant(name, [name] if "=" in name else []) for name in seconds
        ]
    told = [
        Expected(name, shape, times * of_one, "")
        for name, of_one in seconds.items()
        for shape, times in ((Shape(512, 1), 1), (Shape(512, 4), 7))
    ]
    monkeypatch.setattr(expectation, "expected", lambda *_: told)
    sheet, context = data_sheets()["rtx3060"], multiprocessing.get_context("spawn")
    machine = Machine(CARD, {}, False, False, sheet)
    planned = expectation.planned_speedups(variants, machine, context)
    assert planned == {"precision=fp16": 3.0}
    unknown = replace(machine, sheet=None)
    assert expectation.planned_speedups(variants, unknown, context) == {}


@pytest.mark.parametrize("products", [True, False])
def test_bfloat16_in_software_comes_last_and_with_instructions_stands_between(
    products: bool,
) -> None:
    device = Device("cpu", name="a CPU", attributes={CPU_BFLOAT16: products})
    tried = order(recorded_for(device))
    assert (
        tried.index("precision=bf16") < tried.index("precision=fp16") - 1
    ) is products


def test_a_card_lends_an_option_that_no_processor_has_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert "precision=uint4_sdnq" not in recorded["cpu"]
    assert (
        recorded_for(CPU)["precision=uint4_sdnq"]
        == recorded["cuda"]["precision=uint4_sdnq"]
    )
    assert recorded_for(CARD)["precision=bf16"] == recorded["cuda"]["precision=bf16"]


def test_results_of_other_devices_and_damaged_ones_are_passed_over(
    tmp_path: Path,
) -> None:
    result, _ = run_fake(
        tmp_path,
        fake_study(rounds=3, warmup=1, replicates=1),
        Fakes(seconds={"it": 0.02}),
    )
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "result.json").write_text("{")
    write_result(result, tmp_path)
    here = Device("cpu", name=result.environment.device["name"])
    assert [found.id for found in expectation.results_of(here, tmp_path)] == [result.id]
    assert expectation.results_of(CARD, tmp_path) == []
