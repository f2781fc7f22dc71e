"""Changes to records that tests make by hand."""

from dataclasses import replace
from typing import Any

from sdopt.results.records import StudyResult, VariantResult


def reconfigure(owner: StudyResult | VariantResult, section: str, **changes: Any) -> None:
    """Replaces keys of one section of a recorded configuration."""
    changed: dict[str, Any] = {section: replace(getattr(owner.config, section), **changes)}
    owner.config = replace(owner.config, **changed)
