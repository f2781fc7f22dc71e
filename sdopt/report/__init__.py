"""What people look at: tables, Markdown, plots, pictures. Each is made from a `StudyResult` alone."""
