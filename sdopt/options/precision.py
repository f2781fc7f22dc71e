"""precision: the types of weights and arithmetic, autocast, and TensorFloat-32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import override

from sdopt.errors import UsageError
from sdopt.hardware.cards import BFLOAT16, CPU_BFLOAT16, TF32, arithmetic, missing
from sdopt.hardware.ceilings import convolutions_are_rounded, products_are_rounded, tf32
from sdopt.measure.stages import VAE_DECODER
from sdopt.options import (
    Context,
    Contract,
    Finding,
    Optimization,
    Proof,
    Stage,
    Trace,
)
from sdopt.options.assumptions import a_vae, plain_weights, within_float16
from sdopt.options.base import existing
from sdopt.pipelines.components import network_problems
from sdopt.pipelines.family import family_of_pipe
from sdopt.pipelines.hub import NETWORK_WEIGHTS, hub_network
from sdopt.pipelines.loading import (
    family_of,
    is_sdxl,
    load_part,
    load_vae,
    network_config,
    part_config,
)
from sdopt.pipelines.parts import Pipeline, computing_types, denoiser_of, device_of
from sdopt.schema import Model, OneOf

if TYPE_CHECKING:
    import torch

FLOATS = ("float32", "float16", "bfloat16")
"""Types of weights that a denoiser computes in."""


def overflowing(ctx: Context, instead: str) -> list[str]:
    """Returns the conflict, if any, of float16 with a model whose numbers overflow it; `instead` is what to choose."""
    family = family_of(ctx.model)
    if family.float16 != "overflows":
        return []
    return [
        f"numbers of {family.title} overflow float16, and its images are black: choose {instead}"
    ]


@dataclass(frozen=True)
class Precision(Optimization):
    """Sets the type of the weights, and the type of the arithmetic with autocast and TensorFloat-32."""

    stage = Stage.LOAD
    assumes = (plain_weights,)

    weights: Annotated[str, OneOf(FLOATS)] = "float32"
    """The type of all parameters."""
    autocast: Annotated[str, OneOf(FLOATS[1:])] | None = None
    """The type of arithmetic under `torch.autocast`; null disables autocast."""
    tf32: Literal["default", "on", "off"] = "default"
    """TensorFloat-32: PyTorch's settings (only in cuDNN convolutions), in matrix products too, or nowhere."""

    @property
    @override
    def contract(self) -> Contract:
        if self.weights != "float32" or self.autocast or self.tf32 == "on":
            return Contract.LOSSY
        return Contract.EXACT if self.tf32 == "default" else Contract.EQUIVALENT

    @property
    @override
    def claims(self) -> frozenset[str]:
        reduced = {"latency"} if self.contract is Contract.LOSSY else set()
        return frozenset(reduced | ({"memory"} if self.weights != "float32" else set()))

    @property
    @override
    def sets_process(self) -> bool:
        return self.tf32 != "default"

    @property
    @override
    def diffusers_lines(self) -> tuple[str, ...]:
        """What does more than load the weights in their type: `pipe.to` would cast what networks keep in float32."""
        lines = ["import torch"]
        if self.tf32 != "default":
            level = "high" if self.tf32 == "on" else "highest"
            lines.append(f'torch.set_float32_matmul_precision("{level}")')
            lines.append(f"torch.backends.cudnn.allow_tf32 = {self.tf32 == 'on'}")
        if self.autocast:
            lines.append(
                f"with torch.autocast(pipe.device.type, dtype=torch.{self.autocast}):"
            )
        return tuple(lines)

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = []
        if self.tf32 == "off" and not ctx.device.is_cuda:
            reasons.append(
                f"turning TensorFloat-32 off needs a CUDA device; this runs on {ctx.device.name}"
            )
        elif self.tf32 != "default":
            reasons += missing(ctx.device, TF32)
        if "float16" in (self.weights, self.autocast):
            reasons += overflowing(ctx, "precision=bf16 or fp32")
        if "bfloat16" in (self.weights, self.autocast) and ctx.device.is_cuda:
            reasons += missing(ctx.device, BFLOAT16)
        return reasons

    @override
    def slow_here(self, ctx: Context) -> list[str]:
        if "bfloat16" not in (self.weights, self.autocast) or ctx.device.attributes.get(
            CPU_BFLOAT16, True
        ):
            return []
        return [
            f"{ctx.device.name} computes bfloat16 in software: expect it to be slower"
        ]

    @override
    def broken(self, pipe: Pipeline) -> list[str]:
        own_vae = a_vae(pipe) if isinstance(self, FullVae) else []
        return [*super().broken(pipe), *self._infinite(pipe), *own_vae]

    def _infinite(self, pipe: Pipeline) -> list[str]:
        own_vae = {"vae"} if isinstance(self, FullVae | FixedVae) else set[str]()
        return (
            within_float16(pipe, own_vae)
            if "float16" in (self.weights, self.autocast)
            else []
        )

    @override
    def load_kwargs(self) -> dict[str, Any]:
        import torch

        return {"dtype": getattr(torch, self.weights)}

    @contextmanager
    @override
    def context(self, pipe: Pipeline) -> Iterator[None]:
        import torch

        with ExitStack() as stack:
            if self.tf32 != "default":
                stack.enter_context(tf32(self.tf32 == "on"))
            if self.autocast:
                stack.enter_context(
                    torch.autocast(
                        device_of(pipe).type, dtype=getattr(torch, self.autocast)
                    )
                )
            yield

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        import torch

        if infinite := self._infinite(pipe):
            raise UsageError(f"precision: {infinite[0]}")

        def proof(trace: Trace) -> Finding:
            weights = computing_types(denoiser_of(pipe))
            products = dict(trace.denoiser.product_dtypes)
            expected = self.autocast or self.weights
            engaged = (
                weights == [self.weights]
                and trace.denoiser.autocast_dtype == self.autocast
            )
            # Compiled products may appear as kernels without an operator; then the other two checks decide.
            engaged = engaged and (
                not products
                or max(products, key=lambda name: products[name]) == expected
            )
            summary = f"weights {', '.join(weights)}; products in {', '.join(sorted(products)) or 'compiled kernels'}"
            rounded = convolved = None
            if self.tf32 != "default":
                with self.context(pipe):
                    rounded = products_are_rounded(device_of(pipe))
                    convolved = convolutions_are_rounded(device_of(pipe))
                # Convolutions use TF32 by default, so they only show whether TF32 is off.
                engaged = engaged and (
                    rounded if self.tf32 == "on" else not (rounded or convolved)
                )
                words = {True: "rounded to TF32", False: "in full"}
                summary += f"; float32 products {words[rounded]}, convolutions {words[convolved]}"
            # By default, cuDNN convolutions use TF32 on a device that supports it.
            reduced = bool(rounded or convolved)
            if (
                rounded is None
                and device_of(pipe).type == "cuda"
                and torch.backends.cudnn.allow_tf32
            ):
                reduced = (
                    torch.cuda.get_device_capability(device_of(pipe)) >= TF32.capability
                )
            facts = {
                "weights": weights,
                "products": products,
                "rounded_to_tf32": rounded,
                "convolutions_rounded_to_tf32": convolved,
                "arithmetic": arithmetic(products, expected, reduced),
            }
            return Finding(engaged, summary, facts)

        return proof


class FullVae(Precision):
    """Runs the pipeline in half precision, but the VAE in float32, with casts of the VAE's inputs and outputs.

    For SDXL, diffusers casts the VAE to float32 and back in each call, from weights rounded to half precision. Here the
    weights are loaded in float32 and never cast, and the VAE takes twice the memory between calls. For other models,
    diffusers decodes in half precision, which may overflow.
    """

    diffusers_lines = ()

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx)
        if self.weights == "float32":
            reasons.append(
                "precision.weights=float32: the VAE is already in float32; choose precision=fp32"
            )
        if self.autocast:
            reasons.append(
                f"precision.autocast={self.autocast}: would apply to the VAE; choose precision.autocast=null"
            )
        return reasons + _other_vae(ctx)

    @override
    def parts(self, model: Model, dtype: torch.dtype) -> dict[str, Any]:
        import torch

        return {"vae": load_part(model, "vae", torch.float32)}

    @override
    def parts_for(
        self, pipe: Pipeline, model: Model, dtype: torch.dtype
    ) -> dict[str, Any]:
        import torch

        # The program may have put in a VAE of its own, or none can be loaded again.
        return {"vae": deepcopy(pipe.vae).to(torch.float32)}

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        proof_of_others = super().apply(pipe)
        upcast = (
            bool(pipe.vae.config.get("force_upcast"))
            and family_of_pipe(pipe).upcasts_vae
        )
        # Otherwise diffusers casts the VAE in each call, and back to half precision.
        pipe.vae.register_to_config(force_upcast=False)
        _run_in_own_type(pipe.vae)

        def proof(trace: Trace) -> Finding:
            return _with_decoder(
                proof_of_others(trace),
                pipe,
                trace,
                "float32",
                diffusers_would_upcast=upcast,
            )

        return proof


@dataclass(frozen=True)
class FixedVae(Precision):
    """Runs all of SDXL in half precision, with a VAE whose activations do not overflow in float16.

    The weights are https://huggingface.co/madebyollin/sdxl-vae-fp16-fix, which decode nearly the same images. A model
    with random weights keeps its own VAE, in half precision.
    """

    diffusers_lines = ()

    path: str | None = None
    """Folder of the VAE, which takes precedence over `hub_id`."""
    hub_id: str = "madebyollin/sdxl-vae-fp16-fix"
    """Hugging Face Hub repository of the VAE, as in `owner/name`."""

    @override
    def conflicts(self, ctx: Context) -> list[str]:
        reasons = super().conflicts(ctx)
        if not is_sdxl(ctx.model):
            reasons.append(
                "this VAE is for SDXL, and the model is not SDXL: choose precision=fp16"
            )
        if self.weights == "float32":
            reasons.append(
                "precision.weights=float32: does not need this VAE; choose precision=fp32"
            )
        with suppress(
            UsageError
        ):  # `files` fetches it, or reports that it is missing, once it is needed
            if (folder := self._folder(ctx.model, fetch=False)) is not None:
                at = (
                    f"precision.path={self.path}"
                    if self.path
                    else f"precision.hub_id={self.hub_id}"
                )
                usual = {"latent_channels": 4, "scaling_factor": 0.18215}
                reasons += network_problems(folder, at) or misfits(
                    folder, at, ctx.model, "AutoencoderKL", usual
                )
        return reasons + _other_vae(ctx)

    @override
    def files(self, model: Model, fetch: bool) -> list[Path]:
        folder = self._folder(model, fetch)
        return (
            []
            if folder is None
            else existing(
                [folder / "config.json", folder / NETWORK_WEIGHTS], "precision"
            )
        )

    @override
    def parts(self, model: Model, dtype: torch.dtype) -> dict[str, Any]:
        folder = self._folder(model, fetch=False)
        vae = (
            load_part(model, "vae", dtype)
            if folder is None
            else load_vae(folder, dtype, random=False)
        )
        vae.register_to_config(force_upcast=False)
        return {"vae": vae}

    def _folder(self, model: Model, fetch: bool) -> Path | None:
        if self.path:
            return Path(self.path).expanduser()
        return (
            None
            if model.weights == "random"
            else hub_network(self.hub_id, "precision", fetch)
        )

    @override
    def apply(self, pipe: Pipeline) -> Proof:
        proof_of_others = super().apply(pipe)

        return lambda trace: _with_decoder(
            proof_of_others(trace), pipe, trace, self.weights
        )


def misfits(
    folder: Path, at: str, model: Model, class_name: str, usual: Mapping[str, float]
) -> list[str]:
    """Returns why a VAE cannot decode what the model's own decodes; [] if it can.

    Args:
        folder: of the VAE.
        at: the key that names it.
        model: whose VAE it replaces.
        class_name: what it must be.
        usual: keys of the configuration that must be as the model's own VAE has them, with their defaults.
    """
    config, of_model = network_config(folder), part_config(model, "vae")
    if config["_class_name"] != class_name:
        return [
            f"{at}: is of class {config['_class_name']}, and must be an {class_name}"
        ]
    reasons = []
    for key, default in usual.items():
        has = config.get(key, default)
        wants = has if of_model is None else of_model.get(key, default)
        if has != wants:
            reasons.append(
                f"{at}: is for another model: it has {key}={has}, and the model's own VAE {key}={wants}"
            )
    return reasons


def _other_vae(ctx: Context) -> list[str]:
    return (
        ["memory=tiny_vae replaces this VAE: choose one of them"]
        if "memory.tiny_vae" in ctx.chosen
        else []
    )


def _with_decoder(
    found: Finding, pipe: Pipeline, trace: Trace, wanted: str, **facts: Any
) -> Finding:
    """Extends the denoiser's finding with whether the VAE is stored in, and computes in, the type `wanted`."""
    stored, products = (
        computing_types(pipe.vae),
        sorted(trace.stages[VAE_DECODER].product_dtypes),
    )
    summary = f"VAE stored in {', '.join(stored)}, decoded in {', '.join(products) or 'no products'}"
    return found.also(
        summary,
        stored == [wanted] == products,
        **facts,
        vae_weights=stored,
        vae_products=products,
    )


def _run_in_own_type(vae: Any) -> None:
    """Makes a VAE cast its inputs to the type of its weights, and encoded latents back to the type of the image."""
    import torch
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from torch.utils._pytree import tree_map_only

    encode, decode = vae.encode, vae.decode

    def encode_in_own_type(image: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = encode(image.to(vae.dtype), *args, **kwargs)
        if "latents" in output:  # of an AutoencoderTiny
            output.latents = output.latents.to(image.dtype)
        else:
            output.latent_dist = DiagonalGaussianDistribution(
                output.latent_dist.parameters.to(image.dtype)
            )
        return output

    def decode_in_own_type(*args: Any, **kwargs: Any) -> Any:
        # Beside the latents, an AsymmetricAutoencoderKL gets the image and the mask.
        args, kwargs = tree_map_only(
            torch.Tensor, lambda given: given.to(vae.dtype), (args, kwargs)
        )
        return decode(*args, **kwargs)

    vae.__dict__ |= {"encode": encode_in_own_type, "decode": decode_in_own_type}
