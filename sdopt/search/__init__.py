"""Finds the fastest combination of options that keeps image quality within the limits: see `sdopt.search.run`."""
