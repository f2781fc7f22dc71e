"""Tests the gate with sabotaged options, which do harm and hide it, and with A/A pairs, which differ only by chance."""

from pathlib import Path

CONF = Path(__file__).parent / "conf"
"""The preset `experiment=gate_trial` and the group `trial`, one yaml per sabotaged option."""
