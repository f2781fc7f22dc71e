"""The gate on trial: options that do harm and say they do not, and pairs that differ by chance alone."""

from pathlib import Path

CONF = Path(__file__).parent / "conf"
"""The preset `experiment=gate_trial` and the group `trial`, one yaml per sabotaged option."""
