"""Published diffusion transformers: their architectures, and what their options choose."""

import json

import pytest

from sdopt.config.composer import HydraComposer
from sdopt.pipelines.catalog import ARCHITECTURES
from sdopt.pipelines.family import family_named
from sdopt.pipelines.loading import call_arguments, family_of, guidance_of
from sdopt.pipelines.random_weights import empty_network
from tests.fixtures import CPU

Composers = type[HydraComposer]

GIB = 2**30

TRANSFORMERS = {
    "flux_dev": 11_901_408_320,
    "flux_schnell": 11_891_178_560,
    "flux2_klein_4b": 3_875_544_576,
    "flux2_klein_9b": 9_078_581_248,
    "flux2_dev": 32_223_281_152,
    "sd3_medium": 2_028_328_000,
    "sd35_medium": 2_243_171_520,
    "sd35_large": 8_056_627_520,
    "z_image": 6_154_908_736,
    "z_image_turbo": 6_154_908_736,
    "qwen_image": 20_430_401_088,
    "chroma": 8_899_983_424,
    "pixart_sigma": 610_856_096,
    "sana_1600m": 1_604_462_752,
    "sana_600m": 591_747_872,
    "lumina2": 2_609_769_152,
}
"""Parameters of each denoiser, by the name of the model."""

ENCODERS = [
    ("flux_dev", "text_encoder", 0.229),
    ("flux_dev", "text_encoder_2", 8.870),
    ("sd35_large", "text_encoder", 0.230),
    ("sd35_large", "text_encoder_2", 1.294),
    ("z_image", "text_encoder", 7.492),
    ("flux2_klein_4b", "text_encoder", 7.492),
    ("flux2_klein_9b", "text_encoder", 15.256),
    ("flux2_dev", "text_encoder", 44.725),
    ("qwen_image", "text_encoder", 15.445),
    ("lumina2", "text_encoder", 4.870),
]
"""GiB in bfloat16, each shared embedding counted once; the encoder of FLUX.2 [klein] 9B has a head of its own."""

AUTOENCODERS = [
    ("flux_dev", 0.156),
    ("sd3_medium", 0.156),
    ("flux2_klein_4b", 0.157),
    ("qwen_image", 0.236),
    ("sana_1600m", 0.582),
    ("pixart_sigma", 0.156),
]
"""GiB in bfloat16."""


SHIFTS = {
    "flux_schnell": 1.0,
    "sd35_large": 3.0,
    "z_image": 6.0,
    "z_image_turbo": 3.0,
    "chroma": 3.0,
    "lumina2": 6.0,
}
"""Shifts of sigmas that do not go by the size of images; Chroma's is that of Chroma1-HD, as its own option says."""


def index_of(name: str) -> dict[str, list[str]]:
    index: dict[str, list[str]] = json.loads(
        (ARCHITECTURES / name / "model_index.json").read_text()
    )
    return index


def parameters(name: str, part: str) -> int:
    """The parameters of a part, which stay on the meta device."""
    network = empty_network(ARCHITECTURES / name / part, *index_of(name)[part])
    assert all(parameter.is_meta for parameter in network.parameters())
    return sum(parameter.numel() for parameter in network.parameters())


class TestArchitectures:
    @pytest.mark.parametrize("name", TRANSFORMERS)
    @pytest.mark.walk(5)
    def test_have_the_published_number_of_parameters(self, name: str) -> None:
        assert parameters(name, "transformer") == TRANSFORMERS[name]

    @pytest.mark.parametrize(("name", "part", "gib"), ENCODERS)
    def test_have_encoders_as_large_as_published(
        self, name: str, part: str, gib: float
    ) -> None:
        assert 2 * parameters(name, part) / GIB == pytest.approx(gib, abs=0.001)

    @pytest.mark.parametrize(("name", "gib"), AUTOENCODERS)
    def test_have_autoencoders_as_large_as_published(
        self, name: str, gib: float
    ) -> None:
        assert 2 * parameters(name, "vae") / GIB == pytest.approx(gib, abs=0.001)

    @pytest.mark.parametrize("name", SHIFTS)
    def test_have_the_published_shift(self, name: str) -> None:
        file = ARCHITECTURES / name / "scheduler" / "scheduler_config.json"
        config = json.loads(file.read_text())
        assert config["shift"] == SHIFTS[name]
        assert not config.get("use_dynamic_shifting")

    @pytest.mark.parametrize("name", TRANSFORMERS)
    def test_have_the_parts_of_their_family_and_no_other_key(self, name: str) -> None:
        index = index_of(name)
        family = family_named(str(index["_class_name"]))
        assert {part for part, value in index.items() if isinstance(value, list)} == {
            *family.parts
        }
        for part in family.parts:
            file = {"scheduler": "scheduler_config.json"}.get(part, "config.json")
            file = "tokenizer_config.json" if part in family.tokenizers else file
            assert (ARCHITECTURES / name / part / file).is_file()


class TestOptions:
    @pytest.mark.parametrize("name", TRANSFORMERS)
    @pytest.mark.walk(3)
    def test_choose_what_the_model_is_published_for(
        self, composer: Composers, name: str
    ) -> None:
        variant = composer([f"model={name}", "model.weights=random"]).variant(None)
        flow = family_of(variant.model).sampling == "flow"
        assert variant.model.name == name
        assert variant.size == 1024
        assert variant.choices["precision"] == "bf16"
        assert variant.scheduler.class_name == (
            "FlowMatchEulerDiscreteScheduler" if flow else "DDIMScheduler"
        )
        assert call_arguments(variant.model)["max_sequence_length"] in (256, 300, 512)

    def test_are_overruled_by_the_command(self, composer: Composers) -> None:
        words = [
            "model=sd35_medium",
            "model.weights=random",
            "precision=fp32",
            "scheduler=flow_heun",
        ]
        variant = composer(words).variant(None)
        assert variant.choices["precision"] == "fp32"
        assert variant.scheduler.class_name == "FlowMatchHeunDiscreteScheduler"

    @pytest.mark.parametrize(
        ("name", "form", "scale", "samples", "calls"),
        [
            ("sd35_large", "batched", 3.5, 2, 1),
            ("chroma", "sequential", 3.0, 1, 2),
            ("qwen_image", "sequential", 4.0, 1, 2),
            ("flux_dev", "embedded", 3.5, 1, 1),
            ("flux_schnell", "sequential", 1.0, 1, 1),
            ("flux2_klein_4b", "none", 1.0, 1, 1),
            ("z_image", "batched", 4.0, 2, 1),
            ("z_image_turbo", "batched", 0.0, 1, 1),
        ],
    )
    def test_guide_as_published(
        self,
        composer: Composers,
        name: str,
        form: str,
        scale: float,
        samples: int,
        calls: int,
    ) -> None:
        variant = composer([f"model={name}", "model.weights=random"]).variant(None)
        guidance = guidance_of(variant.model)
        assert (guidance.form, variant.guidance_scale) == (form, scale)
        assert (guidance.samples_a_call(scale), guidance.calls_a_step(scale)) == (
            samples,
            calls,
        )

    def test_a_unet_has_no_other_number_of_tokens(self, composer: Composers) -> None:
        variant = composer(["model=emoji", "model.max_sequence_length=12"]).variant(
            None
        )
        assert any(
            "model.max_sequence_length=12" in problem
            for problem in variant.conflicts(CPU)
        )
