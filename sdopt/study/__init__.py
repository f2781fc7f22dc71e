"""Running a study: designs, plan, rounds, evidence and images, and going on with one that broke off."""
