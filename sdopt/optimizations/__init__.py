"""The optimizations: one file per group, or a folder where that would be long; a small class per option.

An option of your own needs one import line: `from sdopt.optimizations import Finding, Optimization, Proof, Stage, …`.
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
