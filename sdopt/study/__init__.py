"""Plans and runs a study: designs, rounds, evidence and images; and resumes one that was interrupted."""
