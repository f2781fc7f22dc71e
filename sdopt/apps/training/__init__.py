"""Training and evaluating the packaged reference models."""
