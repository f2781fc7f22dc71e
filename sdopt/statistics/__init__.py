"""From raw samples to figures: ratios with intervals, bounds of quality scores, claims, effects."""
