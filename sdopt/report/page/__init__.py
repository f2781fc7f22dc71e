"""The report of a study as one page: its content (`sections`), written as HTML and as Markdown."""
