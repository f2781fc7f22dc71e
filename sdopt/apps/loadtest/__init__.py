"""Compares variants and policies of batching under load: which carries the most requests within a limit."""
