"""No compiler."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from sdopt.measure.trace import Trace
from sdopt.options.base import Finding, Optimization, Proof, Stage
from sdopt.pipelines.parts import denoiser_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class Eager(Optimization):
    """Runs PyTorch operator by operator, without a compiler."""

    stage: ClassVar[Stage] = Stage.COMPILE
    compiles: ClassVar[bool] = False

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        def proof(trace: Trace) -> Finding:
            return Finding(not trace.is_compiled(denoiser_of(pipe)), "operator by operator")

        return proof
