"""Describes this machine, its peak rates, and the options that run on it."""
