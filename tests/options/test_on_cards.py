"""What a card, its libraries and its compiler cannot do is a conflict; what ran there is told by its exact names."""

import os
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.utils import cpp_extension

from sdopt.measure.trace import Trace
from sdopt.options.attention import backend_of
from sdopt.options.base import Finding
from sdopt.options.compiler import Inductor, aot, base
from sdopt.options.compiler.graphs import Tensors
from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import card


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("_scaled_dot_product_flash_attention", "flash"),
        ("_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("_scaled_dot_product_cudnn_attention", "cudnn"),
        ("_scaled_dot_product_efficient_attention", "mem_efficient"),
        ("_scaled_dot_product_attention_math", "math"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
            "cudnn",
        ),
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>",
            "flash",
        ),
        (
            "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>",
            "flash",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>",
            "flash",
        ),
        (
            "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
            "mem_efficient",
        ),
        ("_scaled_dot_product_fused_attention_overrideable", None),
        ("triton_poi_fused_add_0", None),
    ],
)
def test_back_ends_are_told_apart_by_exact_names(
    name: str, backend: str | None
) -> None:
    assert backend_of(name) == backend


def test_a_package_serves_every_card_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's properties of a card include its UUID."""

    def digest(**others: Any) -> str:
        known = {
            "name": "a GPU",
            "major": 9,
            "minor": 0,
            "multi_processor_count": 132,
            "uuid": "one",
        } | others
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**known)
        )
        with FakeTensorMode():
            given = torch.empty(1, 3, device="cuda:0")
        return aot.digest(Tensors(torch.nn.Linear(3, 3), (given,), {}))

    assert digest() == digest(uuid="another")
    others: list[dict[str, Any]] = [
        {"name": "another GPU"},
        {"minor": 1},
        {"multi_processor_count": 66},
    ]
    assert len({digest(), *(digest(**other) for other in others)}) == 4


class TestToolchain:
    HERE = card(8, 0, cuda="13.0")

    @pytest.fixture(autouse=True)
    def complete(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A machine that has everything; each test takes something away."""
        (tmp_path / "Python.h").touch()
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr(base, "find_spec", lambda name: object())
        monkeypatch.setattr(
            shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None
        )
        monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))

    def test_each_part_that_is_missing_is_named(
        self, variant: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(base, "find_spec", lambda name: None)
        monkeypatch.setenv("CC", "no-such-cc")
        (tmp_path / "Python.h").unlink()
        triton, compiler, headers = variant("compiler=inductor").conflicts(self.HERE)
        assert triton.endswith("needs the package triton: pip install triton")
        assert "CC=no-such-cc is not one" in compiler
        assert (
            f"needs {tmp_path / 'Python.h'}: install it (Debian: apt-get install python3-dev)"
            in headers
        )
        monkeypatch.delenv("CXX", raising=False)
        [compiler] = variant("compiler=inductor").conflicts(CPU)
        assert "needs a C++ compiler" in compiler

    def test_in_a_folder_that_nothing_can_be_loaded_from(
        self, variant: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """As Docker's `--tmpfs` mounts it."""
        monkeypatch.setattr(
            os,
            "statvfs",
            lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID),
        )
        for here in (self.HERE, CPU):
            found = variant("compiler=inductor").conflicts(here)
            assert (
                "which is mounted noexec: choose another folder with TMPDIR=…"
                in found[-1]
            )
        assert variant("compiler=inductor").conflicts(card(8, 0)) == []
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        assert variant("compiler=inductor").conflicts(self.HERE) == []
        found = variant("compiler=aot").conflicts(CPU)
        assert "unpacks compiled code to /tmp, independent of TMPDIR" in found[-1]

    def test_of_products_by_sdnq(
        self, variant: Compose, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are Triton's, where it is installed."""
        monkeypatch.setattr(
            "sdopt.options.declarations.find_spec", lambda name: object()
        )
        monkeypatch.setattr(
            "sdopt.options.quantization.find_spec", lambda name: object()
        )
        assert variant("precision=int8_sdnq").conflicts(self.HERE) == []
        monkeypatch.setattr(shutil, "which", lambda name: None)
        [found] = variant("precision=int8_sdnq").conflicts(self.HERE)
        assert found.startswith("precision=int8_sdnq: SDNQ on CUDA needs a C compiler")
        assert (
            variant("precision=int8_sdnq", "precision.activations=false").conflicts(
                self.HERE
            )
            == []
        )
        monkeypatch.setattr("sdopt.options.quantization.find_spec", lambda name: None)
        assert variant("precision=int8_sdnq").conflicts(self.HERE) == []

    def test_of_packages(
        self, variant: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """They are C++, compiled against CUDA's own headers."""
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
        compiler, headers = variant("compiler=aot").conflicts(self.HERE)
        assert "AOTInductor on CUDA needs a C++ compiler" in compiler
        assert "AOTInductor on CUDA needs the headers of the CUDA toolkit" in headers
        (tmp_path / "include").mkdir()
        (tmp_path / "include" / "cuda_runtime.h").touch()
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        assert variant("compiler=aot").conflicts(self.HERE) == []


class TestGraphs:
    """`reduce-overhead` on a card: stand-ins for the compiler and the pipeline, and traces with and without replays."""

    def finding(
        self,
        monkeypatch: pytest.MonkeyPatch,
        launches: int,
        skips: int,
        device: str = "cuda",
        mode: Any = "",
        captures: int = 0,
    ) -> Finding:
        """Of a trace of two calls."""
        unet = torch.nn.Identity()
        pipe: Any = SimpleNamespace(unet=unet, device=torch.device(device))
        monkeypatch.setattr(torch, "compile", lambda module, **_: module)
        proof = Inductor(mode=mode or "reduce-overhead").apply(pipe)
        counters["stats"]["unique_graphs"] = 1
        counters["inductor"]["cudagraph_skips"] = skips
        trace = Trace()
        (
            trace.denoiser.calls,
            trace.denoiser.graph_launches,
            trace.denoiser.graph_captures,
        ) = 2, launches, captures
        trace.denoiser.operators["Torch-Compiled Region: 0/0"] = 2
        found = proof(trace)
        counters.clear()
        return found

    @pytest.mark.parametrize(
        ("launches", "skips", "captures", "engaged"),
        [
            *[
                (2, 0, 0, True),
                (5, 0, 0, True),
                (0, 0, 0, False),
                (1, 0, 0, False),
                (2, 1, 0, False),
            ],
            (
                2,
                0,
                2,
                False,
            ),  # as Inductor does, and counts it as no skip, where weights have moved since
        ],
    )
    def test_must_be_replayed_in_each_call_and_none_skipped_or_recorded_again(
        self,
        monkeypatch: pytest.MonkeyPatch,
        launches: int,
        skips: int,
        captures: int,
        engaged: bool,
    ) -> None:
        found = self.finding(monkeypatch, launches, skips, captures=captures)
        assert found.engaged == engaged
        assert f"{launches} CUDA graphs replayed, {skips} skipped" in found.summary
        assert (f"{captures} recorded again" in found.summary) == bool(captures)

    @pytest.mark.parametrize(
        ("device", "mode"), [("cpu", "reduce-overhead"), ("cuda", "default")]
    )
    def test_are_not_asked_for_elsewhere(
        self, monkeypatch: pytest.MonkeyPatch, device: str, mode: str
    ) -> None:
        assert self.finding(monkeypatch, 0, 1, device, mode).engaged

    @pytest.mark.parametrize(
        ("mode", "big", "said"),
        [("max-autotune", False, True), ("max-autotune", True, False)],
    )
    def test_what_inductor_leaves_out_on_a_small_card_is_said(
        self, monkeypatch: pytest.MonkeyPatch, mode: str, big: bool, said: bool
    ) -> None:
        monkeypatch.setattr("torch._inductor.utils.is_big_gpu", lambda device: big)
        found = self.finding(monkeypatch, 2, 0, mode=mode)
        assert found.engaged
        assert ("tried no Triton templates for products" in found.summary) == said


def test_convolutions_that_are_still_rounded_refute_tf32(
    session: Load, variant: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are in full in any case: `fp32_ieee` changes convolutions alone."""
    from sdopt.options import precision

    loaded = session("precision=fp32_ieee")
    [found] = [item for item in loaded.prove().evidence if item.axis == "precision"]
    assert found.engaged
    assert found.summary.endswith("float32 products in full, convolutions in full")
    monkeypatch.setattr(precision, "convolutions_are_rounded", lambda device: True)
    [found] = [item for item in loaded.prove().evidence if item.axis == "precision"]
    assert not found.engaged
    assert found.summary.endswith("convolutions rounded to TF32")
