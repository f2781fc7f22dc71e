"""Devices and cards: detects devices, describes their abilities, and checks the features that options need."""
