"""What is recorded of the machine, and what the images' key takes of it."""

from dataclasses import replace

import pytest

from sdopt.hardware.device import Device
from sdopt.study.environment import describe_environment
from sdopt.study.image_cache import content_key
from sdopt.worker.draws import draw_of
from sdopt.worker.machine import Machine
from tests.conftest import Compose

MACHINE = Machine(Device("cuda", name="a card", attributes={"cudnn": 91002}), {}, preloaded=True, bad_fork=False)


def key(variant: Compose, machine: Machine) -> str:
    chosen = variant()
    return content_key(chosen, draw_of(chosen), {}, describe_environment(machine, []))


@pytest.mark.parametrize(("number", "version"), [(91002, "9.10.2"), (92200, "9.22.0"), (8907, "8.9.7")])
def test_cudnn_is_recorded_beside_the_packages(number: int, version: str) -> None:
    machine = replace(MACHINE, device=Device("cuda", attributes={"cudnn": number}))
    assert describe_environment(machine, []).packages["cudnn"] == version


def test_a_cpu_has_none() -> None:
    assert "cudnn" not in describe_environment(replace(MACHINE, device=Device("cpu")), []).packages


def test_settings_of_the_gpu_variables_and_warnings_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    found = describe_environment(replace(MACHINE, gpu={"compute_mode": "default"}, warnings=("slow",)), [])
    assert found.variables["NVIDIA_TF32_OVERRIDE"] == "0"
    assert found.gpu == {"compute_mode": "default"}
    assert found.warnings == ["slow"]


def test_images_of_another_cudnn_or_under_another_override_are_others(
    variant: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(variant, MACHINE)
    assert key(variant, replace(MACHINE, gpu={"power_limit_w": 300.0})) == before
    other = replace(MACHINE, device=replace(MACHINE.device, attributes={"cudnn": 91100}))
    assert key(variant, other) != before
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert key(variant, MACHINE) != before
