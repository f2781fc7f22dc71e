"""memory: how the VAE decodes (and encodes) with less memory. The options of this group combine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from sdopt.measure.trace import Trace
from sdopt.optimizations.base import Context, Contract, Finding, Optimization, Proof, Stage
from sdopt.pipelines.loading import part_config
from sdopt.schema import bounded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_WHOLE_ONLY = "AsymmetricAutoencoderKL"
"""The one VAE of Stable Diffusion pipelines that diffusers can only run on whole batches of whole images."""


@dataclass(frozen=True)
class VaeInPieces(Optimization):
    """The base class of options that hand the VAE its input in pieces."""

    stage: ClassVar[Stage] = Stage.COMPONENTS

    @property
    @override
    def claims(self) -> frozenset[str]:
        return frozenset({"memory"})

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        config = part_config(ctx.model, "vae") or {}
        return [f"diffusers' {_WHOLE_ONLY} cannot do it"] if config.get("_class_name") == _WHOLE_ONLY else []


@dataclass(frozen=True)
class VaeSlicing(VaeInPieces):
    """Decodes a batch one image at a time: the peak of memory does not grow with the batch."""

    @property
    @override
    def contract(self) -> Contract:
        return Contract.EQUIVALENT

    @override
    def engages(self, ctx: Context) -> list[str]:
        images = ctx.workload.batch_size * ctx.workload.images_per_prompt
        return [] if images > 1 else ["slices a batch of images: set workload.batch_size to 2 or more"]

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        pipe.vae.enable_slicing()

        def proof(trace: Trace) -> Finding:
            most = max((shape[0] for shape in trace.decoder_inputs), default=0)
            batch = max((shape[0] for shape in trace.decoded), default=0)
            calls = len(trace.decoder_inputs)
            summary = f"a batch of {batch} decoded with at most {most} at a time, in {calls} calls"
            return Finding(most == 1 < batch, summary, {"batch": batch, "at_a_time": most, "decoder_calls": calls})

        return proof


@dataclass(frozen=True)
class VaeTiling(VaeInPieces):
    """Decodes an image in overlapping tiles and blends them: the peak of memory does not grow with the image."""

    tile_size: int | None = bounded(None, ge=64)
    """The side of a tile in pixels; null leaves it to the VAE: the size of the images that it was trained on."""

    @property
    @override
    def contract(self) -> Contract:
        return Contract.LOSSY

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        found = super().conflicts(ctx)
        if self.tile_size is not None and self.tile_size % 8:
            found.append(f"memory.vae_tiling.tile_size={self.tile_size}: choose a multiple of 8, the VAE's factor")
        return found

    @override
    def engages(self, ctx: Context) -> list[str]:
        size, tile = ctx.workload.size or ctx.model.size, self.tile_size or _default_tile(ctx)
        if tile is None or size > tile:
            return []
        advice = "set a larger workload.size or a smaller memory.vae_tiling.tile_size"
        return [f"a tile of {tile} pixels holds the whole image of {size}: {advice}"]

    @override
    def apply(self, pipe: "DiffusionPipeline") -> Proof:
        vae, factor = pipe.vae, pipe.vae_scale_factor
        vae.enable_tiling()
        if self.tile_size is not None:
            vae.tile_sample_min_size, vae.tile_latent_min_size = self.tile_size, self.tile_size // factor

        def proof(trace: Trace) -> Finding:
            tile = max((factor * max(shape[2:]) for shape in trace.decoder_inputs), default=0)
            image = max((max(shape[2:]) for shape in trace.decoded), default=0)
            calls = len(trace.decoder_inputs)
            summary = f"images of {image} pixels decoded in tiles of at most {tile}, in {calls} calls"
            return Finding(0 < tile < image, summary, {"image": image, "tile": tile, "decoder_calls": calls})

        return proof


def _default_tile(ctx: Context) -> int | None:
    """Returns the side of the VAE's own tiles in pixels; None if its configuration is not local."""
    config = part_config(ctx.model, "vae")
    if config is None:
        return None
    # AutoencoderTiny has no such key.
    size = config.get("sample_size", 512)
    return int(size[0] if isinstance(size, list) else size)
