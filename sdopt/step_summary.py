"""Writes to the page that GitHub shows of a step of CI. Imports nothing heavy."""

import os
from collections.abc import Iterable
from pathlib import Path

from sdopt.errors import print_problems, without_controls, without_passwords

_LARGEST = 2**20
"""Bytes of a step's page; of a larger one GitHub shows nothing."""


def append_step_summary(text: str) -> None:
    """Appends the Markdown to the file that `GITHUB_STEP_SUMMARY` names, where that is set.

    The summary is for reading, and the exit code is the verdict: a file that cannot be written, or would be too large, is
    only said.
    """
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if not target:
        return
    content = f"{text}\n".encode(errors="replace")
    try:
        with Path(target).open("ab") as stream:
            if os.fstat(stream.fileno()).st_size + len(content) <= _LARGEST:
                stream.write(content)
                return
        reason = "GitHub shows nothing of a page of more than 1 MiB"
    except OSError as error:
        reason = str(error.strerror)
    problem = f"the summary cannot be written ({reason}); verdicts are kept"
    print_problems([f"GITHUB_STEP_SUMMARY={target}: {problem}"])


def report_problems(problems: Iterable[str]) -> None:
    """Prints each problem as a line on standard error, and shows them in the summary: they took the answer's place."""
    lines = [without_passwords(without_controls(problem)) for problem in problems]
    print_problems(lines)
    if lines:
        append_step_summary(
            "\n".join(["```", *(f"sdopt: {line}" for line in lines), "```"])
        )
