"""The gate's trial: options that do harm by an honest mistake, which it must catch, and honest ones; simulations."""

from pathlib import Path

CONF = Path(__file__).parent / "conf"
"""The presets of the trial's studies and the group `trial`, one yaml per option."""
