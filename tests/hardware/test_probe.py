"""Cards that cannot be used: a driver that is too old, a build without their kernels, a build without CUDA."""

import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdopt.errors import UsageError
from sdopt.hardware import probe
from sdopt.hardware.probe import list_cards, probe_device
from tests.fixtures import CPU
from tests.hardware.stubs import Nvml

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


def one_card(monkeypatch: pytest.MonkeyPatch, properties: object) -> None:
    """A card that NVML counts, as with PYTORCH_NVML_BASED_CUDA_CHECK; its properties, or the error on asking."""

    def asked(index: int) -> object:
        if isinstance(properties, Exception):
            raise properties
        return properties

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)


@pytest.mark.parametrize("error", [RuntimeError(TOO_OLD), AssertionError("libcudart functions unavailable")])
class TestCudaThatDoesNotStart:
    def test_is_a_mistake_with_a_way_out(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        one_card(monkeypatch, error)
        with pytest.raises(UsageError) as caught:
            probe_device("cuda:0")
        [problem] = caught.value.problems
        assert problem.startswith(f"hardware.device=cuda:0: CUDA does not start: {str(error)[:40]}")
        assert "update the driver, or install PyTorch for an older CUDA" in problem

    def test_leaves_auto_the_cpu_and_a_warning(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        one_card(monkeypatch, error)
        found = probe_device("auto")
        assert (found.type, found.name) == ("cpu", CPU.name)
        assert found.warning.startswith("hardware.device=auto: CUDA does not start: ")
        assert found.warning.endswith("this runs on the CPU instead")

    def test_is_listed_all_the_same(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        one_card(monkeypatch, error)
        [card] = list_cards()
        assert card.name.startswith("a card that cannot be used: CUDA does not start: ")
        assert card.capability is None


def test_cuda_that_lacks_addresses_is_no_matter_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says "out of memory" then, with a card that is empty."""
    one_card(monkeypatch, RuntimeError("CUDA driver error: out of memory"))
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (2**34, 2**34))
    warning = probe_device("auto").warning
    assert "out of memory; address space is limited to 16384 MiB, but CUDA reserves more" in warning
    assert "raise the limit (ulimit -v unlimited); this runs on the CPU instead" in warning
    assert "update the driver" not in warning


def test_a_card_without_kernels_leaves_auto_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    one_card(monkeypatch, SimpleNamespace(name="Tesla P100", major=6, minor=0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    assert "has kernels for sm_75, sm_90, and Tesla P100 has compute capability 6.0" in probe_device("auto").warning
    with pytest.raises(UsageError, match=r"hardware\.device=cuda: this PyTorch .* a newer CUDA"):
        probe_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("hidden", "cards", "warned"), [(False, 1, True), (True, 1, False), (False, 0, False)])
def test_a_card_that_pytorch_has_no_cuda_for_is_named(
    monkeypatch: pytest.MonkeyPatch, hidden: bool, cards: int, warned: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(DeviceGetCount=cards, Count=cards))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ("install PyTorch for CUDA" in probe_device("auto").warning) == warned


def test_what_cudnn_takes_is_asked_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest head differs by card, cuDNN and PyTorch."""
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    for largest, found in ((256, 256), (192, 160), (128, 128), (64, 0)):
        monkeypatch.setattr(
            torch.backends.cuda,
            "can_use_cudnn_attention",
            lambda params, largest=largest: params.query.shape[-1] <= largest,
        )
        assert probe._largest_cudnn_head(0) == found


@pytest.mark.parametrize(("source", "found"), [("_built_with_cuda = False", False), ("_built_with_cuda = True", True)])
def test_an_xformers_for_another_cuda_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, found: bool
) -> None:
    """It can be imported, and refuses every call."""
    for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "xformers" / "ops" / "fmha"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent, folder.parent.parent):
        (each / "__init__.py").touch()
    (folder / "common.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert probe._xformers_has_kernels() is found
    (folder / "common.py").write_text("raise OSError('no such symbol')")
    for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    assert probe._xformers_has_kernels() is False
