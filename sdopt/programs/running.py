"""Runs the program of a variant in a process of its own, and compares its image with the measured one."""

import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sdopt.errors import UsageError, first_line, os_problem
from sdopt.hardware.device import Device
from sdopt.pipelines.factory import Built, built, remember
from sdopt.programs.code import Unwritable
from sdopt.programs.writer import SAVING, written
from sdopt.record.images import open_image, scored_file
from sdopt.record.programs import Program
from sdopt.record.records import VariantResult
from sdopt.statistics.break_even import first_image_s
from sdopt.variant import Variant
from sdopt.worker.child import ChildDiedError, ChildTimeoutError, call_apart
from sdopt.worker.forkserver import StartContext
from sdopt.worker.host import variables

_LEAST_S, _MOST_S = 120.0, 900.0
"""Limits of the time that one program may take."""

_TIMES = 5.0
"""How many times as long as its worker took to load and for its first call."""


def run_program(
    row: VariantResult,
    variant: Variant,
    device: Device,
    folder: Path,
    log: Path,
    scratch: Path,
    context: StartContext,
    limit: float,
    seconds: float,
) -> Program:
    """Writes the program of a variant and runs it, in a process of its own; returns what is recorded of it.

    Args:
        row: what was measured of the variant.
        variant: the variant.
        device: the device that it was measured on.
        folder: the study's folder, with its images.
        log: what the process prints to.
        scratch: a folder for compilers.
        context: starts the process.
        limit: the mean squared difference up to which two images of the variant are the same.
        seconds: that it may take.
    """
    first = row.image(0, 0)
    if first is None:
        return Program(reason="no image was made to compare its own with")
    measured = scored_file(folder, first).absolute()
    # What a function builds is known in this process alone.
    made = built(variant.model)
    arguments = variant, made, device, measured, limit, log, scratch
    try:
        return call_apart(context, program_drawn, *arguments, timeout_s=seconds)
    except ChildTimeoutError:
        return Program(reason=f"it took longer than {seconds:.0f} s")
    except ChildDiedError as died:
        return Program(reason=f"its process {died}")
    except (UsageError, OSError) as error:
        return Program(reason=f"it could not be written or run: {error}")


def time_limit(row: VariantResult) -> float:
    """Returns the seconds that the program of a variant may take: its own start may be minutes of compiling."""
    return min(_MOST_S, max(_LEAST_S, _TIMES * (first_image_s(row) or 0.0)))


def program_drawn(
    variant: Variant,
    made: Built | None,
    device: Device,
    measured: Path,
    limit: float,
    log: Path,
    scratch: Path,
) -> Program:
    """Writes a variant's program, runs it, and compares its image with the measured one; prints to a log.

    It changes the process in which it is called. `made` describes the model, if a function builds it.
    """
    _print_to(log)
    if made is not None:
        remember(variant.model, made)
    os.environ |= variables(device, scratch)
    _forget_the_working_folder()
    program, started = Program(), time.monotonic()
    tempfile.tempdir = str(
        scratch
    )  # removed even if this process is killed: weights may be offloaded there
    try:
        code = written(variant, device)
        program = Program(code.text + SAVING if code.public else "", code.lines)
        print(code.text, flush=True)
        os.chdir(scratch)  # it may be run anywhere
        started = time.monotonic()
        pixels = image_of(code.text)
    except Unwritable as reason:
        return Program(reason=str(reason))
    except UsageError as error:
        return replace(program, reason="; ".join(error.problems))
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a model, an option or a function of a user's file raises
        traceback.print_exc()
        return replace(
            program,
            reason=f"it fails here ({type(error).__name__}: {first_line(error)[:200]})",
        )
    return compared(
        replace(program, seconds=time.monotonic() - started), pixels, measured, limit
    )


def image_of(text: str) -> np.ndarray:
    """Runs a program in this process; returns its image as bytes, (height, width, 3)."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "program.py", "exec"), names)
    return np.asarray(names["image"].convert("RGB"))


def compared(
    program: Program, pixels: np.ndarray, measured: Path, limit: float
) -> Program:
    """Returns what is recorded of a program whose image is `pixels`, uint8 (height, width, 3)."""
    with open_image(measured) as image:
        other = np.asarray(image.convert("RGB"))
    if pixels.shape != other.shape:
        sizes = " and ".join(
            f"{height}×{width}" for height, width, _ in (pixels.shape, other.shape)
        )
        return replace(
            program, limit=limit, reason=f"its image is of another size ({sizes})"
        )
    apart = np.abs(pixels.astype(float) - other)
    error, levels = float(np.mean(np.square(apart / 255))), int(apart.max())
    draws = error <= limit
    reason = (
        ""
        if draws
        else f"its image is {levels} of 255 levels off (mean squared error {error:.2g})"
    )
    return replace(
        program, draws=draws, error=error, limit=limit, levels=levels, reason=reason
    )


def _print_to(log: Path) -> None:
    try:
        log.parent.mkdir(exist_ok=True)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError as error:
        raise UsageError(os_problem(error)) from error
    for stream in (1, 2):
        os.dup2(handle, stream)


def _forget_the_working_folder() -> None:
    """Takes out of Python's path what only a command has: a program that is run from a file does not find it."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = str(Path.cwd())
    sys.path[:] = [
        folder for folder in sys.path if folder in named or folder not in ("", here)
    ]
