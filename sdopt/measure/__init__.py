"""Measuring one process: stages, traces, clocks, memory, operation counts, and a device's ceilings."""
