"""What is recorded of the machine, and what the images' key takes of it."""

import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from sdopt.hardware.device import Device
from sdopt.scratch import CACHES
from sdopt.study import environment
from sdopt.study.environment import _PACKAGES, describe_environment
from sdopt.study.image_cache import content_key
from sdopt.worker.draws import draw_of
from sdopt.worker.machine import Machine
from tests.fixtures import Compose
from tests.test_architecture import ROOT, imports_of

MACHINE = Machine(Device("cuda", name="a card", attributes={"cudnn": 91002}), {}, preloaded=True, bad_fork=False)


def key(variant: Compose, machine: Machine) -> str:
    chosen = variant()
    return content_key(chosen, draw_of(chosen), {}, describe_environment(machine, []))


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


def test_images_of_another_version_of_an_options_package_are_others(
    variant: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(variant, MACHINE)
    monkeypatch.setattr(environment, "version", lambda name: "0" if name == "sdnq" else version(name))
    assert key(variant, MACHINE) != before


def test_images_of_another_cudnn_or_under_another_override_are_others(
    variant: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(variant, MACHINE)
    assert key(variant, replace(MACHINE, gpu={"power_limit_w": 300.0})) == before
    other = replace(MACHINE, device=replace(MACHINE.device, attributes={"cudnn": 91100}))
    assert key(variant, other) != before
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert key(variant, MACHINE) != before


@pytest.mark.parametrize("name", CACHES)
def test_the_folder_of_a_cache_changes_no_image_and_is_said(
    name: str, variant: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for folder in ("/scratch/1", "/scratch/2"):
        monkeypatch.setenv(name, folder)
        found[folder] = key(variant, MACHINE)
        environment = describe_environment(MACHINE, [])
        assert environment.variables[name] == folder
        assert any(f"{name}={folder}" in warning for warning in environment.warnings)
    assert len({*found.values()}) == 1
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert key(variant, MACHINE) not in found.values()
