"""The plots of a study as Vega-Lite specifications, which the report draws in a browser and `picture` as a PNG."""
