"""A server of one variant: requests over HTTP, batches formed on the fly, images from the worker that is measured."""
