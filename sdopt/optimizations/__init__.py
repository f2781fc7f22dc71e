"""The optimizations: one file or folder per group, and a small class per option.

A custom option needs one import line: `from sdopt.optimizations import Finding, Optimization, Proof, Stage, …`.
"""

from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Contract, Finding, Optimization, Proof, Stage
from sdopt.pipelines.parts import denoiser_of, unwrapped
from sdopt.schema import bounded

__all__ = [
    "Context",
    "Contract",
    "Finding",
    "Optimization",
    "Proof",
    "Stage",
    "Trace",
    "bounded",
    "denoiser_of",
    "unwrapped",
]
