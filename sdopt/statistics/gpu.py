"""Notes on GPU timings from the state of the GPU: throttled rounds, idle time between kernels, distorting settings."""

from collections import Counter

import numpy as np

from sdopt.record.records import StudyResult, VariantResult

LAUNCH_BOUND = 0.8
"""If the device is busy for less than this share of a denoiser step, Python and kernel launches limit it."""

_DISTORTING = {
    "CUDA_LAUNCH_BLOCKING": "each kernel was waited for before the next was launched",
    "NVIDIA_TF32_OVERRIDE": "it overrides whether products and convolutions are rounded to TF32",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor was allocated by the driver",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "it allows TF32 in matrix products where no option asked for it",
}
"""Environment variables that make timings unrepresentative of other machines."""


def busy_share(variant: VariantResult) -> float | None:
    """Returns the share of a denoiser step for which the device worked; None where either is not known.

    The work comes from a trace. The step's time comes from calls that were not traced, because tracing slows Python.
    """
    found = [(m.shapes[0].denoiser_busy_s, m.stages_s.get("denoiser_step")) for m in variant.measurements]
    shares = [min(1.0, busy_s / float(np.mean(steps))) for busy_s, steps in found if busy_s is not None and steps]
    return float(np.median(shares)) if shares else None


def gpu_notes(result: StudyResult) -> list[str]:
    """Returns what a reader needs to know of the GPU beside the table; nothing of a study on a CPU."""
    found = (throttling_note(result), busy_note(result), *_settings_notes(result))
    return [note for note in found if note]


def throttling_note(result: StudyResult) -> str:
    """Returns which of the timed calls were throttled, and by what; "" where none was."""
    states = {
        variant.name: [
            call.gpu for m in variant.measurements for samples in m.shapes for call in samples.calls if call.gpu
        ]
        for variant in result.variants
    }
    counts = {name: sum(bool(s.throttled) for s in of_one) for name, of_one in states.items()}
    if not any(counts.values()):
        return ""
    reasons = Counter(reason for of_one in states.values() for s in of_one for reason in s.throttled)
    rounds = ", ".join(f"{name} {count} of {len(states[name])}" for name, count in counts.items() if count)
    return f"Rounds in which the GPU was throttled ({', '.join(name for name, _ in reasons.most_common())}): {rounds}."


def busy_note(result: StudyResult) -> str:
    """Returns which variants leave the GPU idle between kernels; "" where none does."""
    shares = {variant.name: busy_share(variant) for variant in result.variants}
    idle = {name: share for name, share in shares.items() if share is not None and share < LAUNCH_BOUND}
    if not idle:
        return ""
    listed = ", ".join(f"{name} {100 * share:.0f} %" for name, share in idle.items())
    return (
        f"GPU busy during a denoiser step: {listed}. The rest of the time it waited for Python to launch kernels, so "
        f"that faster kernels gain little there; compilers, CUDA graphs, larger batches and larger images gain more."
    )


def _settings_notes(result: StudyResult) -> list[str]:
    environment = result.environment
    notes = [
        f"{name}={environment.variables[name]} was set: {what}."
        for name, what in _DISTORTING.items()
        if environment.variables.get(name)
    ]
    others = environment.gpu.get("processes", [])
    if others:
        held = sum(other["gib"] or 0.0 for other in others)
        notes.append(f"{len(others)} other processes were on the GPU when the study began, with {held:.1f} GiB.")
    return notes
