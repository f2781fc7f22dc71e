"""An option that leaves many settings of the process changed."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sdopt.measure.trace import Trace
from sdopt.options.base import Finding, Optimization, Proof


@dataclass(frozen=True)
class Careless(Optimization):
    """Sets what other parts of a program rely on."""

    def apply(self, pipe: Any) -> Proof:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_float32_matmul_precision("high")
        torch.set_default_dtype(torch.float64)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        torch.backends.cuda.enable_flash_sdp(False)
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)

        def proof(_trace: Trace) -> Finding:
            return Finding(True, "careless")

        return proof
