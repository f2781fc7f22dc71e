"""Where and with what a study runs: what a reader needs to know before comparing two results."""

import platform
import shutil
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import sdopt
from sdopt.results.records import Environment
from sdopt.study import fingerprint
from sdopt.worker.machine import Machine

_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "numpy", "xformers", "deepspeed", "torchao", "triton")


def describe_environment(machine: Machine, command: list[str]) -> Environment:
    """Versions, the commit of a checkout, and the machine that a first worker found."""
    commit, dirty = _checkout(Path(sdopt.__file__).parents[1])
    return Environment(
        sdopt_version=sdopt.__version__,
        sdopt_commit=commit,
        sdopt_dirty=dirty,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        device=asdict(machine.device),
        cpu=machine.cpu,
        start_method="forkserver" if machine.preloaded else "spawn",
        command=command,
        code=fingerprint.code(),
        sheet=machine.sheet,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _checkout(folder: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout that sdopt runs from, and whether files differ from it; nothing for an installed wheel."""
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None, None
    git = ["git", "-C", str(folder)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return None, None
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip(), bool(status.stdout.strip())
