"""Shows results to people: tables, Markdown, plots, pictures. Each is made from a `StudyResult` alone."""
