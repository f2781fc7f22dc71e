"""Tiny pipelines of transformers with random weights, to which tests apply options in their own process."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sdopt.assembly import Assembly
from sdopt.hardware.device import Device
from sdopt.measure.trace import Trace, trace_call
from sdopt.options import Context, Finding, Optimization
from sdopt.pipelines.factory import configs_of
from sdopt.pipelines.family import family_named
from sdopt.pipelines.loading import LoadedModel, guidance_of
from sdopt.schema import Scheduler, Workload
from tests.fixtures import CPU
from tests.pipelines.tiny import tiny

PROMPTS = ("a red circle", "a much longer prompt about a blue house at dawn")

STEPS = 6


class Applied:
    """A tiny pipeline with options, which draws images of 64×64 pixels in six steps."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Optimization],
        scale: float = 4.0,
        **settings: Any,
    ) -> None:
        self.pipe = tiny(name, **settings)
        self.assembly = Assembly.of(self.pipe, options)
        self.assembly.prepare_inputs(PROMPTS)
        family = family_named(type(self.pipe).__name__)
        guidance = guidance_of(model_of(self.pipe))
        self._arguments = {
            guidance.argument: scale,
            **family.call,
            "height": 64,
            "width": 64,
            "output_type": "np",
        }
        self._negative = guidance.needs_negative

    def images(self, prompts: tuple[str, ...] = PROMPTS, **changes: Any) -> np.ndarray:
        """Draws an image of each prompt, each from noise of its own."""
        given = {
            **self._arguments,
            "num_inference_steps": STEPS,
            **changes,
            "prompt": list(prompts),
        }
        given["generator"] = [
            torch.Generator().manual_seed(seed) for seed in range(len(prompts))
        ]
        if self._negative:
            given["negative_prompt"] = [""] * len(prompts)
        with self.assembly.entered(), contextlib.redirect_stderr(io.StringIO()):
            drawn: np.ndarray = self.pipe(**self.assembly.changed(given)).images
        return drawn

    def traced(self) -> tuple[np.ndarray, Finding, Trace]:
        """Draws the images, and returns what the trace shows of the only option."""
        images: list[np.ndarray] = []

        def call() -> Any:
            images.append(self.images())

        with contextlib.redirect_stderr(io.StringIO()):
            trace = trace_call(self.pipe, call, cuda=False)
        [finding] = self.assembly.findings(trace).values()
        return images[0], finding, trace


def model_of(pipe: Any) -> LoadedModel:
    name = type(pipe).__name__
    return LoadedModel(
        "pipeline",
        "path",
        size=64,
        class_name=name,
        configs=configs_of(pipe),
        guidance_scale=4.0,
    )


def context_of(pipe: Any, device: Device = CPU, **chosen: Any) -> Context:
    workload = Workload(
        size=64, batch_size=1, guidance_scale=chosen.pop("guidance_scale", None)
    )
    return Context(
        device,
        model_of(pipe),
        workload,
        chosen,
        Scheduler("FlowMatchEulerDiscreteScheduler"),
    )


def far(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).max())
