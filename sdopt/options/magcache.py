"""caching: skips a transformer's blocks in steps in which they would add nearly what they added last (MagCache)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import override

from sdopt.errors import UsageError
from sdopt.options import Context, Finding, Proof, Trace
from sdopt.options.assumptions import one_call_a_step, own_blocks
from sdopt.options.caching import Caching, on_transformer
from sdopt.pipelines.loading import LoadedModel, family_of
from sdopt.pipelines.parts import STEPS, Pipeline, denoiser_of
from sdopt.schema import Model, ShareBelowOne, UpTo1000
from sdopt.text_files import read_text

FOLDER = Path(__file__).parent / "magcache_ratios"


@dataclass(frozen=True)
class Magnitudes:
    """How much the blocks of a transformer add in each step, relative to the step before: what MagCache decides by.

    They hold for the weights and the timesteps that they were measured with. With others, other steps would be skipped
    than those in which little changes.

    Attributes:
        model: the name of the model, for readers.
        steps: the number of steps that was asked for.
        timesteps: those of the scheduler.
        ratios: for each branch of guidance that has calls of its own, the prompt's first, a ratio for each step.
        weights: some numbers of the weights, by which they are known.
        guidance_scale: the scale that they were measured with, for readers.
        images: the number of images that they are the mean of, for readers.
    """

    model: str
    steps: int
    timesteps: list[float]
    ratios: list[list[float]]
    weights: list[float]
    guidance_scale: float = 1.0
    images: int = 1


_ADAPTER = TypeAdapter(Magnitudes)


def read_magnitudes(path: Path) -> Magnitudes:
    """Reads a file of ratios. Raises UsageError if it is missing, or is none."""
    try:
        return _ADAPTER.validate_json(read_text(path.expanduser()))
    except OSError as error:
        raise UsageError(
            f"caching.path={path}: cannot be read ({error.strerror})"
        ) from error
    except ValidationError as error:
        raise UsageError(
            f"caching.path={path}: holds no ratios: {error.errors()[0]['msg']}"
        ) from error


def magnitudes_as_json(magnitudes: Magnitudes) -> bytes:
    """Returns the content of a file of ratios."""
    return _ADAPTER.dump_json(magnitudes, indent=1) + b"\n"


def shipped_file(model: str, steps: int) -> Path:
    """Returns where sdopt ships the ratios of one of its models at a number of steps, if it does."""
    return FOLDER / f"{model}-{steps}.json"


@lru_cache(maxsize=1)
def _shipped() -> tuple[Magnitudes, ...]:
    return tuple(read_magnitudes(file) for file in sorted(FOLDER.glob("*.json")))


@dataclass(frozen=True)
class MagCache(Caching):
    """Skips all blocks in steps in which they would add nearly what they added last, by ratios measured beforehand.

    As MagCache of diffusers does, and for each branch of guidance that has calls of its own. Which steps are skipped
    depends on the ratios alone, so that all images skip the same.
    """

    assumes = (own_blocks, one_call_a_step)
    keeps_structure = True
    idle = "all of {steps} steps run the blocks"

    path: str | None = None
    """The file of ratios; null is one that comes with sdopt. `sdopt calibrate --magnitudes` writes it."""
    threshold: Annotated[float, Field(gt=0, le=10)] = 0.06
    """The error, added up since the blocks ran, up to which they are skipped: how far the product of the ratios since
    then is from 1."""
    max_skip_steps: UpTo1000 = 3
    """The most steps in a row that skip them."""
    retention_ratio: ShareBelowOne = 0.2
    """Share of the steps, at the start, that skip nothing."""
    measure: bool = False
    """Whether to run all blocks and measure the ratios: `sdopt calibrate --magnitudes` sets it."""

    def runs(self, ratios: Sequence[float]) -> list[bool]:
        """Returns for each step of an image whether the blocks run, from the ratios of its steps (Algorithm 1)."""
        runs, ratio, error, skipped = [], 1.0, 0.0, 0
        retained = int(self.retention_ratio * len(ratios) + 0.5)
        for step, change in enumerate(ratios):
            if step >= retained:
                ratio *= change
                error += abs(1 - ratio)
                skipped += 1
            skips = (
                0 < step >= retained
                and error <= self.threshold
                and skipped <= self.max_skip_steps
            )
            runs.append(not skips)
            if not skips:
                ratio, error, skipped = 1.0, 0.0, 0
        return runs

    @property
    def _measured(self) -> tuple[Magnitudes, ...]:
        """The ratios of the file, or all that come with sdopt."""
        if self.path is None:
            return _shipped()
        return (read_magnitudes(Path(self.path)),)

    @property
    @override
    def traced_calls(self) -> int:
        if self.measure:
            return 1000
        return max((magnitudes.steps for magnitudes in self._measured), default=2)

    @override
    def files(self, model: Model, fetch: bool) -> list[Path]:
        return [] if self.path is None else [Path(self.path).expanduser()]

    @override
    def lacking(self, ctx: Context) -> list[str]:
        if self.measure or family_of(ctx.model).is_unet or self._fitting(ctx):
            return []
        there = "none come with sdopt"
        if self.path is not None:
            there = f"those of caching.path={self.path} are of {len(self._measured[0].timesteps)}"
        steps = ctx.workload.steps
        command = f"sdopt calibrate --magnitudes model=… workload.steps={steps} --output ratios.json"
        needs = f"needs ratios of this model at {ctx.steps} steps, and {there}"
        return [
            f"{needs}: write them with `{command}`, and set caching.path=ratios.json"
        ]

    def _measured_with(self, denoiser: Any) -> list[Magnitudes]:
        """Returns the ratios that were measured with the weights of a denoiser."""
        from sdopt.options.block_caches import same_weights, weights_sample

        sample = weights_sample(denoiser)
        return [one for one in self._measured if same_weights(sample, one.weights)]

    def _fitting(self, ctx: Context) -> list[Magnitudes]:
        """Returns the ratios that may be of a model. Where only its name is known, `apply` compares the weights.

        A program may call its pipeline with any number of steps, which is asked for in each call.
        """
        model = ctx.model
        if isinstance(model, LoadedModel):
            denoiser = model.networks.get("transformer")
            if denoiser is None:
                return list(self._measured)
            return self._measured_with(denoiser)
        shipped = self.path is None
        fitting = []
        for magnitudes in self._measured:
            of_model = not shipped or (
                model.weights == "packaged" and magnitudes.model == model.name
            )
            if of_model and _of_as_many(magnitudes, ctx):
                fitting.append(magnitudes)
        return fitting

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        if family_of(ctx.model).is_unet:
            return [
                "adds up what all blocks add, and those of a UNet have several shapes: choose caching=deepcache"
            ]
        return super().conflicts(ctx)

    @override
    def ineffective(self, ctx: Context) -> list[str]:
        if self.measure:
            return []
        fitting = self._fitting(ctx)
        for magnitudes in fitting:
            if any(not all(self.runs(ratios)) for ratios in magnitudes.ratios):
                return []
        return (
            [f"{self.idle.format(steps=ctx.steps)}: set caching.threshold higher"]
            if fitting
            else []
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        from sdopt.options.block_caches import Magnitude

        if self.measure:
            return self._measuring(pipe)
        denoiser = denoiser_of(pipe)
        measured = list(self._measured)
        if denoiser.device.type != "meta":
            measured = self._measured_with(denoiser)
        if not measured:
            raise UsageError(
                "caching.path: the ratios were measured with other weights, or without a LoRA that this has"
            )
        return on_transformer(
            pipe, Magnitude(pipe, denoiser, self, measured), "none of the blocks"
        )

    def _measuring(self, pipe: Pipeline) -> Proof:
        """Returns what finds the ratios of a call as its facts."""
        from sdopt.options.block_caches import MagnitudeMeter, weights_sample

        denoiser = denoiser_of(pipe)
        meter = denoiser.__dict__[STEPS] = MagnitudeMeter(pipe, denoiser)
        denoiser.forward = meter
        weights = weights_sample(denoiser)

        def proof(trace: Trace) -> Finding:
            measured = sum(map(len, meter.ratios))
            facts: dict[str, Any] = {
                "ratios": meter.ratios,
                "timesteps": meter.timesteps,
                "weights": weights,
            }
            whole = 0 < measured == meter.calls["whole"] == trace.denoiser.calls
            return Finding(
                whole,
                f"{measured} ratios of {trace.denoiser.calls} traced calls",
                facts,
            )

        return proof


def _of_as_many(magnitudes: Magnitudes, ctx: Context) -> bool:
    """Returns whether ratios are of as many steps as a call; a task that starts from an image runs the last of them."""
    if magnitudes.steps != ctx.workload.steps:
        return False
    return ctx.task.kind == "txt2img" or len(magnitudes.timesteps) == ctx.steps
