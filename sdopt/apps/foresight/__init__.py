"""Predicts seconds and GiB on a card that one does not have, with intervals."""
