"""`model=PATH`: a user's own file or folder as an option of the group `model`, wherever options are chosen."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import initialize_config_dir
from safetensors.torch import save_file

from sdopt.config.command import CommandLine
from sdopt.config.composer import HydraComposer
from sdopt.config.models import _at_path, with_own_models
from sdopt.config.paths import CONF, options_of
from sdopt.errors import UsageError
from sdopt.pipelines.catalog import ARCHITECTURES, read_json
from sdopt.pipelines.families import family_of, predicts_noise, settings_of
from sdopt.pipelines.loading import load_pipeline
from sdopt.preparation import remarks_on_model
from sdopt.reference import MODEL, TRANSFORMER
from sdopt.schema import Model, Scheduler, Task
from sdopt.study.designs import credit
from tests.fixtures import Compose, Composers
from tests.pipelines.single_file import original_layout


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model in one file, as from the web; its name needs quotes in a shell and in Hydra's grammar."""
    path = tmp_path_factory.mktemp("my models") / "dream, v1 (pruned).safetensors"
    original_layout(
        load_pipeline(Model(), Scheduler(), Task(), "cpu", {"dtype": torch.float32}),
        path,
    )
    return path


def of(composer: Composers, *overrides: str) -> Model:
    return composer(overrides).current.model


def in_bfloat16(path: Path, base: str | None = None) -> bool:
    """Whether a model at a path begins in bfloat16, unless a user says otherwise."""
    chosen = _at_path(path, base).get("defaults", [])
    return {"override /precision": "bf16"} in chosen


class TestChoosing:
    def test_every_natural_attempt_means_the_same(
        self, composer: Composers, file: Path
    ) -> None:
        expected = Model(
            "emoji", "path", str(file), size=64, guidance_scale=4.5, threads=1
        )
        for attempt in (
            [f"model={file}"],
            [f"model.path={file}"],
            ["model=folder", f"model.path={file}"],
            ["model=emoji", f"model.path='{file}'"],
            ["model=emoji", "model.weights=path", f"model.path='{file}'"],
        ):
            assert of(composer, *attempt) == expected

    def test_a_folder(self, composer: Composers) -> None:
        found = of(composer, f"model={MODEL}")
        assert found == Model("folder", "path", str(MODEL), size=64, guidance_scale=4.5)
        assert of(composer, f"model={MODEL}", "model.size=128").size == 128

    @pytest.mark.parametrize(
        ("stored", "begins"), [(torch.bfloat16, True), (torch.float32, False)]
    )
    def test_a_folder_with_a_transformer_begins_in_the_type_of_its_weights(
        self, tmp_path: Path, stored: torch.dtype, begins: bool
    ) -> None:
        index = {"_class_name": "Lumina2Pipeline"}
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        (tmp_path / "transformer").mkdir()
        (tmp_path / "transformer" / "config.json").write_text('{"num_layers": 3}')
        file = tmp_path / "transformer" / "model.safetensors"
        save_file({"a.weight": torch.zeros(2, 2, dtype=stored)}, file)
        assert in_bfloat16(tmp_path) == begins
        assert in_bfloat16(file, str(tmp_path)) == begins

    def test_a_folder_of_a_published_model_begins_as_that_one(
        self, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(ARCHITECTURES / "lumina2", tmp_path / "mine")
        weights = {"a.weight": torch.zeros(2)}
        save_file(weights, folder / "transformer" / "model.safetensors")
        assert in_bfloat16(folder)
        assert not in_bfloat16(TRANSFORMER)
        assert not in_bfloat16(MODEL)

    def test_relative_paths_are_kept_whole_and_an_option_is_none(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(file.parent)
        assert CommandLine.of([f"model={file.name}"]).overrides == (f"model='{file}'",)
        (tmp_path / "sd15").mkdir()
        monkeypatch.chdir(tmp_path)
        assert with_own_models(["model=sd15"], options_of("model")) == ["model=sd15"]

    def test_beside_a_preset_in_a_variant_and_in_a_sweep(
        self, composer: Composers, file: Path
    ) -> None:
        assert of(
            composer, "experiment=lightning_sd15", f"model.path={file}"
        ).path == str(file)
        variant = composer(["study=explicit"]).variant(
            "mine", [f"model:{file}", "precision:bf16"]
        )
        assert variant.model.path == str(file)
        swept = CommandLine.of(["-m", f"model='{file}',emoji,{MODEL}"]).overrides
        assert swept == (f"model='{file}',emoji,'{MODEL}'",)

    def test_a_size_that_a_preset_does_not_find_is_said(self, variant: Compose) -> None:
        """The option of a folder has that of Stable Diffusion 1.x, whatever lies there."""
        by_name = variant(f"model={MODEL}")
        assert remarks_on_model(by_name) == []
        in_a_preset = replace(by_name, model=replace(by_name.model, size=512))
        [remark] = remarks_on_model(in_a_preset)
        assert remark.startswith(f"model.size=512: {MODEL} says 64")

    def test_what_is_not_there(self, composer: Composers) -> None:
        for place in ("gone.safetensors", "~nobody-here/mine.safetensors"):
            with pytest.raises(UsageError, match="there is no such file or folder"):
                composer([f"model={place}"])
        with pytest.raises(UsageError, match="model=gone: "):
            composer(["model=gone"])


class TestHub:
    def test_a_published_repository_is_its_option(self, composer: Composers) -> None:
        named, chosen = (
            of(composer, "model=stabilityai/stable-diffusion-xl-base-1.0"),
            of(composer, "model=sdxl"),
        )
        assert named == chosen

    def test_another_is_asked_for_its_size(
        self, composer: Composers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index = {"_class_name": "StableDiffusionXLPipeline"}
        vae = {"block_out_channels": [1, 2, 4, 4]}
        found: Any = (index, {"sample_size": 96}, vae, {})
        asked = []

        def configs(repository: str, revision: str | None) -> Any:
            asked.append((repository, revision))
            return found

        monkeypatch.setattr("sdopt.pipelines.hub.hub_configs", configs)
        whole = Model("folder", "hub", hub_id="me/mine", size=768, guidance_scale=5.0)
        assert of(composer, "model=me/mine") == whole
        assert of(composer, "model=me/mine", "model.revision=fp16") == replace(
            whole, revision="fp16"
        )
        assert {*asked} == {("me/mine", None), ("me/mine", "fp16")}

    def test_another_of_a_published_transformer_is_sampled_as_that(
        self, composer: Composers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = ARCHITECTURES / "z_image_turbo"
        parts = ("transformer/config", "vae/config", "scheduler/scheduler_config")
        found = [read_json(folder / f"{name}.json") for name in ("model_index", *parts)]
        monkeypatch.setattr("sdopt.pipelines.hub.hub_configs", lambda *_: found)
        model = of(composer, "model=me/turbo")
        assert (model.steps, model.guidance_scale, model.distilled) == (8, 0.0, True)


class TestFamilies:
    @pytest.mark.parametrize(
        ("tensors", "metadata", "noise"),
        [
            ({}, {}, None),
            ({"v_pred": 0}, {}, False),
            ({}, {"modelspec.prediction_type": "epsilon"}, True),
            ({}, {"modelspec.resolution": "512x512"}, True),
            ({}, {"modelspec.resolution": "768x768"}, False),
            ({"global_step": 875_000}, {}, True),
            ({"global_step": 140_000}, {}, False),
        ],
    )
    def test_of_stable_diffusion_2(
        self,
        tmp_path: Path,
        tensors: dict[str, int],
        metadata: dict[str, str],
        noise: bool | None,
    ) -> None:
        path = tmp_path / "two.safetensors"
        own = {
            "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(320, 4, 3, 3),
            "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": torch.zeros(
                320, 1024
            ),
        }
        save_file(
            own | {name: torch.tensor(value) for name, value in tensors.items()},
            path,
            metadata,
        )
        assert predicts_noise(path) is noise
        if noise is None:
            with pytest.raises(UsageError, match="model=sd21 or model=sd21_base"):
                family_of(path)
        else:
            assert family_of(path) == ("sd21_base" if noise else "sd21")

    def test_settings_are_read_from_a_pipeline_and_a_size_may_be_a_pair(self) -> None:
        assert settings_of({}, {}, {}) == {"size": 512, "guidance_scale": 7.5}
        sdxl = {"_class_name": "StableDiffusionXLPipeline"}
        for side in (None, 128):  # a tiny autoencoder names its channels otherwise
            assert (
                settings_of(
                    sdxl, {"sample_size": side}, {"_class_name": "AutoencoderTiny"}
                )["size"]
                == 1024
            )
        sizes: list[Any] = [96, [96, 96], (96, 64)]
        for size in sizes:
            assert (
                settings_of({}, {"sample_size": size}, {"block_out_channels": [1] * 4})[
                    "size"
                ]
                == 768
            )
        for version, size in (("0.8.1", 512), ("0.10.0", 256), (None, 256)):
            unet = {"sample_size": 32, "_diffusers_version": version}
            assert (
                settings_of({}, unet, {"block_out_channels": [1] * 4})["size"] == size
            ), "as diffusers draws it"


class TestLora:
    """The keys of a LoRA stay with another way to use it: no other file takes its place."""

    @pytest.fixture
    def chosen(self, tmp_path: Path) -> list[str]:
        return ["lora=loaded", f"lora.path='{tmp_path}'", "lora.scale=0.5"]

    @pytest.mark.parametrize("plain", [False, True])
    def test_in_a_variant_and_in_a_baseline(
        self, composer: Composers, chosen: list[str], plain: bool
    ) -> None:
        made = composer(chosen)
        for way in ("loaded", "fused"):
            lora: Any = made.variant("x", [f"lora={way}"], plain=plain).optimizations[
                "lora"
            ]
            assert (Path(lora.path), lora.scale) == (Path(chosen[1][11:-1]), 0.5)
            assert type(lora).__name__.lower() == way

    def test_also_if_a_preset_names_it(self, chosen: list[str], tmp_path: Path) -> None:
        """Else the baseline that is advised for a LoRA would have the packaged one."""
        folder = chosen[1][11:-1]
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text(
            "# @package _global_\ndefaults:\n  - override /lora: loaded\n"
            f"lora:\n  path: {folder}\n  scale: 0.5\n"
        )
        own = [f"hydra.searchpath=['file://{tmp_path}']"]
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            made = HydraComposer(
                ["experiment=mine", "study.baseline=[lora:fused]"], own
            )
            for variant in made.current.study.plan(made).variants:
                lora: Any = variant.optimizations["lora"]
                assert (lora.path, lora.scale) == (folder, 0.5)

    def test_keys_that_only_the_jobs_way_has_are_left_behind(
        self, composer: Composers, chosen: list[str]
    ) -> None:
        """A second LoRA, to which a hot-swapped one is exchanged, is none of a fused one."""
        swapped = ["lora=hotswap", chosen[1], f"lora.other='{chosen[1][11:-1]}/b'"]
        made = composer(swapped).variant("x", ["lora=fused"])
        lora: Any = made.optimizations["lora"]
        assert lora.path == chosen[1][11:-1]
        assert not [override for override in made.overrides if "other" in override]
        with pytest.raises(UsageError, match="otter"):
            composer([*swapped, "lora.otter=x"])

    @pytest.mark.parametrize("other", ["lcm_emoji", "lcm_sd15"])
    def test_an_option_with_a_file_of_its_own_is_another_lora(
        self, composer: Composers, chosen: list[str], other: str
    ) -> None:
        """Of a folder with a LoRA of the usual name, that one would be fused as the distilled one."""
        jobs = ([*chosen, "lora.weight_name=a"], [f"lora={other}", *chosen[1:]])
        of_style, of_distilled = map(composer, jobs)
        own: Any = composer([f"lora={other}"]).current.optimizations["lora"]
        made: Any = of_style.variant("x", [f"lora={other}"]).optimizations["lora"]
        assert made == own
        moved: Any = of_distilled.variant("x", [f"lora={other}"]).optimizations["lora"]
        assert moved.path == chosen[1][11:-1]

    def test_checkpoints_of_one_file_name_are_told_apart(
        self, composer: Composers
    ) -> None:
        """As trainers save them: what the two differ in would be nothing."""
        name = "pytorch_lora_weights.safetensors"
        made = composer(["lora=loaded", f"lora.path=/runs/500/{name}"])
        later = made.variant("later", [f"lora.path=/runs/1000/{name}"])
        assert credit(later, made.variant("first")) == f"lora=loaded(path=1000/{name})"

    def test_not_without_one(self, composer: Composers, chosen: list[str]) -> None:
        assert composer(chosen).variant("x", ["lora=none"]).choices["lora"] == "none"
