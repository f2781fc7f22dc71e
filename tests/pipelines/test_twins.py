"""Models with the same tensors that are sampled otherwise: what tells them apart, and what is said where nothing does."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from safetensors.torch import save_file

from sdopt.config.models import with_own_models
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.pipelines.catalog import ARCHITECTURES, PACKAGED, read_json
from sdopt.pipelines.checks import _require_architecture
from sdopt.pipelines.families import (
    family_of,
    settings_of,
    settings_of_folder,
    twin_of_folder,
)
from sdopt.pipelines.loading import name_of
from sdopt.pipelines.twins import assumed, require_known_work, titles_of
from sdopt.preparation import remarks_on_model
from sdopt.schema import Model
from tests.fixtures import Compose, Composers, Tiny

SD35_LARGE = {
    "joint_blocks.0.x": [1],
    "joint_blocks.37.x": [1],
    "y_embedder.x": [1],
    "pos_embed": [1, 192**2, 1],
}

Z_IMAGE = {
    "cap_pad_token": [1],
    "cap_embedder.0.weight": [2560],
    "noise_refiner.0.x": [1],
    **{f"layers.{number}.x": [1] for number in range(30)},
}

SCHNELL = {
    "double_blocks.0.x": [1],
    "double_blocks.18.x": [1],
    "single_blocks.37.x": [1],
    "vector_in.x": [1],
    "img_in.weight": [1, 64],
    "txt_in.weight": [1, 4096],
}

KLEIN_9B = {
    "double_stream_modulation_img.lin.weight": [1, 1],
    "img_in.weight": [1, 128],
    "txt_in.weight": [1, 12288],
    "double_blocks.0.x": [1],
    "double_blocks.7.x": [1],
    "single_blocks.23.x": [1],
}

QWEN = {
    "transformer_blocks.0.img_mod.1.x": [1],
    "transformer_blocks.59.x": [1],
    "txt_norm.weight": [1],
    "img_in.weight": [1, 64],
    "txt_in.weight": [1, 3584],
}


def file_of(
    folder: Path, name: str, shapes: dict[str, list[int]], title: str = ""
) -> Path:
    """Writes a file with as many tensors as tell a published architecture."""
    path = folder / f"{name}.safetensors"
    tensors = {key: torch.zeros(shape).half() for key, shape in shapes.items()}
    save_file(tensors, path, {"modelspec.title": title} if title else None)
    return path


def change(file: Path, **values: Any) -> None:
    """Sets keys of a configuration."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def sampled(path: Path, *keys: str) -> dict[str, Any]:
    """Returns how a folder or a file is sampled by default, beside further keys of it."""
    chosen = with_own_models([f"model={path}", *keys], options_of("model"))
    model = compose("config", chosen).model
    return {key: model[key] for key in KEYS}


def published(composer: Composers, name: str) -> dict[str, Any]:
    """Returns how a model that comes with sdopt is."""
    model = composer([f"model={name}"]).current.model
    return {key: getattr(model, key) for key in KEYS}


KEYS = ("steps", "guidance_scale", "distilled")


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "title", "shapes", "found"),
        [
            ("sd3.5_large", "", SD35_LARGE, "sd35_large"),
            ("sd3.5_large_turbo", "", SD35_LARGE, "sd35_large_turbo"),
            ("a", "Stable Diffusion 3.5 Large Turbo", SD35_LARGE, "sd35_large_turbo"),
            ("sd35-de-turbo", "", SD35_LARGE, "sd35_large"),
            ("z_image_turbo_bf16", "", Z_IMAGE, "z_image_turbo"),
            ("dreamZIT_v2", "", Z_IMAGE, None),
            ("dream_zit_v2", "", Z_IMAGE, "z_image_turbo"),
            ("z-image-base", "", Z_IMAGE, "z_image"),
            ("zImageBase_v1", "", Z_IMAGE, "z_image"),
            ("z_image_de_turbo", "", Z_IMAGE, None),
            ("z_image_bf16", "", Z_IMAGE, None),
        ],
    )
    def test_are_known_by_what_their_author_calls_them(
        self,
        tmp_path: Path,
        name: str,
        title: str,
        shapes: dict[str, list[int]],
        found: str | None,
    ) -> None:
        file = file_of(tmp_path, name, shapes, title)
        if found is not None:
            assert family_of(file) == found
            return
        with pytest.raises(UsageError, match="choose model=z_image or"):
            family_of(file)

    @pytest.mark.parametrize(
        ("name", "shapes", "way"),
        [
            ("flux-dev-de-distill", SCHNELL, "workload.guidance_scale=3.5"),
            ("LibreFLUX_bf16", SCHNELL, "workload.steps=28"),
            ("flux-2-klein-base-9b", KLEIN_9B, "FLUX.2-klein-base-9B"),
            ("qwen_image_2509_fp8", QWEN, "edits images"),
            ("myQwenEditPlus_v1", QWEN, "edits images"),
            ("flux2Klein_9bBase_v10", KLEIN_9B, "FLUX.2-klein-base-9B"),
            ("OpenFLUX.1", SCHNELL, "workload.steps=28"),
        ],
    )
    def test_that_are_used_otherwise_are_refused(
        self, tmp_path: Path, name: str, shapes: dict[str, list[int]], way: str
    ) -> None:
        with pytest.raises(UsageError, match=way):
            family_of(file_of(tmp_path, name, shapes))

    @pytest.mark.parametrize(
        ("name", "scale"), [("flux1-krea-dev_fp8_scaled", 4.5), ("dream_v2", 3.5)]
    )
    def test_of_a_model_that_was_trained_on_are_guided_as_its_author_does(
        self, tmp_path: Path, composer: Composers, name: str, scale: float
    ) -> None:
        expected = published(composer, "flux_dev") | {"guidance_scale": scale}
        file = file_of(tmp_path, name, SCHNELL | {"guidance_in.x": [1]})
        assert sampled(file) == expected
        folder = shutil.copytree(ARCHITECTURES / "flux_dev", tmp_path / name)
        assert sampled(folder) == expected

    def test_are_guided_as_their_author_does_beside_the_published_pipeline(
        self, tmp_path: Path, composer: Composers
    ) -> None:
        expected = published(composer, "flux_dev") | {"guidance_scale": 4.5}
        file = file_of(tmp_path, "flux1-krea-dev", SCHNELL | {"guidance_in.x": [1]})
        base = f"model.base={ARCHITECTURES / 'flux_dev'}"
        assert sampled(file, base) == expected

    @pytest.mark.parametrize(
        ("name", "shapes", "base", "said"),
        [
            ("flux-2-klein-base-9b", KLEIN_9B, "flux2_klein_9b", "its name says base"),
            ("z_image_base", Z_IMAGE, "z_image_turbo", "it is model=z_image,"),
            ("z_image_turbo", Z_IMAGE, "z_image", "it is model=z_image_turbo,"),
            ("flux-2-klein-9b", KLEIN_9B, "flux2_klein_9b", None),
            ("z_image_turbo", Z_IMAGE, "z_image_turbo", None),
            ("z_image_bf16", Z_IMAGE, "z_image_turbo", None),
        ],
    )
    def test_in_the_pipeline_of_another_twin_are_told(
        self,
        tmp_path: Path,
        variant: Compose,
        name: str,
        shapes: dict[str, list[int]],
        base: str,
        said: str | None,
    ) -> None:
        """Encoders and VAE are the same, and so the folder of either has them; it says how images are drawn, too."""
        usual = variant("workload.steps=4", "workload.guidance_scale=1")
        folder = str(shutil.copytree(ARCHITECTURES / base, tmp_path / "mine"))
        file = str(file_of(tmp_path, name, shapes))
        model = Model("folder", "path", path=file, base=folder)
        remarks = remarks_on_model(replace(usual, model=model))
        assert [str(said) in line for line in remarks] == [True] * (said is not None)

    def test_of_a_distilled_model_beside_a_pipeline_that_guides_are_told(
        self, tmp_path: Path, variant: Compose
    ) -> None:
        usual = variant("workload.steps=4", "workload.guidance_scale=1")
        folder = shutil.copytree(ARCHITECTURES / "flux2_klein_9b", tmp_path / "base")
        index = folder / "model_index.json"
        index.write_text(json.dumps(read_json(index) | {"is_distilled": False}))

        def remarks(name: str) -> list[str]:
            file = str(file_of(tmp_path, name, KLEIN_9B))
            model = Model("folder", "path", path=file, base=str(folder))
            return remarks_on_model(replace(usual, model=model))

        [line] = remarks("flux-2-klein-9b")
        assert "its name says klein and not base" in line
        assert not remarks("flux-2-klein-base-9b")
        assert not remarks("dream_v2")

    def test_say_what_they_are_taken_for_where_nothing_tells(
        self, tmp_path: Path
    ) -> None:
        unnamed = file_of(tmp_path, "dream_v2", SD35_LARGE)
        assert family_of(unnamed) == "sd35_large"
        assert "model=sd35_large_turbo" in str(
            assumed(titles_of(unnamed), "sd35_large")
        )
        klein = file_of(tmp_path, "dream_v3", KLEIN_9B)
        assert "klein-base-9B" in str(assumed(titles_of(klein), str(family_of(klein))))
        for name in ("sd3.5_large", "sd35_large_turbo"):
            assert assumed([name], "sd35_large") is None
        titled = file_of(tmp_path, "a", SD35_LARGE, "Stable Diffusion 3.5 Large")
        assert assumed(titles_of(titled), "sd35_large") is None


class TestFolders:
    @pytest.mark.parametrize(
        "name",
        [
            *("z_image", "z_image_turbo", "sd3_medium", "sd35_medium", "sd35_large"),
            *("flux_dev", "flux_schnell", "flux2_klein_4b", "lumina2"),
        ],
    )
    def test_are_sampled_as_the_published_model_of_their_transformer(
        self, tmp_path: Path, composer: Composers, name: str
    ) -> None:
        """Whatever they are called; Z-Image's two are known by their shift."""
        folder = shutil.copytree(ARCHITECTURES / name, tmp_path / "mine")
        assert twin_of_folder(folder) == name
        assert sampled(folder) == published(composer, name)

    def test_of_the_packaged_transformer_are_sampled_as_that(
        self, tmp_path: Path, composer: Composers
    ) -> None:
        """It has no embedded scale, as FLUX.1 [schnell], which takes four steps."""
        folder = tmp_path / "mine"
        for part in ("transformer", "scheduler", "vae"):
            (folder / part).mkdir(parents=True)
            for file in (PACKAGED / "emoji_dit" / part).glob("*.json"):
                shutil.copy(file, folder / part)
        shutil.copy(PACKAGED / "emoji_dit" / "model_index.json", folder)
        assert sampled(folder) == published(composer, "emoji_dit")
        deeper = shutil.copytree(folder, tmp_path / "deeper")
        change(deeper / "transformer" / "config.json", num_layers=3)
        assert twin_of_folder(deeper) is None
        assert sampled(deeper)["steps"] == 28

    def test_of_the_packaged_unet_are_sampled_as_that(
        self, tmp_path: Path, composer: Composers
    ) -> None:
        folder = shutil.copytree(PACKAGED / "emoji", tmp_path / "mine")
        assert sampled(folder) == published(composer, "emoji")
        other = shutil.copytree(folder, tmp_path / "other")
        change(other / "unet" / "config.json", cross_attention_dim=96)
        assert sampled(other)["guidance_scale"] == 7.5

    def test_of_a_distilled_twin_are_known_by_their_name(
        self, tmp_path: Path, composer: Composers
    ) -> None:
        folder = shutil.copytree(ARCHITECTURES / "sd35_large", tmp_path / "sd35-turbo")
        assert sampled(folder) == published(composer, "sd35_large_turbo")
        other = shutil.copytree(folder, tmp_path / "mine")
        change(other / "transformer" / "config.json", _name_or_path="a/SD-3.5-Turbo")
        assert sampled(other) == published(composer, "sd35_large_turbo")

    def test_that_may_be_of_either_twin_are_told(
        self, tmp_path: Path, variant: Compose
    ) -> None:
        usual = variant("workload.steps=4", "workload.guidance_scale=1")
        for name, told in (("mine", True), ("sd35-large-mine", False)):
            folder = shutil.copytree(ARCHITECTURES / "sd35_large", tmp_path / name)
            model = Model("folder", "path", path=str(folder))
            remarks = remarks_on_model(replace(usual, model=model))
            assert ["model=sd35_large_turbo" in line for line in remarks] == [
                True
            ] * told

    @pytest.mark.parametrize(
        ("name", "vae", "told"),
        [
            *(("pixart_sigma", "sd15", True), ("sd35_medium", "flux_dev", True)),
            *(("z_image", "sd3_medium", True), ("sdxl", "sd15", True)),
            *(("lumina2", "flux_dev", False), ("pixart_sigma", "sdxl", False)),
            *(("sana_600m", "sana_600m", False), ("flux2_dev", "flux2_dev", False)),
        ],
    )
    def test_with_the_vae_of_another_family_are_told(
        self, tmp_path: Path, variant: Compose, name: str, vae: str, told: bool
    ) -> None:
        """Both have the same tensors: a folder does not say of which denoiser a VAE is."""
        folder = shutil.copytree(ARCHITECTURES / name, tmp_path / name)
        shutil.copytree(ARCHITECTURES / vae / "vae", folder / "vae", dirs_exist_ok=True)
        model = Model("folder", "path", path=str(folder))
        remarks = " ".join(remarks_on_model(replace(variant(), model=model)))
        assert ("vae/ scales its latents by" in remarks) == told

    @pytest.mark.parametrize(
        ("name", "told"), [("pixart_sigma", True), ("flux_dev", False)]
    )
    def test_whose_vae_may_be_of_two_families_are_told(
        self, tmp_path: Path, variant: Compose, name: str, told: bool
    ) -> None:
        """Of four channels, beside a base without weights: nothing tells it by, as the size does those of sixteen."""
        file = tmp_path / "a.safetensors"
        save_file({"a": torch.zeros(1)}, file)
        parts: dict[str, str | None] = {"vae": str(file)}
        base = str(shutil.copytree(ARCHITECTURES / name, tmp_path / name))
        model = Model("folder", "path", path=str(file), base=base, parts=parts)
        remarks = " ".join(remarks_on_model(replace(variant(), model=model)))
        assert ("nothing says whether it is of" in remarks) == told

    def test_of_another_shift_are_not_guessed(self, tmp_path: Path) -> None:
        folder = shutil.copytree(ARCHITECTURES / "z_image", tmp_path / "mine")
        scheduler = folder / "scheduler" / "scheduler_config.json"
        scheduler.write_text('{"shift": 2.0}')
        assert twin_of_folder(folder) is None

    def test_that_are_distilled_no_more_take_all_steps(
        self, tmp_path: Path, composer: Composers
    ) -> None:
        """Trained on to be guided, FLUX.1 [schnell] is sampled as [dev]; the base of klein says itself what it is."""
        schnell = shutil.copytree(ARCHITECTURES / "flux_schnell", tmp_path / "mine")
        change(
            schnell / "scheduler" / "scheduler_config.json", use_dynamic_shifting=True
        )
        assert sampled(schnell)["steps"] == 28
        klein = shutil.copytree(ARCHITECTURES / "flux2_klein_4b", tmp_path / "base")
        change(klein / "model_index.json", is_distilled=False)
        assert sampled(klein) == {
            "steps": 50,
            "guidance_scale": 4.0,
            "distilled": False,
        }

    def test_beside_the_name_of_another_size_are_told_their_own(
        self, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(ARCHITECTURES / "sd35_medium", tmp_path / "mine")
        named = Model("sd35_large", "path", path=str(folder))
        config = read_json(folder / "transformer" / "config.json")
        with pytest.raises(UsageError, match="choose model=sd35_medium"):
            _require_architecture(
                named, named.origin, "StableDiffusion3Pipeline", config
            )

    def test_of_klein_take_the_steps_that_they_were_distilled_to_or_all(self) -> None:
        folder = ARCHITECTURES / "flux2_klein_4b"
        assert settings_of_folder(folder)["steps"] == 4
        index = {"_class_name": "Flux2KleinPipeline", "is_distilled": False}
        base = settings_of(index, {}, {})
        assert (base["steps"], base["guidance_scale"]) == (50, 4.0)

    def test_of_an_embedded_scale_are_of_dev(self) -> None:
        dev = settings_of_folder(ARCHITECTURES / "flux_dev")
        assert (dev["steps"], dev["guidance_scale"]) == (28, 3.5)

    def test_in_a_hubs_cache_are_named_by_their_repository(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "models--Tongyi-MAI--Z-Image-Turbo" / "snapshots" / "a1b2c3"
        assert "Turbo" in name_of(Model(weights="path", path=str(path)))


class TestRemarks:
    def test_of_an_embedded_scale_are_on_steps_alone(self, variant: Compose) -> None:
        """FLUX.1 [dev] with a LoRA for few steps keeps its scale of 3.5."""
        chosen = ("model=flux_dev", "model.weights=random", "lora=hyper_flux")
        assert remarks_on_model(variant(*chosen, "workload.steps=8")) == []
        [remark] = remarks_on_model(variant(*chosen, "workload.steps=28"))
        assert "workload.steps=28" in remark
        assert "guidance" not in remark

    def test_of_a_title_count_as_those_of_a_name(
        self, tiny_folder: Compose, tmp_path: Path, variant_of: Tiny
    ) -> None:
        from tests.pipelines.tiny import tiny
        from tests.pipelines.web_files import original

        file = tmp_path / "mine.safetensors"
        tensors = original(tiny("sd3").transformer)
        save_file(tensors, file, {"modelspec.title": "SD 3.5 Turbo"})
        chosen = variant_of(file, f"model.base={tiny_folder('sd3')}")
        remark, of_vae = remarks_on_model(chosen)
        assert "the name SD 3.5 Turbo says" in remark
        assert "vae/ scales its latents by 0.3611" in of_vae  # as FLUX.1's

    def test_of_a_gguf_file_count_too(self, tmp_path: Path) -> None:
        pytest.importorskip("gguf")
        from tests.pipelines.web_files import gguf_file

        tensors = {"a": torch.zeros(2, 32)}
        gguf_file(tensors, tmp_path / "a.gguf", "Q8_0", title="FLUX.1 Kontext [dev]")
        gguf_file(tensors, tmp_path / "b.gguf", "Q8_0")
        assert titles_of(tmp_path / "a.gguf") == ["a", "FLUX.1 Kontext [dev]"]
        assert titles_of(tmp_path / "b.gguf") == ["b"]
        with pytest.raises(UsageError, match="its name says Kontext"):
            require_known_work(tmp_path / "a.gguf", "FluxPipeline", "flux_dev")
