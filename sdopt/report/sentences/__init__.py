"""Says what a study found: its answer, what it rests on, and why each variant passed, failed or stayed open."""
