"""Says of the program that uses a variant whether it was run, and hands out only code that drew the measured image."""

from sdopt.record.programs import Program
from sdopt.record.records import VariantResult


def program_of(variant: VariantResult) -> str:
    """Returns the program that loads the model, applies a variant's options, and saves the first measured image.

    It is "" if none was run, or drew another image, or if others cannot load the model.
    """
    program = variant.program
    if program is None or not program.draws:
        return ""
    return program.text


def said_of_whole(program: Program | None) -> str:
    """Returns what is known of a variant's program where nothing but the whole of it is handed out."""
    if program is not None and program.draws and not program.text:
        return (
            "No whole program is shown: others cannot load this model, which has random weights; "
            "the lines that turn the options on were run, and make the measured image."
        )
    return said_of(program)


def said_of(program: Program | None) -> str:
    """Returns in one sentence what is known of a variant's program, beside its lines."""
    if program is None:
        return "No code is shown: none was run."
    if not program.draws:
        return f"No code is shown: {program.reason}."
    # Lines for a pipeline that is there leave the noise out, which other images do not need.
    run = "This code was run with the noise of the measured image, and makes that image"
    if program.error == 0 or program.levels == 0:
        return f"{run}."
    levels = f"to within {program.levels} of 255 levels, a mean squared error of {program.error:.1e}"
    return f"{run}, {levels}."
