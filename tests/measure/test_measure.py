"""Stages, traces, operation counts, memory, devices, and the figures that are made of them."""

from mmap import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from torch.utils.flop_counter import FlopCounterMode

from sdopt.errors import UsageError
from sdopt.hardware.probe import describe_cpu, probe_device
from sdopt.measure.memory import PeakMemory, resident_gib
from sdopt.measure.stages import observed
from sdopt.measure.trace import trace_call
from sdopt.record.records import Status, StudyResult
from sdopt.record.samples import GpuState
from sdopt.statistics.figures import flat_figures
from sdopt.worker.host import PipelineHost
from tests.fixtures import CPU, Compose, Load, operations_of
from tests.records import known, reconfigure, retime


def stages_of(session: PipelineHost, **changes: Any) -> list[str]:
    seen: list[str] = []
    with observed(
        session._pipe, seen.append, lambda stage, output: seen.append(f"end of {stage}")
    ):
        session._call(**changes)
    return seen


class TestStages:
    def test_are_entered_one_after_the_other_and_nothing_is_left_of_observing_them(
        self, session: Load
    ) -> None:
        def fail(_stage: str) -> None:
            raise ZeroDivisionError

        loaded = session()
        seen = stages_of(loaded, num_inference_steps=3)
        assert seen[1::2] == [f"end of {stage}" for stage in seen[::2]]
        assert {stage: seen.count(stage) for stage in seen[::2]} == {
            "text_encoder": 2,
            "denoiser": 3,
            "vae_decoder": 1,
        }
        with (
            pytest.raises(ZeroDivisionError),
            observed(loaded._pipe, fail, lambda stage, output: None),
        ):
            loaded._call()
        pipe = loaded._pipe
        for module in (pipe.unet, pipe.text_encoder, pipe.vae):
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        assert "decode" not in pipe.vae.__dict__
        assert (
            stages_of(session("workload.guidance_scale=1")).count("text_encoder") == 1
        )

    def test_an_optimizations_own_decode_is_put_back(self, session: Load) -> None:
        loaded = session("grad_mode=enabled")
        own = loaded._pipe.vae.__dict__["decode"]
        assert stages_of(loaded).count("vae_decoder") == 1
        assert loaded._pipe.vae.__dict__["decode"] is own


class TestTrace:
    def test_operators_are_sorted_by_stage(self, session: Load) -> None:
        loaded = session()
        trace = trace_call(
            loaded._pipe, lambda: loaded._call(num_inference_steps=2), cuda=False
        )
        assert {stage: seen.calls for stage, seen in trace.stages.items()} == {
            "text_encoder": 2,
            "vae_encoder": 0,
            "denoiser": 2,
            "vae_decoder": 1,
        }
        operators = {stage: seen.operators for stage, seen in trace.stages.items()}
        assert operators["text_encoder"]["aten::embedding"] > 0
        assert (
            operators["denoiser"]["aten::embedding"]
            == operators["vae_decoder"]["aten::embedding"]
            == 0
        )
        layers = len(loaded._pipe.unet.attn_processors)
        assert operators["denoiser"]["aten::scaled_dot_product_attention"] == 2 * layers
        convolutions = sum(
            isinstance(m, torch.nn.Conv2d) for m in loaded._pipe.unet.modules()
        )
        assert operators["denoiser"]["aten::conv2d"] == 2 * convolutions
        assert operators["text_encoder"]["aten::conv2d"] == 0
        assert operators["vae_decoder"]["aten::conv2d"] > 0
        assert not trace.kernels

    def test_types_and_modes_are_those_of_the_call(self, session: Load) -> None:
        loaded = session("precision=bf16")
        with torch.inference_mode():
            seen = trace_call(loaded._pipe, loaded._call, cuda=False).denoiser
        assert set(seen.product_dtypes) == {"bfloat16"}
        modes = (
            seen.inference_mode,
            seen.grad_enabled,
            seen.output_requires_grad,
            seen.autocast_dtype,
        )
        assert modes == (True, False, False, None)
        loaded = session()
        with torch.autocast("cpu", torch.float16):
            seen = trace_call(loaded._pipe, loaded._call, cuda=False).denoiser
        assert seen.autocast_dtype == "float16"
        assert seen.product_dtypes["float16"] > seen.product_dtypes["float32"]


class TestOperations:
    @pytest.mark.slow
    def test_scale_with_steps_guidance_and_size(
        self, session: Load, variant: Compose
    ) -> None:
        pipe = session()._pipe
        one = operations_of(pipe, variant("workload.steps=1"))
        ten = operations_of(
            pipe, variant("workload.steps=10", "workload.guidance_scale=1")
        )
        large = operations_of(pipe, variant("workload.steps=1", "workload.size=128"))
        assert one.pop("vae_encoder") == 0
        assert min(one.values()) > 0
        assert one["total"] == pytest.approx(sum(one.values()) - one["total"])
        assert ten["denoiser"] == pytest.approx(10 * one["denoiser"] / 2)
        assert ten["text_encoder"] == pytest.approx(one["text_encoder"] / 2)
        assert ten["vae_decoder"] == one["vae_decoder"]
        assert large["vae_decoder"] > 4 * one["vae_decoder"]
        assert large["denoiser"] > 4 * one["denoiser"] * 0.9

    def test_do_not_depend_on_type_batch_or_optimizations_and_leave_the_pipeline_alone(
        self, session: Load
    ) -> None:
        loaded = session()
        modules = [loaded._pipe.unet, loaded._pipe.vae, loaded._pipe.text_encoder]
        expected = loaded.count_operations()
        assert [
            loaded._pipe.unet,
            loaded._pipe.vae,
            loaded._pipe.text_encoder,
        ] == modules
        assert all(
            p.device.type == "cpu" for module in modules for p in module.parameters()
        )
        others = session(
            "precision=bf16",
            "workload.batch_size=4",
            "attention=sliced",
            "layout=channels_last",
        )
        assert others.count_operations() == expected

    def test_are_those_of_the_calls_that_really_run(self, session: Load) -> None:
        """With attention as two matrix products, which are counted on a CPU as well; PNDM calls once more."""
        loaded = session("scheduler=plms", "workload.steps=4")
        calls = stages_of(loaded).count("denoiser")
        loaded._pipe.unet.set_attn_processor(AttnProcessor())
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            loaded._pipe.unet(
                torch.randn(2, 8, 4, 4), torch.tensor(1), torch.randn(2, 24, 144)
            )
        counted = operations_of(loaded._pipe, loaded._variant)
        assert calls == 4 + 1
        assert counted["denoiser"] == pytest.approx(
            calls * counter.get_total_flops() / 1e12
        )
        assert loaded.count_operations() == counted["total"]


def _mapped(mib: int) -> torch.Tensor:
    """Returns bytes that the kernel has just given: the heap of this process may have as much free from other tests."""
    return torch.frombuffer(mmap(-1, mib * 2**20), dtype=torch.uint8).fill_(1)


class TestMemory:
    def test_a_peak_that_is_gone_again_is_seen_once(self) -> None:
        memory = PeakMemory(CPU)

        def peak() -> float:
            return known(memory.read().process_peak_gib)

        memory.loaded()
        memory.watch()
        before = peak()
        block = _mapped(200)
        del block
        highest = peak()
        assert 0.19 < highest - before < 0.30
        memory.watch()
        assert peak() < highest - 0.15

    def test_what_is_loaded_counts_from_before(self) -> None:
        memory = PeakMemory(CPU)
        block = _mapped(100)
        memory.loaded()
        found = memory.read()
        assert 0.09 < found.process_loaded_gib < 0.2
        assert found.process_peak_gib is not None
        assert found.headline == (
            "peak_process_gib",
            found.process_peak_gib + found.children_peak_gib,
        )
        assert (found.cuda_peak_allocated_gib, found.nvml_process_gib) == (None, None)
        assert resident_gib() > block.nbytes / 2**30


class TestDevice:
    @pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:x", "cuda:-1", "", "CPU"])
    def test_a_name_that_is_none(self, name: str) -> None:
        with pytest.raises(
            UsageError, match=r"hardware\.device=.*choose auto, cpu, cuda or cuda:N"
        ):
            probe_device(name)

    def test_the_cpu(self) -> None:
        device = probe_device("cpu")
        assert (device.type, device.torch_name, device.is_cuda) == ("cpu", "cpu", False)
        assert device.name
        assert 0 < device.memory_free_gib <= device.memory_total_gib
        assert describe_cpu()["cores"] >= 1


class TestAroundACall:
    """What a worker reads of a card beside the time of a call; the card is a stand-in."""

    class Card:
        def __init__(self, per_call_j: float) -> None:
            self.per_call_j, self.joules = per_call_j, 1000.0

        def throttled_ns(self) -> dict[str, int]:
            return {"temperature": 5}

        def state(self, before: dict[str, int], seconds: float) -> GpuState:
            assert before == {"temperature": 5}
            return GpuState(
                sm_clock_mhz=round(1000 * seconds), throttled=["temperature"]
            )

        def energy_j(self) -> float:
            return self.joules

    def test_a_timed_call_comes_with_the_state_of_the_card(self, session: Load) -> None:
        loaded = session()
        assert loaded.time_once().gpu is None
        loaded._monitor = self.Card(2.0)  # type: ignore[assignment]
        call = loaded.time_once()
        assert call.gpu == GpuState(
            sm_clock_mhz=round(1000 * call.seconds), throttled=["temperature"]
        )

    def test_energy_is_the_mean_of_calls_over_some_seconds(
        self, session: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded, card, now = session(), self.Card(2.0), 0.0
        assert loaded.measure_energy(5.0) is None

        def call() -> SimpleNamespace:
            nonlocal now
            now += 0.3
            card.joules += card.per_call_j
            return SimpleNamespace(images=[])

        monkeypatch.setattr(loaded, "_monitor", card)
        monkeypatch.setattr(loaded, "_call", call)
        monkeypatch.setattr("sdopt.worker.host.time.perf_counter", lambda: now)
        assert loaded.measure_energy(5.0) == pytest.approx(2.0)
        assert now >= 5.0


def test_cost_where_there_is_a_price_and_nothing_of_half_a_measurement(
    result: StudyResult,
) -> None:
    row = result.variant("baseline")
    reconfigure(row, "hardware", price_per_hour=3.6)
    for measurement in row.measurements:
        retime(measurement.shapes[0], [2.0])
    assert flat_figures(result, row)["cost/per_1000_images"] == pytest.approx(2.0)
    row.status = Status.FAILED
    assert flat_figures(result, row) == {}
