"""What this machine is, how fast it can be, and which options run on it."""
