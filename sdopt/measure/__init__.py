"""Measuring: devices, memory, stages, traces and operation counts."""
