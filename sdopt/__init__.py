"""Measured ablations of Stable Diffusion optimizations: speed, memory and images, against a baseline in the same run.

>>> import sdopt
>>> result = sdopt.run("experiment=quickstart", "protocol=smoke")  # overrides as on the command line
>>> result.table()  # a pandas DataFrame, a row per option
>>> sdopt.load_result("outputs/runs/quickstart/2026-01-31_23-59-59-0")
>>> pipe = sdopt.optimize(pipe, precision="bf16", memory=["vae_slicing"])  # a pipeline that you already have

Nothing heavy is imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sdopt.about import __version__

if TYPE_CHECKING:
    from sdopt.apps.foresight.plan import plan
    from sdopt.errors import ConflictError, UnavailableError, UsageError
    from sdopt.guest import run
    from sdopt.library import Report, load, optimize, prove, undo
    from sdopt.record.records import StudyResult
    from sdopt.report.outcome import Outcome, load_result

_MODULES = {
    "sdopt.errors": ("ConflictError", "UnavailableError", "UsageError"),
    "sdopt.apps.foresight.plan": ("plan",),
    "sdopt.guest": ("run",),
    "sdopt.library": ("Report", "load", "optimize", "prove", "undo"),
    "sdopt.record.records": ("StudyResult",),
    "sdopt.report.outcome": ("Outcome", "load_result"),
}

__all__ = [
    "ConflictError",
    "Outcome",
    "Report",
    "StudyResult",
    "UnavailableError",
    "UsageError",
    "__version__",
    "load",
    "load_result",
    "optimize",
    "plan",
    "prove",
    "run",
    "undo",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'sdopt' has no attribute '{name}'")
    import random  # a command takes the working folder out of the path first

    before = random.getstate()  # libraries draw when they are imported: rich does
    value = globals()[name] = getattr(import_module(module), name)
    random.setstate(before)
    return value


def __dir__() -> list[str]:
    return __all__
