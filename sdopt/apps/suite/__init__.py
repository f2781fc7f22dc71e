"""Spends limited time on a GPU in order of value: parts with a time limit each, recorded as they end."""
