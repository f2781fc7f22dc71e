"""Which options a search tries first."""

import json
from pathlib import Path

import pytest

from sdopt.config.composer import composer_of
from sdopt.hardware.cards import CPU_BFLOAT16
from sdopt.hardware.device import Device
from sdopt.record.files import write_result
from sdopt.search import expectation
from sdopt.search.config import search_config
from sdopt.search.expectation import RECORDED, recorded_for
from sdopt.search.space import Space
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
        space = Space.of(config, composer, CPU, None, expected)
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
    expected = expectation.expected_speedups(CPU, tmp_path)
    assert order(expected)[0] == "caching=tome"


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
