"""A user's own optimizations, each of which goes wrong in one way."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from diffusers import DiffusionPipeline

from sdopt.options import Finding, Optimization, Proof, Stage


@dataclass(frozen=True)
class Harmless(Optimization):
    """Changes nothing, and says that it took effect."""

    stage: ClassVar[Stage] = Stage.COMPONENTS

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        return lambda trace: Finding(True, "harmless")


@dataclass(frozen=True)
class RaisesInApply(Harmless):
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        raise RuntimeError("a part\nis missing")


@dataclass(frozen=True)
class KillsItself(Harmless):
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class Exits(Harmless):
    """Ends the process as a library does that gives up."""

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        print("no licence found", file=sys.stderr, flush=True)
        print("Loading parts: 100%|██████| 5/5", file=sys.stderr, flush=True)
        os._exit(7)


@dataclass(frozen=True)
class WantsTooMuch(Harmless):
    def apply(self, pipe: DiffusionPipeline) -> Proof:
        torch.empty(2**58, dtype=torch.uint8)
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class UsesTheCache(Harmless):
    """Says whether it finds what an earlier process has compiled."""

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            compiled = Path(os.environ[name]) / "compiled"
            print(f"{name}: {'warm' if compiled.exists() else 'cold'} {compiled}")
            compiled.parent.mkdir(parents=True, exist_ok=True)
            compiled.touch()
        return super().apply(pipe)


@dataclass(frozen=True)
class Talks(Harmless):
    """Writes to the terminal in every way there is, and leaves a process running."""

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        print("said by print")
        print("said to stderr", file=sys.stderr)
        os.write(1, b"said by write\n")
        subprocess.run(
            ["sh", "-c", "echo said by a child; echo said by a child to stderr >&2"],
            check=True,
        )
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
        return super().apply(pipe)


@dataclass(frozen=True)
class OddEvidence(Harmless):
    """Its facts are no JSON, and could not even leave the worker."""

    def apply(self, pipe: DiffusionPipeline) -> Proof:
        return lambda trace: Finding(True, "odd", {"fact": lambda: None})
