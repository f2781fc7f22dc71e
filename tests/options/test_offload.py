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

from sdopt.measure.trace import Trace
from sdopt.options.offload import GroupOffload, _size
from sdopt.reference import MODEL
from sdopt.scratch import own_folder
from sdopt.worker.draws import timed_draw
from sdopt.worker.host import PipelineHost
from tests.fixtures import Load
from tests.options.hosts import evidence
from tests.pipelines.test_models import small_xl  # noqa: F401

OPTIONS = ("model_offload", "sequential_offload", "group_offload")


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
        found = evidence(loaded, "offload")
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
        assert evidence(loaded, "offload").engaged

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
        assert evidence(loaded, "offload").engaged
        assert np.array_equal(image(loaded, tmp_path / "offloaded"), image(session(*model), tmp_path / "plain"))

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
        assert evidence(loaded, "offload").facts["resting_on_device_gib"] == 0

    def test_draws_the_same(self, session: Load, cpu_for_a_gpu: None, tmp_path: Path) -> None:
        drawn = image(session("memory=sequential_offload"), tmp_path / "offloaded")
        assert np.array_equal(drawn, image(session(), tmp_path / "plain"))

    def test_that_was_taken_away(self, session: Load, cpu_for_a_gpu: None) -> None:
        loaded = session("memory=sequential_offload")
        loaded._pipe.remove_all_hooks()
        accelerate.hooks.remove_hook_from_module(loaded._pipe.vae, recurse=True)
        found = evidence(loaded, "offload")
        assert not found.engaged
        assert found.facts["resting_on_device_gib"] > 0


class TestModels:
    def test_take_turns_and_draw_the_same(self, session: Load, tmp_path: Path) -> None:
        loaded = session("memory=model_offload")
        assert evidence(loaded, "offload").facts["hooked"] == 3
        assert np.array_equal(image(loaded, tmp_path / "offloaded"), image(session(), tmp_path / "plain"))

    def test_whose_weights_are_quantized_are_moved_while_they_are_traced(self, session: Load) -> None:
        """PyTorch swaps such weights for others, which nothing may refer to; on a CPU they move to where they are."""
        pytest.importorskip("torchao")
        loaded = session("memory=model_offload", "precision=int8_torchao")
        [precision] = [item for item in loaded.prove().evidence if item.axis == "precision"]
        assert precision.engaged, precision

    def test_forget_text_encoders_that_were_freed(self, session: Load) -> None:
        loaded = session("memory=[model_offload,precomputed_embeddings]")
        assert {hook.model for hook in loaded._pipe._all_hooks} == {loaded._pipe.unet, loaded._pipe.vae}


@pytest.mark.gpu
class TestOnCuda:
    @pytest.mark.parametrize("option", OPTIONS)
    def test_weights_wait_on_the_host(self, session: Load, tmp_path: Path, option: str) -> None:
        from sdopt.hardware.probe import probe_device

        device = probe_device("cuda")
        loaded = session(f"memory={option}", device=device)
        found = evidence(loaded, "offload")
        assert found.engaged, found
        offloaded = loaded.time_once(memory=True).memory  # before there are the weights of another on the card
        plain = session(device=device)
        assert np.array_equal(image(loaded, tmp_path / "offloaded"), image(plain, tmp_path / "plain"))
        resident = plain.time_once(memory=True).memory
        assert offloaded is not None
        assert resident is not None
        assert 0 < (offloaded.cuda_peak_allocated_gib or 0) < (resident.cuda_peak_allocated_gib or 0)
