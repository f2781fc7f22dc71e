"""Looks up the type that a variant computes in: its rounding sets how far two equivalent computations may differ."""

from sdopt.record.records import VariantResult

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of rounding to a type (Higham, Accuracy and Stability of Numerical Algorithms, 2.1)."""


def precision_of(variant: VariantResult) -> str | None:
    """Returns the coarsest type of a variant's weights and arithmetic, as its choice of `precision` was recorded.

    TensorFloat-32 counts as float32: rounding its products leaves images alike to 60 dB and more. None where the record
    has no such choice, so that a rule with a limit by type cannot be judged.
    """
    chosen = variant.config.options.get("precision")
    if not isinstance(chosen, dict) or "weights" not in chosen:
        return None
    types = [str(name) for name in (chosen["weights"], chosen.get("autocast")) if name]
    return max(types, key=lambda name: UNIT_ROUNDOFF[name]) if types and UNIT_ROUNDOFF.keys() >= set(types) else None
