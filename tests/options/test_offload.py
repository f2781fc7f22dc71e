"""Weights that wait elsewhere: on a CPU they wait on disk; what moves them to a GPU runs here with a CPU for one."""

import gc
import weakref
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry

from sdopt.hardware.device import Device
from sdopt.measure.trace import Trace
from sdopt.options.offload import GroupOffload, _size
from sdopt.pipelines.parts import hook_of
from sdopt.record.samples import Evidence
from sdopt.reference import MODEL
from sdopt.scratch import own_folder
from sdopt.worker.draws import timed_draw
from sdopt.worker.host import PipelineHost
from tests.fixtures import CPU, Compose, Load
from tests.pipelines.test_models import small_xl  # noqa: F401

GPU = Device("cuda", name="a GPU", capability=(8, 0), memory_total_gib=80.0, memory_free_gib=80.0)
OPTIONS = ("model_offload", "sequential_offload", "group_offload")


def pipeline(session: PipelineHost) -> DiffusionPipeline:
    return session._pipe


def evidence(session: PipelineHost) -> Evidence:
    [found] = [item for item in session.prove().evidence if item.axis.endswith("offload")]
    return found


def image(session: PipelineHost, folder: Path) -> np.ndarray:
    session.generate(0, timed_draw(session._variant), folder)
    from safetensors.torch import load_file

    found: np.ndarray = load_file(folder / "latents.safetensors")["latents"].numpy()
    return found


@pytest.fixture
def cpu_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate makes no parameter of a tensor that it moves to `cpu:0`, as diffusers calls the one device."""
    offload = accelerate.cpu_offload
    monkeypatch.setattr(
        accelerate, "cpu_offload", lambda network, _device, **given: offload(network, torch.device("cpu"), **given)
    )


class TestConflicts:
    @pytest.mark.parametrize("option", ["model_offload", "sequential_offload"])
    def test_the_hosts_memory_is_the_devices(self, variant: Compose, option: str) -> None:
        [found] = variant(f"memory={option}").conflicts(CPU)
        assert f"memory={option}: offloading to host memory needs a CUDA device" in found
        assert found.endswith("memory=group_offload moves them to disk")
        assert variant(f"memory={option}").conflicts(GPU) == []

    def test_groups_wait_on_disk_for_a_cpu(self, variant: Compose) -> None:
        assert variant("memory=group_offload").conflicts(CPU) == []
        assert variant("memory=group_offload").conflicts(GPU) == []
        [found] = variant("memory=group_offload", "memory.group_offload.wait_in=memory").conflicts(CPU)
        assert found.endswith("choose wait_in=disk")
        [found] = variant("memory=group_offload", "memory.group_offload.use_stream=true").conflicts(CPU)
        assert found.endswith("use_stream=true: needs a CUDA device")

    def test_one_way_at_a_time(self, variant: Compose) -> None:
        found = variant("memory=[model_offload,group_offload]").conflicts(GPU)
        assert found == [
            "memory=model_offload: offloads the same weights as memory.group_offload: choose one of them",
            "memory=group_offload: offloads the same weights as memory.model_offload: choose one of them",
        ]

    @pytest.mark.parametrize("option", OPTIONS)
    def test_nothing_is_compiled_around_the_hooks(
        self, variant: Compose, option: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [found] = variant(f"memory={option}", "compiler=inductor").conflicts(GPU)
        assert found.endswith("its hooks would move weights inside compiled code: choose compiler=eager")

    def test_streams_follow_an_order_that_tiles_change(self, variant: Compose) -> None:
        options = ("memory=[group_offload,vae_tiling]", "workload.size=96")
        [found] = variant(*options).conflicts(GPU)
        assert found.endswith("set memory.group_offload.use_stream=false")
        assert variant(*options, "memory.group_offload.use_stream=false").conflicts(GPU) == []
        assert variant(*options).conflicts(CPU) == []

    def test_streams_wait_for_nothing_in_a_list_of_blocks(self, variant: Compose) -> None:
        options = ("memory=[group_offload,tiny_vae]", "memory.group_offload.offload_type=block_level")
        [found] = variant(*options).conflicts(GPU)
        assert found.endswith("set memory.group_offload.use_stream=false")
        assert variant(*options, "memory.group_offload.use_stream=false").conflicts(GPU) == []
        assert variant(options[0]).conflicts(GPU) == []

    def test_a_number_of_blocks_that_diffusers_would_not_heed(self, variant: Compose) -> None:
        options = ("memory=group_offload", "memory.group_offload.num_blocks_per_group=2")
        block_level = (*options, "memory.group_offload.offload_type=block_level")
        for chosen in (options, block_level):
            [found] = variant(*chosen).conflicts(GPU)
            assert found.endswith("need offload_type=block_level and use_stream=false")
        assert variant(*block_level, "memory.group_offload.use_stream=false").conflicts(GPU) == []
        assert variant(*block_level).conflicts(CPU) == []

    def test_autocast_keeps_what_is_brought(self, variant: Compose) -> None:
        [found] = variant("memory=sequential_offload", "precision=autocast_fp16").conflicts(GPU)
        assert "autocast would keep a copy of a layer each time" in found
        assert variant("memory=model_offload", "precision=autocast_fp16").conflicts(GPU) == []
        assert variant("memory=sequential_offload", "precision=fp16_autocast").conflicts(GPU) == []
        without = ("memory=sequential_offload", "precision=autocast_fp16", "grad_mode=inference_mode")
        assert variant(*without).conflicts(GPU) == []

    @pytest.mark.parametrize("caching", ["deepcache", "first_block", "pyramid_attention"])
    def test_streams_follow_an_order_in_which_no_layer_is_passed_over(self, variant: Compose, caching: str) -> None:
        options = ("memory=group_offload", f"caching={caching}", "workload.steps=10")
        [found] = variant(*options).conflicts(GPU)
        assert found.endswith("changes with caching: set memory.group_offload.use_stream=false")
        assert variant(*options, "memory.group_offload.use_stream=false").conflicts(GPU) == []
        assert variant("memory=group_offload", "caching=guidance_interval").conflicts(GPU) == []

    def test_what_safetensors_cannot_store(self, variant: Compose) -> None:
        [found] = variant("memory=group_offload", "layout=channels_last").conflicts(CPU)
        assert found.endswith("safetensors stores only contiguous weights: choose layout=contiguous")
        assert variant("memory=group_offload", "layout=channels_last").conflicts(GPU) == []
        found = "; ".join(variant("memory=group_offload", "precision=int8_torchao").conflicts(CPU))
        assert "memory=group_offload: safetensors cannot store TorchAO's quantized weights" in found

    @pytest.mark.parametrize(
        ("precision", "fits"), [("fp16", False), ("fp16_vae_fp32", True), ("fp16_vae_fix", True), ("bf16", True)]
    )
    def test_a_vae_that_diffusers_casts_in_each_call(self, variant: Compose, precision: str, fits: bool) -> None:
        model = ("model=sdxl", "model.weights=random", f"precision={precision}")
        for option in ("sequential_offload", "group_offload"):
            found = variant(*model, f"memory={option}").conflicts(GPU)
            assert found == [] if fits else "choose precision=fp16_vae_fp32, fp16_vae_fix or bf16" in found[0]
        assert variant(*model, "memory=model_offload").conflicts(GPU) == []


def test_a_quantized_weight_rests_where_its_own_tensors_are() -> None:
    """Diffusers moves those alone: what the weight says of itself stays as it was when it was last brought."""
    quantization = pytest.importorskip("torchao.quantization")
    network = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    quantization.quantize_(network, quantization.Int8WeightOnlyConfig(version=2))
    assert 64 * 32 <= _size(network) < 2 * 64 * 32
    assert _size(network, "cpu") == _size(network)
    weight: Any = network[0].weight
    names, _ = weight.__tensor_flatten__()
    for name in names:
        setattr(weight, name, getattr(weight, name).to("meta"))
    assert weight.device.type == "cpu"
    assert _size(network, "cpu") == 0


class TestGroups:
    """From disk, on a CPU."""

    @pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
    def test_are_brought_from_disk_and_draw_the_same(self, session: Load, tmp_path: Path, kind: str) -> None:
        loaded = session("memory=group_offload", f"memory.group_offload.offload_type={kind}")
        found = evidence(loaded)
        assert found.engaged, found
        assert found.facts["brought"] > 10
        assert found.facts["on_disk_gib"] > 0.03
        assert np.array_equal(image(loaded, tmp_path / "offloaded"), image(session(), tmp_path / "plain"))

    def test_of_a_tiny_vae_are_brought_in_blocks(self, session: Load) -> None:
        """Hooks of diffusers would wait for a call of the VAE itself, of which a pipeline calls the decoder alone."""
        options = ("memory=[group_offload,tiny_vae]", "memory.group_offload.offload_type=block_level")
        loaded = session(*options)
        [found], [plain] = (each._call(output_type="np").images for each in (loaded, session("memory=tiny_vae")))
        assert np.array_equal(found, plain)
        assert evidence(loaded).engaged

    def test_let_a_text_encoder_go(self) -> None:
        pipe = DiffusionPipeline.from_pretrained(MODEL)
        layer = weakref.ref(next(m for m in pipe.text_encoder.modules() if isinstance(m, torch.nn.Linear)))
        proof = GroupOffload().apply(pipe)
        pipe.text_encoder = None
        gc.collect()
        assert layer() is None
        assert not proof(Trace()).engaged, "nothing was brought yet"

    def test_of_two_networks_with_the_same_names(self, session: Load, small_xl: Path, tmp_path: Path) -> None:  # noqa: F811
        model = ("model=folder", f"model.path={small_xl}", "workload.size=64")
        loaded = session(*model, "memory=group_offload")
        assert evidence(loaded).engaged
        assert np.array_equal(image(loaded, tmp_path / "offloaded"), image(session(*model), tmp_path / "plain"))

    def test_whose_hooks_were_taken_off(self, session: Load) -> None:
        loaded = session("memory=group_offload")
        vae = pipeline(loaded).vae
        registry = HookRegistry.check_if_exists_or_initialize(vae)
        for layer in vae.modules():
            if (hook := hook_of(layer, "group_offloading")) is not None:
                hook.group.onload_()
        registry.remove_hook("group_offloading", recurse=True)
        assert not evidence(loaded).engaged

    def test_files_go_with_the_pipeline(self, session: Load) -> None:
        before = set(own_folder().glob("offload-*"))
        loaded = session("memory=group_offload")
        [folder] = set(own_folder().glob("offload-*")) - before
        assert len(list(folder.rglob("*.safetensors"))) > 100
        del loaded
        gc.collect()
        assert not folder.exists()


class TestSequential:
    @pytest.mark.parametrize(
        "others",
        [
            ["memory=[sequential_offload,layerwise_casting,precomputed_embeddings,tiny_vae]"],
            ["precision=autocast_fp16", "attention=sliced", "grad_mode=inference_mode", "layout=channels_last"],
        ],
    )
    def test_brings_every_layer(self, session: Load, cpu_for_a_gpu: None, others: list[str]) -> None:
        loaded = session("memory=sequential_offload", *others)
        for item in loaded.prove().evidence:
            assert item.engaged, item
        assert evidence(loaded).facts["resting_on_device_gib"] == 0

    def test_draws_the_same(self, session: Load, cpu_for_a_gpu: None, tmp_path: Path) -> None:
        drawn = image(session("memory=sequential_offload"), tmp_path / "offloaded")
        assert np.array_equal(drawn, image(session(), tmp_path / "plain"))

    def test_that_was_taken_away(self, session: Load, cpu_for_a_gpu: None) -> None:
        loaded = session("memory=sequential_offload")
        pipeline(loaded).remove_all_hooks()
        accelerate.hooks.remove_hook_from_module(pipeline(loaded).vae, recurse=True)
        found = evidence(loaded)
        assert not found.engaged
        assert found.facts["resting_on_device_gib"] > 0


class TestModels:
    def test_take_turns_and_draw_the_same(self, session: Load, tmp_path: Path) -> None:
        loaded = session("memory=model_offload")
        assert evidence(loaded).facts["hooked"] == 3
        assert np.array_equal(image(loaded, tmp_path / "offloaded"), image(session(), tmp_path / "plain"))

    def test_whose_weights_are_quantized_are_moved_while_they_are_traced(self, session: Load) -> None:
        """PyTorch swaps such weights for others, which nothing may refer to; on a CPU they move to where they are."""
        pytest.importorskip("torchao")
        loaded = session("memory=model_offload", "precision=int8_torchao")
        [precision] = [item for item in loaded.prove().evidence if item.axis == "precision"]
        assert precision.engaged, precision

    def test_forget_text_encoders_that_were_freed(self, session: Load) -> None:
        loaded = session("memory=[model_offload,precomputed_embeddings]")
        assert {hook.model for hook in pipeline(loaded)._all_hooks} == {pipeline(loaded).unet, pipeline(loaded).vae}


@pytest.mark.gpu
class TestOnCuda:
    @pytest.mark.parametrize("option", OPTIONS)
    def test_weights_wait_on_the_host(self, session: Load, tmp_path: Path, option: str) -> None:
        from sdopt.hardware.probe import probe_device

        device = probe_device("cuda")
        loaded = session(f"memory={option}", device=device)
        found = evidence(loaded)
        assert found.engaged, found
        offloaded = loaded.time_once(memory=True).memory  # before there are the weights of another on the card
        plain = session(device=device)
        assert np.array_equal(image(loaded, tmp_path / "offloaded"), image(plain, tmp_path / "plain"))
        resident = plain.time_once(memory=True).memory
        assert offloaded is not None
        assert resident is not None
        assert 0 < (offloaded.cuda_peak_allocated_gib or 0) < (resident.cuda_peak_allocated_gib or 0)
