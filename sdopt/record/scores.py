"""Records generated images, and the quality metrics of them."""

from dataclasses import dataclass, field


@dataclass
class ImageRecord:
    """One generated image; `path` is relative to the run's folder.

    `finite` says that neither its latents nor its pixels held a NaN or an infinity before they became bytes.
    """

    prompt: str
    prompt_index: int
    image_index: int
    seed: int
    path: str
    finite: bool = True
    negative: str = ""
    """Its negative prompt."""
    process: int | None = None
    """The process, from 0, of whose timed calls it is an image; None if the quality pass generated it."""
    digest: str = ""
    """Of its file when it was written; "" in records that older versions wrote."""
    file: str = ""
    """The name of the baseline's file that it belongs to, if another program made it."""
    copies: list[str] = field(default_factory=list)
    """The names of further such files that show the same in every folder, and do not count."""

    @property
    def called(self) -> str:
        """Its prompt; of an image of another program that tells none the name of the file."""
        return self.prompt or self.file


@dataclass
class Score:
    """One quality metric, of a variant's images or of a comparison's pairs; None stands for what is not finite.

    `per_prompt` is the mean over the images of each prompt, in the order of the prompts. A metric of a whole set of
    images, which has no value per prompt, has `leave_one_out` instead: its value without the images of each prompt.
    """

    estimate: float | None
    per_prompt: list[float | None] = field(default_factory=list)
    leave_one_out: list[float | None] = field(default_factory=list)
    note: str = ""
    """Why there is no estimate, or a remark on it."""
    worst: list[float | None] = field(default_factory=list)
    """The largest value of the images of each prompt, where a prompt has several: a mean hides one of eight."""


@dataclass
class Spread:
    """How far two baselines differ in one quality metric.

    `mean` is the mean of the distance, of a metric that compares two images, else of the difference; `deviation` is
    the standard deviation of one prompt's difference (of one pseudo-value, where the metric has no values by prompt).
    """

    mean: float
    deviation: float
    n: int


@dataclass
class BrokenImage:
    """An image that no intact pipeline would draw; `path` is relative to the run's folder, "" for all together.

    Of a timed call at a further shape, of which no image is kept, it is the name of the shape.
    """

    wire: str
    path: str
    detail: str
