"""The worker process of one variant: its start, the requests to it, and its answers."""
