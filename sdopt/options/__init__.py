"""The optimizations: a file per group, some with a second one, or a folder; a small class per option.

An option, sdopt's own or a custom one, takes what it is made of from here:
`from sdopt.options import Finding, Optimization, Proof, Stage, …`.
"""

from sdopt.contract import Contract
from sdopt.measure.trace import Trace
from sdopt.options.base import Assumption, Context, Finding, Optimization, Proof, Stage
from sdopt.pipelines.parts import denoiser_of, unwrapped

__all__ = [
    "Assumption",
    "Context",
    "Contract",
    "Finding",
    "Optimization",
    "Proof",
    "Stage",
    "Trace",
    "denoiser_of",
    "unwrapped",
]
