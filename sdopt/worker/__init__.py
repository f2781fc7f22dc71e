"""The process that one variant lives in: how it starts, what it is asked, and what it answers."""
