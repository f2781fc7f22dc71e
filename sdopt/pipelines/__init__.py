"""Loading pipelines: the packaged reference model, and diffusers folders."""
