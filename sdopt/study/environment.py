"""Records the machine and the software versions of a study, which a reader needs before comparing two results."""

import os
import platform
import shutil
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import sdopt
from sdopt.hardware.device import Device
from sdopt.record.records import Environment
from sdopt.scratch import named_caches
from sdopt.study import fingerprint
from sdopt.worker.machine import Machine

_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
"""Environment variables that change how CUDA, its libraries and PyTorch compute or start."""

_CUDNN_9 = 90000

_PACKAGES = (
    *("torch", "diffusers", "transformers", "accelerate", "numpy", "triton"),
    *("deepspeed", "onnxruntime", "onnxscript", "openvino", "tensorrt", "torch-blade", "torch-tensorrt"),
    *("peft", "sdnq", "tomesd", "torchao", "xformers"),
)
"""Distributions whose code decides how images are computed; a study is not continued with another version."""


def describe_environment(machine: Machine, command: list[str]) -> Environment:
    """Returns versions, the commit of a checkout, and the machine that a first worker found."""
    commit, dirty = _checkout(Path(sdopt.__file__).parents[1])
    caches = named_caches()
    kept = (
        f"{name}={path}: first calls may find kernels there that earlier processes compiled"
        for name, path in caches.items()
    )
    return Environment(
        sdopt_version=sdopt.__version__,
        sdopt_commit=commit,
        sdopt_dirty=dirty,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: found for name in _PACKAGES if (found := _version(name))} | _cudnn(machine.device),
        device=asdict(machine.device),
        cpu=machine.cpu,
        start_method="forkserver" if machine.preloaded else "spawn",
        command=command,
        code=fingerprint.code(),
        sheet=machine.sheet,
        gpu=machine.gpu,
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ} | caches,
        host=platform.node(),
        warnings=[*machine.warnings, *kept],
    )


def _cudnn(device: Device) -> dict[str, str]:
    """Returns cuDNN's version, which is not always that of a package; nothing on a CPU."""
    number = device.attributes.get("cudnn")
    if number is None:
        return {}
    # As cudnnGetVersion encodes it: with version 9 the major number moved one digit up.
    major, rest = divmod(number, 10000 if number >= _CUDNN_9 else 1000)
    return {"cudnn": f"{major}.{rest // 100}.{rest % 100}"}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _checkout(folder: Path) -> tuple[str | None, bool | None]:
    """Returns the commit of sdopt's checkout, and whether files differ from it; (None, None) for an installed wheel."""
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None, None
    git = ["git", "-C", str(folder)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return None, None
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip(), bool(status.stdout.strip())
