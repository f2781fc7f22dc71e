"""The report of a study as one page: what it says (`sections`), and how it is written, in HTML and in Markdown."""
