"""The configuration of `sdopt gpu-suite`: its parts compose, and mistakes are named."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from runners.gpu_suite import main
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets, optimization_options
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from sdopt.suite.config import Part, suite_config
from sdopt.suite.options import option_study
from sdopt.suite.run import Suite, study_overrides
from tests.fixtures import CPU

H200 = planned_device(data_sheets()["h200"])
STUDIES = [part for part in suite_config([]).parts if part.kind in ("noise", "study")]
PARTS = {part.name: part for part in suite_config([]).parts}


def composed(part: Part, device: Device) -> Sequence[str]:
    return study_overrides(Suite(suite_config([]), device, Path(), 0.0, print), part)


@pytest.mark.parametrize("part", STUDIES, ids=lambda part: part.name)
@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "cuda"])
def test_every_study_composes(part: Part, device: Device) -> None:
    with composer_of(composed(part, device)) as composer:
        current = composer.current
    assert current.tracking.kind == "none"
    assert not current.quality.metrics
    assert current.model.weights != "hub", "there is no network"
    if device is CPU:
        assert (current.model.name, current.hardware.device) == ("emoji", "cpu")


def test_overrides_within_a_list_may_have_colons() -> None:
    given = "{kind: options, limit_s: 1, groups: [layout], overrides: [precision:bf16], settled: [layout:contiguous]}"
    part = suite_config([f"+parts.mine={given}"]).parts[-1]
    assert (part.overrides, part.settled) == (["precision=bf16"], ["layout=contiguous"])


def test_every_option_is_tried_on_every_model() -> None:
    groups = {group for group, _ in optimization_options()}
    for model in ("emoji", "sd15", "sdxl"):
        tried = [group for name, part in PARTS.items() if f"_{model}_" in name for group in part.groups]
        assert sorted(tried) == sorted(groups)


def test_every_published_preset_is_a_part() -> None:
    presets = {o.partition("=")[2] for part in PARTS.values() for o in part.overrides if o.startswith("experiment=")}
    conf = Path(__file__).parents[2] / "conf" / "experiment"
    published = {path.stem for path in conf.glob("*.yaml") if "\n  published:" in path.read_text()}
    needs_a_hub = {"blade_altdiffusion"}
    assert published - needs_a_hub | {"fastest_cuda", "mlperf_sdxl"} <= presets


@pytest.mark.parametrize("name", ["fastest_sd15", "fastest_sdxl", "mlperf_sdxl"])
def test_no_row_of_the_fastest_is_skipped_on_a_card(name: str) -> None:
    with composer_of(composed(PARTS[name], H200)) as composer:
        variants = composer.current.study.plan(composer).variants
    assert len(variants) > 1
    assert {variant.name: variant.conflicts(H200) for variant in variants} == {row.name: [] for row in variants}


def test_options_are_tried_alone_or_beside_what_they_need() -> None:
    part = PARTS["options_sdxl_others"]
    study = option_study(composed(part, H200), part.groups, part.settings, H200, settled=["caching=tome"])
    variants, edges = study.overrides[-2:]
    assert 'memory vae_tiling: ["memory=vae_tiling", "memory.vae_tiling.tile_size=512"]' in variants
    assert 'memory group_offload: ["memory=tiny_vae", "memory=group_offload"]' in variants
    assert "{candidate: memory group_offload, reference: with memory tiny_vae}" in edges
    assert "{candidate: memory tiny_vae, reference: baseline}" in edges
    assert "tome" not in variants, "it is settled"
    left_out = {found.name: found for found in study.left_out}
    assert left_out["lora=fused"].state == "cannot run"
    assert "set lora.path" in left_out["lora=fused"].said
    with composer_of([*composed(part, H200), *study.overrides]) as composer:
        assert composer.current.study.name == "options"


def test_nothing_is_measured_where_nothing_can_run() -> None:
    study = option_study(["hardware.device=cpu", "tracking=none"], ["attention"], {}, CPU, settled=["attention=math"])
    assert study.overrides
    everything = [f"{group}={option}" for group, option in optimization_options()]
    assert not option_study(["hardware.device=cpu"], ["attention"], {}, CPU, settled=everything).overrides


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("budget=1", "budget: unknown key; did you mean budget_s? `sdopt gpu-suite --help` lists all"),
        ("budget_s=0", "budget_s=0.0: must be above 0"),
        ("device=tpu", "device=tpu: choose one of cuda, cpu"),
        ("device=cuda", "hardware.device=cuda: "),
        ("only=[nois]", "only: unknown part 'nois'; choose from environment, noise"),
        ("parts.noise.kind=nonsense", "parts.noise.kind=nonsense: choose one of doctor, tests"),
        ("parts.noise.limit_s=-1", "parts.noise.limit_s=-1.0: must be above 0"),
        ("+parts.noise.groups=[attention]", "parts.noise.groups: has no effect with kind=noise; leave it out"),
        ("+parts.mine={kind: options, limit_s: 9}", "parts.mine.groups: must name the groups"),
        ("+parts.mine=3", "parts.mine: must be a group of keys, not 3"),
        ("~parts.noise.limit_s", "parts.noise.limit_s: must be given"),
    ],
)
def test_a_mistake_exits_with_2_and_names_the_key(
    override: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([override]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert "Traceback" not in shown.err
    assert not list(tmp_path.iterdir())


def test_help_lists_keys_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "budget_s=1500.0  (float, > 0" in shown
    assert all(name in shown for name in PARTS)
