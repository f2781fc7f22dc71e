"""The configuration of `sdopt gpu-suite`: its parts compose, and mistakes are named."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runners.gpu_suite import main
from sdopt.apps.suite.config import INTERVALS, Part, suite_config
from sdopt.apps.suite.parts import option_study, study_overrides
from sdopt.config.composer import composer_of
from sdopt.config.groups import data_sheets, optimization_options
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.hardware.cards import planned_device
from sdopt.hardware.device import Device
from tests.fixtures import CPU

H200 = planned_device(data_sheets()["h200"])
SUITE = suite_config([])
STUDIES = [part for part in SUITE.parts.values() if part.kind in ("noise", "study")]
SOME_STUDIES = [
    pytest.param(part, marks=[] if number % 3 == 0 else pytest.mark.slow, id=part.name)
    for number, part in enumerate(STUDIES)
]
PARTS = SUITE.parts
_ROW_S = 11
"""About what a row of two short calls takes on a card, most of it to load and to trace."""
FASTEST = [
    name for name in PARTS if name.startswith(("fastest_", "mlperf_", "transformer_"))
]


def composed(part: Part, device: Device) -> Sequence[str]:
    return study_overrides(part, SUITE, device)


@pytest.mark.parametrize("part", SOME_STUDIES)
def test_every_study_composes_and_fits_into_its_part(part: Part) -> None:
    with composer_of(composed(part, H200)) as composer:
        current = composer.current
        variants = current.study.plan(composer).variants
    assert current.tracking.kind == "none"
    assert not current.quality.metrics
    assert current.model.weights != "hub", "there is no network"
    assert part.kind == "noise" or (len(variants) + 1) * _ROW_S <= part.limit_s, (
        "with the control"
    )
    if part.name in FASTEST:
        assert len(variants) > 1
        assert {variant.name: variant.conflicts(H200) for variant in variants} == {
            row.name: [] for row in variants
        }


@pytest.mark.parametrize("part", STUDIES[::9], ids=lambda part: part.name)
def test_a_study_composes_on_a_cpu(part: Part) -> None:
    with composer_of(composed(part, CPU)) as composer:
        current = composer.current
    assert (current.model.name, current.hardware.device) == ("emoji", "cpu")


OPTIONS = [part for part in PARTS.values() if part.kind == "options"]
CALL_S = 540
"""A call's budget, where a command on a lent machine may take ten minutes."""


FOR_TRANSFORMERS = {
    f"attention={name}" for name in ("dispatched", "flash_3", "flash_4", "flex", "sage")
}
"""Options that are impossible with every UNet."""


def test_what_is_for_transformers_is_tried_on_one() -> None:
    [part] = [part for part in OPTIONS if "model=emoji_dit" in part.overrides]
    assert set(part.options) >= FOR_TRANSFORMERS


def test_every_option_is_tried_on_every_model() -> None:
    with composer_of([]) as composer:
        chosen = {
            f"{group}={option}"
            for group, option in composer.variant("baseline").choices.items()
        }
    everything = {
        f"{group}={option}" for group, option in optimization_options()
    } - FOR_TRANSFORMERS
    for model in ("emoji", "sd15", "sdxl"):
        of_model = [part for part in OPTIONS if f"model={model}" in part.overrides]
        tried = [
            f"{group}={name}"
            for part in of_model
            for group, _, option in (given.partition("=") for given in part.options)
            for name in ([option] if option else options_of(group))
            if f"{group}={name}" not in part.settled
        ]
        assert len(tried) == len(set(tried)), "each once"
        assert everything - chosen <= set(tried) <= everything | FOR_TRANSFORMERS


def test_each_part_fits_into_one_call_and_what_compiles_begins_only_with_time_to_compile() -> (
    None
):
    """A part that was cut off is then whole after the next call; before its first round it would show nothing."""
    for part in PARTS.values():
        assert part.limit_s <= CALL_S - 40, part.name
        if "compiled" in str(part.overrides) or part.name.startswith("mlperf"):
            assert part.least_s >= 0.65 * part.limit_s, part.name
    assert SUITE.intervals_s <= CALL_S - 40


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(
            part, marks=[] if number % 12 == 0 else pytest.mark.slow, id=part.name
        )
        for number, part in enumerate(OPTIONS)
    ],
)
def test_options_fit_into_their_part(part: Part) -> None:
    of_study, left_out, tried = option_study(part, composed(part, H200), H200)
    few = [
        found
        for found in left_out
        if "steps" in found.said and "distilled" not in found.said
    ]
    assert not few, (
        "so many steps show each of them, but for those that take a number of their own"
    )
    if not of_study:
        return
    with composer_of([*composed(part, H200), *of_study]) as composer:
        current = composer.current
        rows = len(current.study.plan(composer).variants)
    assert (rows + 1) * _ROW_S <= part.limit_s, "with the control"
    steps = [key.removeprefix("workload.steps=") for key in part.first]
    assert current.workload.steps == int(steps[0] if steps else 2)
    assert (current.protocol.energy_s, current.protocol.stage_calls) == (0, 0)
    if any(option.startswith("compiler") for option in tried):
        assert current.protocol.timeout_s >= part.limit_s, (
            "a slow compilation is no failure"
        )
        assert len(tried) <= 4
    if current.model.name == "sdxl":
        assert len(tried) <= 6


def test_with_intervals_a_preset_keeps_its_own_steps_and_gets_three_processes() -> None:
    part = PARTS["hf_sdxl"]
    again = replace(part, name=part.name + INTERVALS)
    for given, steps, energy_s, processes in ((part, 10, 0.0, 1), (again, 50, 5.0, 3)):
        with composer_of(composed(given, H200)) as composer:
            current = composer.current
        assert (current.workload.steps, current.protocol.energy_s) == (steps, energy_s)
        assert current.protocol.replicates == processes


def test_with_intervals_only_studies_and_options_are_measured() -> None:
    chosen = suite_config(
        ["intervals=true", "only=[noise,hf_sdxl,options_emoji_half]", "intervals_s=70"]
    ).chosen
    assert [part.name for part in chosen] == [
        "options_emoji_half_intervals",
        "hf_sdxl_intervals",
    ]
    assert {part.limit_s for part in chosen} == {70}
    with pytest.raises(
        UsageError,
        match=r"^intervals=true: none of only=\['noise'\] is a study or options$",
    ):
        suite_config(["intervals=true", "only=[noise]"])


def test_every_published_preset_is_a_part() -> None:
    presets = {
        o.partition("=")[2]
        for part in PARTS.values()
        for o in part.overrides
        if o.startswith("experiment=")
    }
    conf = Path(__file__).parents[3] / "conf" / "experiment"
    published = {
        path.stem
        for path in conf.glob("*.yaml")
        if "\n  published:" in path.read_text()
    }
    # One needs a hub, one a LoRA for FLUX, and one is for sdopt load-test.
    apart = {
        "blade_altdiffusion",
        "hf_flux_lora",
        "hf_flux_lora_fa3",
        "lightning_serving",
    }
    assert published - apart | {"fastest_cuda", "mlperf_sdxl"} <= presets


def test_options_are_tried_alone_or_beside_what_they_need() -> None:
    settings = {"memory=vae_tiling": ["memory.vae_tiling.tile_size=512"]}
    tried = ["memory", "caching", "lora=fused"]
    part = replace(
        PARTS["options_sdxl_memory"],
        options=tried,
        settings=settings,
        settled=["caching=tome"],
    )
    overrides = composed(part, H200)
    of_study, findings, tried = option_study(part, overrides, H200)
    variants, edges = of_study[-2:]
    assert (
        'memory vae_tiling: ["memory=vae_tiling", "memory.vae_tiling.tile_size=512"]'
        in variants
    )
    assert (
        'memory group_offload: ["memory=tiny_vae", "memory=group_offload"]' in variants
    )
    assert "{candidate: memory group_offload, reference: with memory tiny_vae}" in edges
    assert "{candidate: memory tiny_vae, reference: baseline}" in edges
    assert "tome" not in variants, "it is settled"
    assert {"memory=group_offload", "caching=deepcache"} <= set(tried)
    left_out = {found.name: found for found in findings}
    assert left_out["lora=fused"].state == "cannot run"
    assert "set lora.path" in left_out["lora=fused"].said
    assert "lora=loaded" not in left_out, "it is not asked for"
    with composer_of([*overrides, *of_study]) as composer:
        assert composer.current.study.name == "options"
    with pytest.raises(
        UsageError, match=r"^layout=upside_down: no option or group of options$"
    ):
        option_study(
            replace(part, options=["layout=upside_down", "attention"]), [], CPU
        )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("budget=1", "budget: "),
        ("archive=suite.zip", "archive=suite.zip: must end in .tar.xz"),
        ("device=cuda", "hardware.device=cuda: "),
        (
            "only=[nois]",
            "only: unknown part 'nois'; choose from environment, fastest_sd15_compiled",
        ),
        (
            "parts.noise.kind=nonsense",
            "parts.noise.kind=nonsense: Input should be 'doctor', 'tests'",
        ),
        (
            "parts.noise.limit_s=-1",
            "parts.noise.limit_s=-1: Input should be greater than 0",
        ),
        (
            "+parts.noise.options=[attention]",
            "parts.noise.options: has no effect with kind=noise; leave it out",
        ),
        (
            "+parts.mine={kind: options, limit_s: 9}",
            "parts.mine.options: must name the groups or options",
        ),
        ("+parts.mine=3", "parts.mine=3: Input should be a dictionary"),
        ("~parts.noise.limit_s", "parts.noise.limit_s: Field required"),
        ("parts=null", "parts: Input should be a valid dictionary"),
    ],
)
def test_a_mistake_exits_with_2_and_names_the_key(
    override: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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
