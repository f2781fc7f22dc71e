"""Options for a program's own pipeline: applied, proved and taken back; and the pipelines of measured variants."""

from sdopt.library.applying import Report, optimize, prove, undo
from sdopt.library.loading import load

__all__ = ["Report", "load", "optimize", "prove", "undo"]
