"""The optimizations: one file per axis, one small class per option; see `base.Optimization`."""
