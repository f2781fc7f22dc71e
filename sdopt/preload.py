"""Imported once by the fork server, so that each worker starts with the libraries in place.

Imports only: a tensor operation here would start threads, and a forked child that then multiplies matrices hangs.
"""

import os

import transformers.models.clip.modeling_clip
import transformers.models.clip.tokenization_clip  # noqa: F401

import sdopt.pipelines.loading
import sdopt.worker  # noqa: F401

SERVER_PID = os.getpid()
"""The process that imported this: a worker that finds its own pid here was not forked from a warm server."""
