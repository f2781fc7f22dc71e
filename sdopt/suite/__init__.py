"""Spends the minutes on a GPU in order of value: parts with time limits of their own, written down as they end."""
