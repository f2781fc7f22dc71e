"""Puts the gate on trial: with options that do harm and deny it, and with pairs that differ by chance alone."""

from pathlib import Path

CONF = Path(__file__).parent / "conf"
"""The preset `experiment=gate_trial` and the group `trial`, one yaml per sabotaged option."""
