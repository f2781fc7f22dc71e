"""The record of a study: its schema, its file, and the errors of a job without a result."""
