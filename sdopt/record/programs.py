"""Records the program that uses a measured variant, and whether it drew the measured image."""

from dataclasses import dataclass, field


@dataclass
class Program:
    """A program that was run in a process of its own, after everything was measured.

    It loads the model, turns the variant's options on, and generates the first image of the quality pass.
    """

    text: str = ""
    """The whole program; "" if others cannot load the model, which has random weights."""
    lines: list[str] = field(default_factory=list)
    """The part of it that turns the options on for a pipeline `pipe` as diffusers loads it, and calls that."""
    draws: bool = False
    """Whether its image is the measured one. Only then is the code shown."""
    reason: str = ""
    """Why the code is not shown; "" if it is."""
    error: float | None = None
    """Mean squared difference of its image to the measured one, of pixels in 0…1; None if it made none."""
    limit: float | None = None
    """Up to which `error` the two images count as the same."""
    levels: int | None = None
    """The largest difference of a pixel, in levels of 255."""
    seconds: float | None = None
    """How long it ran."""
