"""Words for what can differ between two variants: which way, by how much, and in which unit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sdopt.statistics.words import decibels_text

Text = Callable[[float], str]


def percent_text(share: float) -> str:
    """Returns a share as a percentage of two digits, and no more: `4.3 %`, `0.05 %`."""
    return f"{float(f'{100 * abs(share):.2g}'):g} %"


OF_THE_RANGE = " of the range"
"""What follows a percentage of all values that a property can have, and not of what the reference has of it."""


def range_text(share: float) -> str:
    """Returns a share of the range of a property: `3.2 % of the range`."""
    return f"{percent_text(share)}{OF_THE_RANGE}"


def number_text(value: float) -> str:
    """Returns an amount without a unit, of two digits."""
    return f"{float(f'{abs(value):.2g}'):g}"


def duration_text(seconds: float) -> str:
    """Returns a time in seconds, of three digits."""
    return f"{seconds:.3g} s"


def amounts_text(low: float, high: float, text_of: Text) -> str:
    """Returns the two amounts between which one lies, as in `0.8 to 6 %`; a single one if both read alike."""
    first = text_of(low)
    last = text_of(high)
    if first == last:
        return first
    number, _, unit = first.partition(" ")
    return f"{number if last.endswith(f' {unit}') else first} to {last}"


@dataclass(frozen=True)
class Change:
    """Words for what can change either way: a property of a whole set of images, or a ratio to the reference.

    Attributes:
        subject: the beginning of the sentence.
        less: what it means if the candidate has less of it.
        more: what it means if it has more.
        text: writes an amount.
        turned: whether the recorded difference is the reference's value less the candidate's, as it is for properties
            of which neither way is better.
    """

    subject: str
    less: str
    more: str
    text: Text = percent_text
    turned: bool = False

    def by(self, difference: float) -> str:
        """Returns a change by a difference as it is recorded."""
        return f"{self.subject} {self._way(difference).format(self.text(difference))}"

    def between(self, low: float, high: float) -> str:
        """Returns a change that lies between two differences."""
        way = self._way(low)
        if way == self._way(high):
            small, large = sorted((abs(low), abs(high)))
            amounts = amounts_text(small, large, self.text)
            return f"{self.subject} {way.format(amounts)}"
        first = way.format(self.text(low))
        last = self._way(high).format(self.text(high))
        return f"{self.subject} between {first} and {last}"

    def _way(self, difference: float) -> str:
        grew = difference < 0 if self.turned else difference > 0
        return self.more if grew else self.less


PROPERTIES = {
    "brightness": Change(
        "Images are", "{} darker", "{} brighter", range_text, turned=True
    ),
    "contrast": Change(
        "Images have", "{} less contrast", "{} more contrast", range_text, turned=True
    ),
    "fine_detail": Change(
        "Images have", "{} less fine detail", "{} more fine detail", range_text
    ),
    "ssim": Change(
        "The structural similarity of images is", "{} lower", "{} higher", number_text
    ),
    "psnr_db": Change(
        "The peak signal-to-noise ratio of images is",
        "{} dB lower",
        "{} dB higher",
        number_text,
    ),
    "clip_score": Change(
        "The fit of images to their prompts (CLIP score) is",
        "{} lower",
        "{} higher",
        number_text,
    ),
    "score": Change("The score of images is", "{} lower", "{} higher", number_text),
    "penalty": Change("The penalty of images is", "{} higher", "{} lower", number_text),
    **{
        name: Change(
            f"The distance of images from the reference images ({name.upper()}) is",
            "{} larger",
            "{} smaller",
            number_text,
        )
        for name in ("fid", "kid", "cmmd")
    },
}
"""Properties of a whole set of images, of which candidate and reference have a mean; their rules are on its change."""

DISTANCES: Mapping[str, tuple[str, str, Text]] = {
    "mse": (
        "pixels",
        "differ from {others} in their pixels: likeness {amount}",
        decibels_text,
    ),
    "latents_error": (
        "the latents that they are decoded from",
        "differ from {others} before they are decoded (in latents), by {amount}",
        percent_text,
    ),
    "perceptual": (
        "what they show",
        "differ from {others} in what they show: a perceptual distance of {amount}",
        number_text,
    ),
    "lpips_alex": (
        "what they show",
        "differ from {others} in what they show: an LPIPS of {amount}",
        number_text,
    ),
    "colour_error": ("colours", "", range_text),
    "brightness_error": ("brightness", "", range_text),
    "contrast_error": ("contrast", "", range_text),
    "detail_error": ("fine detail", "", range_text),
}
"""Distances between an image and the baseline's image of the same prompt: in what, in which words, and how written."""

PLAIN = "differ from {others} in {about} by {amount}"
"""The words of a distance that has none of its own."""

RATIOS: Mapping[str, Change] = {
    "speedup": Change("It is", "{} slower", "{} faster"),
    "memory_ratio": Change("It takes", "{} less memory", "{} more memory"),
    "tail_ratio": Change("Its slowest calls are", "{} shorter", "{} longer"),
}

OVER_ITS_BASELINE = Change(
    "Its speed-up over its own baseline is", "{} smaller", "{} larger"
)
"""A speed-up beside that of an earlier result."""


def excess(name: str, factor: float) -> float:
    """Returns by which share a ratio differs from 1; a speed-up below 1 is told as the time that is added."""
    if name == "speedup" and factor < 1:
        return 1 - 1 / factor
    return factor - 1
