"""Devices and cards: what is here, what it can do, and which features options need."""
