"""What people look at: progress, tables and their Markdown. Each is made from a `StudyResult` alone."""
