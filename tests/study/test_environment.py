"""What is recorded of the machine."""

import sys
from dataclasses import replace

import pytest

from sdopt.hardware.device import Device
from sdopt.scratch import CACHES
from sdopt.study.environment import _PACKAGES, describe_environment
from sdopt.worker.machine import Machine
from tests.test_architecture import ROOT, imports_of

MACHINE = Machine(Device("cuda", name="a card", attributes={"cudnn": 91002}), {}, preloaded=True, bad_fork=False)


@pytest.mark.parametrize(("number", "version"), [(91002, "9.10.2"), (92200, "9.22.0"), (8907, "8.9.7")])
def test_cudnn_is_recorded_beside_the_packages(number: int, version: str) -> None:
    machine = replace(MACHINE, device=Device("cuda", attributes={"cudnn": number}))
    assert describe_environment(machine, []).packages["cudnn"] == version


def test_every_package_that_an_option_imports_is_recorded() -> None:
    imported = {
        module.partition(".")[0].replace("_", "-")
        for path in (ROOT / "sdopt" / "options").rglob("*.py")
        for _, module in imports_of(path.relative_to(ROOT), path.read_text())
    }
    besides = {"sdopt", "typing-extensions", "huggingface-hub", "safetensors"}  # the last two only read files
    found = imported - {name.replace("_", "-") for name in sys.stdlib_module_names} - besides
    assert {"torch", "sdnq", "tomesd"} <= found
    assert found <= set(_PACKAGES)


@pytest.mark.parametrize("name", CACHES)
def test_the_folder_of_a_cache_is_recorded_and_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/scratch/1")
    environment = describe_environment(MACHINE, [])
    assert environment.variables[name] == "/scratch/1"
    assert any(f"{name}=/scratch/1" in warning for warning in environment.warnings)
