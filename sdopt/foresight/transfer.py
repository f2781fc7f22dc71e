"""Learns from a user's own measurement: what it says of the host and the software, and nothing of the card.

One ratio over everything would carry the card's own factor to other cards, and makes predictions worse. A measured
run has the times of the stages; each says something of one component.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sdopt.foresight.latency import NAMES, PARTS, Array, Case, Table

_TRUST = 0.5
"""How much of a component's residual is taken over: a stage's time holds the card's error too."""


@dataclass(frozen=True)
class Observed:
    """Changes of coefficients that a measurement suggests."""

    changes: Mapping[str, float]
    summary: str

    def applied(self, coefficients: Array) -> Array:
        """Returns the coefficients with the changes."""
        found = coefficients.copy()
        for name, change in self.changes.items():
            found[NAMES.index(name)] += change
        return found


def learn(case: Case, stages: Mapping[str, float], call: float, coefficients: Array, source: str) -> Observed:
    """Compares the stages of a measured call with their predictions.

    Args:
        case: the measured call.
        stages: seconds by stage: `denoiser_step` (one step) and `vae_decoder`.
        call: seconds of the whole call.
        coefficients: those of the prediction.
        source: what was measured, for the evidence.
    """
    table = Table.of([case])
    parts = table.parts(coefficients)
    _, (expected,), (decoding,) = table.sums(parts)
    step, decoder = stages.get("denoiser_step", math.nan), stages.get("vae_decoder", math.nan)
    changes: dict[str, float] = {}
    words = []
    if step > 0:
        # Bound by launches it tells of the host's own speed, else of the software.
        bound = parts[len(PARTS) - 1, 0] > parts[: len(PARTS) - 1, 0].sum()
        change = _TRUST * math.log(step / expected)
        changes[f"launch_{case.software.launcher}" if bound else f"class_{case.software.name}"] = change
        words.append(f"{'launches' if bound else 'software'} {math.exp(change):.2f}×")
    if step > 0 and decoder > 0:
        changes["decoder"] = -_TRUST * (math.log(decoder / decoding) - math.log(step / expected))
        words.append(f"VAE {math.exp(-changes['decoder']):.2f}×")
    rest = call - step * case.steps - decoder
    if rest > 0:
        changes[f"fixed_{case.software.fixed}"] = math.log(max(rest, 1e-3) / float(parts[-2, 0]))
        words.append(f"fixed part {rest:.2f} s")
    return Observed(changes, f"with {source}: {', '.join(words) or 'nothing to learn'}")
