"""Finds the fastest stack of options that keeps the quality, within limits: see `sdopt.search.run`."""
