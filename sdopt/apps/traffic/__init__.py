"""Load for a server: when requests arrive, who sends them, what came of them, and what a queue alone would do."""
