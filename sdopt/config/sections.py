"""The names of the sections and keys of a configuration; `parse` has their types."""

SECTION_NAMES = (
    "model",
    "task",
    "scheduler",
    "workload",
    "protocol",
    "hardware",
    "quality",
    "gate",
    "tracking",
    "study",
)
"""Groups whose options are sections, and no options of a variant."""

COMMAND_KEYS = ("resume", "retry_failed")
"""Keys that say how a command runs and do not belong to the study."""

WORK_SECTIONS = ("task", "scheduler")
"""Sections that count as choices of a variant, as its optimizations do; a baseline keeps them."""
