"""One thin file per command: `sdopt <command>` and `python -m runners.<command>` do the same."""
