"""Collects the doctor's report: the machine, its measured peak rates, and which options run on it or what they need."""

import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from sdopt.about import __version__
from sdopt.apps.doctor.options import OptionReport
from sdopt.hardware.ceilings import Ceiling, measure_ceilings
from sdopt.hardware.device import Device
from sdopt.hardware.probe import probe_device
from sdopt.measure.interference import InterferenceMeter, disturbance_of
from sdopt.record.samples import Interference
from sdopt.schema import Sheet
from sdopt.worker.machine import Machine

_TOOLS = ("gcc", "g++", "clang++", "nvcc", "ninja", "nvidia-smi")

_BESIDES = ("triton", "torchao")  # reported although sdopt does not depend on them


@dataclass
class Diagnosis:
    """The findings of the doctor."""

    device: Device
    host: Device
    """The CPU, with the machine's memory."""
    cards: list[Device]
    planned: bool
    """Whether the device comes from a data sheet and is not in this machine."""
    start_method: str
    packages: dict[str, str]
    missing: dict[str, str]
    """Packages that are not installed, with the command that installs them."""
    tools: dict[str, str | None]
    disk_free_gib: dict[str, float]
    sheet: Sheet | None
    options: list[OptionReport]
    ceilings: list[Ceiling] = field(default_factory=list)
    interference: Interference | None = None
    """What other programs took while the ceilings were measured; None if nothing counted it."""
    python: str = platform.python_version()
    platform: str = platform.platform()
    sdopt: str = __version__

    @property
    def disturbance(self) -> str:
        """How other work lowered the ceilings, in words; "" if it took no more than it may from a timed call."""
        return disturbance_of(self.interference)


def observed_ceilings(device: Device) -> tuple[list[Ceiling], Interference | None]:
    """Measures the ceilings, and counts what other programs took meanwhile; the process must lead its group."""
    meter, begun = InterferenceMeter(os.getpid()), time.perf_counter()
    ceilings = measure_ceilings(device)
    return ceilings, meter.stop(time.perf_counter() - begun)


def diagnose(
    machine: Machine,
    cards: list[Device],
    planned: bool,
    options: list[OptionReport],
    ceilings: list[Ceiling],
    start_method: str,
    interference: Interference | None = None,
) -> Diagnosis:
    """Makes a diagnosis: adds the facts of the host to those of the device."""
    packages, missing = _packages()
    here, temporary = Path.cwd(), Path(tempfile.gettempdir())
    return Diagnosis(
        device=machine.device,
        host=probe_device("cpu"),
        cards=cards,
        planned=planned,
        start_method=start_method,
        packages=packages,
        missing=missing,
        tools={tool: _tool_version(tool) for tool in _TOOLS},
        disk_free_gib={
            str(folder): shutil.disk_usage(folder).free / 2**30
            for folder in (here, temporary)
        },
        sheet=machine.sheet,
        options=options,
        ceilings=ceilings,
        interference=interference,
    )


def _packages() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the versions of sdopt's dependencies, and how to install each optional one that is missing."""
    try:
        wanted = [Requirement(line) for line in requires("sdopt") or []]
    except PackageNotFoundError:  # run from a checkout that is not installed
        wanted = [
            Requirement(name)
            for name in ("torch", "diffusers", "transformers", "hydra-core", "mlflow")
        ]
    installed: dict[str, str] = {}
    missing: dict[str, str] = {}
    for requirement in wanted + [Requirement(name) for name in _BESIDES]:
        extra = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
        if extra and extra[1] == "dev":
            continue
        try:
            installed[requirement.name] = version(requirement.name)
        except PackageNotFoundError:
            if requirement.name not in _BESIDES:
                missing[requirement.name] = (
                    f"pip install 'sdopt[{extra[1]}]'" if extra else "pip install sdopt"
                )
    return installed, missing


def _tool_version(tool: str) -> str | None:
    if shutil.which(tool) is None:
        return None
    try:
        output = subprocess.run(
            [tool, "--version"], capture_output=True, text=True, check=False, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(
        r"\b\d+\.\d+(\.\d+)*",
        next((line for line in output.splitlines() if "release" in line), output),
    )
    return found[0] if found else "version unknown"
