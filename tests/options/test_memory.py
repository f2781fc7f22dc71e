"""The options of the group `memory`, and weights that wait elsewhere: on a CPU on disk; a CPU stands in for a GPU."""

import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from PIL import Image

from sdopt.errors import UsageError
from sdopt.gate.calibration import Fit
from sdopt.gate.rule_context import RuleContext
from sdopt.measure.trace import Trace
from sdopt.options import Contract
from sdopt.pipelines.catalog import PACKAGED
from sdopt.pipelines.loading import load_pipeline
from sdopt.pipelines.parts import bytes_of
from sdopt.record.records import VariantResult
from sdopt.scratch import own_folder
from sdopt.worker.draws import draw_of, timed_draw
from sdopt.worker.host import PipelineHost
from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import card, evidence, latents, row_of
from tests.pipelines.test_hub import COMMIT, offline
from tests.pipelines.test_models import small_xl  # noqa: F401

BATCH = ("workload.batch_size=2", "workload.prompt_count=2")
LARGE = "workload.size=96"
"""The VAE of the packaged model has tiles of 64 pixels: 96 take two each way."""


def pixels(session: PipelineHost, folder: Path, batch: int = 0) -> np.ndarray:
    records = session.generate(batch, timed_draw(session._variant), folder).records
    return np.stack(
        [
            np.asarray(Image.open(folder / record.path), dtype=float)
            for record in records
        ]
    )


class TestTinyVae:
    def test_of_an_untrained_model_is_untrained(self, variant: Compose) -> None:
        sd15 = variant("memory=tiny_vae", "model=sd15", "model.weights=random")
        assert sd15.conflicts(CPU) == []
        [vae] = (
            sd15.optimizations["memory.tiny_vae"]
            .parts(sd15.model, torch.float16)
            .values()
        )
        assert isinstance(vae, AutoencoderTiny)
        assert vae.dtype == torch.float16
        assert (
            sum(parameter.numel() for parameter in vae.decoder.parameters())
            == 1_222_531
        )
        assert [path.name for path in sd15.files(fetch=False)] == ["config.json"]

    def test_of_a_published_model_comes_from_the_hub(
        self, variant: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offline(monkeypatch, tmp_path)
        chosen = variant("memory=tiny_vae", "model=sdxl", "model.weights=hub")
        assert chosen.conflicts(CPU) == []
        with pytest.raises(
            UsageError, match=r"hub_id=madebyollin/taesdxl: not complete in the"
        ):
            chosen.files(fetch=True)

    def test_from_the_hub_is_read_from_its_cache(
        self, variant: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repository = tmp_path / "models--somebody--tiny"
        snapshot = repository / "snapshots" / COMMIT
        shutil.copytree(PACKAGED / "tiny_autoencoder", snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        chosen = variant("memory=tiny_vae", "memory.tiny_vae.hub_id=somebody/tiny")
        assert chosen.conflicts(CPU) == []
        assert {path.parent for path in chosen.files(fetch=False)} == {snapshot}
        [vae] = (
            chosen.optimizations["memory.tiny_vae"]
            .parts(chosen.model, torch.float32)
            .values()
        )
        assert isinstance(vae, AutoencoderTiny)


class TestPrecomputedEmbeddings:
    @pytest.mark.slow
    def test_are_freed_and_files_of_weights_go_with_the_pipeline(
        self, session: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Groups of layers, and sums of weights before a LoRA was fused, keep no text encoder alive."""
        before = set(own_folder().glob("offload-*"))
        encoders: list[Any] = []

        def noted(*given: Any) -> Any:
            pipe = load_pipeline(*given)
            encoders.append(weakref.ref(pipe.text_encoder))
            return pipe

        monkeypatch.setattr("sdopt.assembly.load_pipeline", noted)
        hosts = [
            session("memory=[precomputed_embeddings]", "lora=fused"),
            session("memory=[precomputed_embeddings,group_offload]"),
        ]
        assert [encoder() for encoder in encoders] == [None, None]
        assert not hosts[1]._assembly.proofs["memory.group_offload"](Trace()).engaged, (
            "nothing was brought yet"
        )
        [folder] = set(own_folder().glob("offload-*")) - before
        assert len(list(folder.rglob("*.safetensors"))) > 100
        hosts.clear()
        gc.collect()
        assert not folder.exists()

    def test_draw_what_prompts_would(self, session: Load, tmp_path: Path) -> None:
        """Of each prompt its own, in batches that wrap around, with and without guidance."""
        batch = ("workload.batch_size=2", "workload.images_per_prompt=2")
        for guidance in ("1", "4"):
            given = (
                "workload.prompt_count=3",
                f"workload.guidance_scale={guidance}",
                *batch,
            )
            plain, embedded = (
                session(*given),
                session(*given, "memory=precomputed_embeddings"),
            )
            for number in range(timed_draw(plain._variant).calls):
                assert (
                    np.abs(
                        pixels(plain, tmp_path, number)
                        - pixels(embedded, tmp_path, number)
                    ).max()
                    <= 1
                )
        assert 0 < embedded.count_operations() < plain.count_operations()

    def test_of_the_quality_pass_are_there_too(
        self, variant: Compose, tmp_path: Path
    ) -> None:
        chosen = replace(
            variant("memory=precomputed_embeddings"), pictured=("a fox", "a boat")
        )
        loaded = PipelineHost(chosen, CPU)
        loaded.prepare()
        [record] = loaded.generate(1, draw_of(chosen), tmp_path).records
        assert record.prompt == "a boat" not in chosen.prompts


@pytest.mark.walk(1)
def test_of_sdxl_both_text_encoders_and_weights_of_the_same_names(
    session: Load,
    small_xl: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = ("model=folder", f"model.path={small_xl}", "model.size=64")
    plain, embedded, offloaded = (
        session(*model, f"memory=[{option}]")
        for option in ("", "precomputed_embeddings", "group_offload")
    )
    assert evidence(embedded, "precomputed_embeddings").engaged
    assert np.abs(pixels(plain, tmp_path) - pixels(embedded, tmp_path)).max() <= 1
    assert evidence(offloaded, "offload").engaged
    # Not bit for bit: with fewer vector instructions, the order of sums depends on where weights lie in memory.
    assert torch.allclose(
        latents(offloaded, tmp_path / "offloaded"),
        latents(plain, tmp_path / "plain"),
        atol=1e-5,
    )
    [moved] = [
        option
        for axis, option in offloaded._variant.optimizations.items()
        if axis.endswith("group_offload")
    ]
    assert moved.contract_on(CPU) is Contract.EQUIVALENT
    assert moved.contract_on(card()) is Contract.EXACT


def test_variants_are_judged_by_the_promise_in_which_they_differ(
    variant: Compose,
) -> None:
    baseline, slicing, tiling, both = (
        row_of(variant(f"memory=[{options}]", *BATCH, LARGE))
        for options in ("", "vae_slicing", "vae_tiling", "vae_slicing,vae_tiling")
    )

    def sides(candidate: VariantResult, reference: VariantResult) -> RuleContext:
        return RuleContext(
            candidate, reference, {}, Fit(), lambda *_: None, lambda _: None
        )

    assert sides(slicing, baseline).contract is Contract.EQUIVALENT
    assert sides(tiling, baseline).contract is Contract.LOSSY
    # Both sides are lossy: what is added promises more.
    assert sides(both, tiling).contract is Contract.EQUIVALENT
    assert sides(both, tiling).claimed == ["memory_ratio"]


OPTIONS = ("model_offload", "sequential_offload", "group_offload")


@pytest.fixture
def cpu_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate makes no parameter of a tensor that it moves to `cpu:0`, as diffusers calls the one device."""
    offload = accelerate.cpu_offload
    monkeypatch.setattr(
        accelerate,
        "cpu_offload",
        lambda network, _device, **given: offload(
            network, torch.device("cpu"), **given
        ),
    )


def test_a_quantized_weight_rests_where_its_own_tensors_are() -> None:
    """Diffusers moves those alone: what the weight says of itself stays as it was when it was last brought."""
    quantization = pytest.importorskip("torchao.quantization")
    network = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    quantization.quantize_(network, quantization.Int8WeightOnlyConfig(version=2))
    assert 64 * 32 <= bytes_of(network) < 2 * 64 * 32
    assert bytes_of(network, "cpu") == bytes_of(network)
    weight: Any = network[0].weight
    names, _ = weight.__tensor_flatten__()
    for name in names:
        setattr(weight, name, getattr(weight, name).to("meta"))
    assert weight.device.type == "cpu"
    assert bytes_of(network, "cpu") == 0


class TestSequential:
    @pytest.mark.parametrize(
        "others",
        [
            [
                "memory=[sequential_offload,layerwise_casting,precomputed_embeddings,tiny_vae]"
            ],
            [
                "precision=autocast_fp16",
                "attention=sliced",
                "grad_mode=inference_mode",
                "layout=channels_last",
            ],
        ],
    )
    @pytest.mark.walk(1)
    def test_brings_every_layer(
        self, session: Load, cpu_for_a_gpu: None, others: list[str]
    ) -> None:
        loaded = session("memory=sequential_offload", *others)
        for item in loaded.prove().evidence:
            assert item.engaged, item
        assert evidence(loaded, "offload").facts["resting_on_device_gib"] == 0

    def test_draws_the_same_until_it_is_taken_away(
        self, session: Load, cpu_for_a_gpu: None, tmp_path: Path
    ) -> None:
        loaded = session("memory=sequential_offload")
        assert torch.equal(
            latents(loaded, tmp_path / "offloaded"),
            latents(session(), tmp_path / "plain"),
        )
        loaded._pipe.remove_all_hooks()
        accelerate.hooks.remove_hook_from_module(loaded._pipe.vae, recurse=True)
        found = evidence(loaded, "offload")
        assert not found.engaged
        assert found.facts["resting_on_device_gib"] > 0


class TestModels:
    def test_whose_weights_are_quantized_are_moved_while_they_are_traced(
        self, session: Load
    ) -> None:
        """PyTorch swaps such weights for others, which nothing may refer to; on a CPU they move to where they are."""
        pytest.importorskip("torchao")
        loaded = session("memory=model_offload", "precision=int8_torchao")
        [precision] = [
            item for item in loaded.prove().evidence if item.axis == "precision"
        ]
        assert precision.engaged, precision

    def test_take_turns_and_draw_the_same(self, session: Load, tmp_path: Path) -> None:
        loaded = session("memory=model_offload")
        assert evidence(loaded, "offload").facts["hooked"] == 3
        assert torch.equal(
            latents(loaded, tmp_path / "offloaded"),
            latents(session(), tmp_path / "plain"),
        )

    def test_forget_text_encoders_that_were_freed(self, session: Load) -> None:
        loaded = session("memory=[model_offload,precomputed_embeddings]")
        assert {hook.model for hook in loaded._pipe._all_hooks} == {
            loaded._pipe.unet,
            loaded._pipe.vae,
        }


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
def test_on_cuda_weights_wait_on_the_host(
    session: Load, tmp_path: Path, option: str
) -> None:
    from sdopt.hardware.probe import probe_device

    device = probe_device("cuda")
    loaded = session(f"memory={option}", device=device)
    found = evidence(loaded, "offload")
    assert found.engaged, found
    offloaded = loaded.time_once(
        memory=True
    ).memory  # before there are the weights of another on the card
    plain = session(device=device)
    assert torch.equal(
        latents(loaded, tmp_path / "offloaded"), latents(plain, tmp_path / "plain")
    )
    resident = plain.time_once(memory=True).memory
    assert offloaded is not None
    assert resident is not None
    assert (
        0
        < (offloaded.cuda_peak_allocated_gib or 0)
        < (resident.cuda_peak_allocated_gib or 0)
    )
