"""What tests of options share: cards, what a worker's host shows and draws, and stand-ins for CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sdopt.hardware.device import Device
from sdopt.measure.trace import trace_call
from sdopt.options.base import Finding
from sdopt.options.compiler.graphs import Tensors
from sdopt.record.records import Promise, VariantResult
from sdopt.record.samples import Evidence
from sdopt.variant import Variant
from sdopt.worker.draws import latents_file, timed_draw
from sdopt.worker.host import PipelineHost

TWO_STEPS = "workload.steps=2"


def card(major: int = 9, minor: int = 0, **attributes: Any) -> Device:
    """A planned card, so that what is installed here is no matter; with `known` it is of this machine."""
    return Device("cuda", 0, "a GPU", (major, minor), 80.0, 80.0, attributes=attributes)


def evidence(host: PipelineHost, axis: str) -> Evidence:
    """The evidence of the one option whose axis begins or ends so, as `memory.group_offload` does."""
    [found] = [
        item
        for item in host.prove().evidence
        if item.axis.startswith(axis) or item.axis.endswith(axis)
    ]
    return found


def proved(host: PipelineHost, axis: str) -> Finding:
    """What the proof of an axis finds in the trace of a call."""
    return host._assembly.proofs[axis](trace_call(host._pipe, host._call, cuda=False))


def image(host: PipelineHost) -> np.ndarray:
    """The images of a call, (n, height, width, 3), from 0 to 1."""
    drawn: np.ndarray = host._call(output_type="np").images
    return drawn


def latents(host: PipelineHost, folder: Path) -> torch.Tensor:
    """The latents after the last step of the timed call, float32."""
    batch = host.generate(0, timed_draw(host._variant), folder)
    files = [latents_file(folder / record.path) for record in batch.records]
    return torch.stack([load_file(file)["latents"] for file in files])


def forward_is_its_own(host: Any) -> None:
    """Takes off a denoiser what an option has put in the place of its forward function."""
    del host._pipe.unet.forward


def row_of(variant: Variant) -> VariantResult:
    """What a study records of a variant before it measures it."""
    return VariantResult(
        variant.name,
        "variant",
        dict(variant.choices),
        list(variant.overrides),
        variant.config,
        variant.contract,
        promises={
            axis: Promise(option.promised(), sorted(option.claimed()))
            for axis, option in variant.applied
        },
    )


class StubGraphs:
    """Stands in for `torch.cuda`: a graph that replays what was captured, by calling it again on the same tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[Any] = []
        self.streams: list[Any] = []
        self.replayed = 0
        stubs, forward, capturing = self, Tensors.forward, list[Any]()

        class Stream:
            def wait_stream(self, _other: Any) -> None:
                pass

        class Graph:
            calls: list[tuple[Tensors, tuple[torch.Tensor, ...], Any]]

            def replay(self) -> None:
                stubs.replayed += 1
                for call, tensors, results in self.calls:
                    for own, new in zip(results, forward(call, *tensors), strict=True):
                        own.copy_(new)

        @contextmanager
        def graph(made: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
            made.calls = []
            capturing.append(made)
            stubs.captured.append(pool)
            stubs.streams.append(stream)
            yield
            capturing.pop()

        @contextmanager
        def stream(chosen: Any) -> Iterator[None]:
            stubs.streams.append(chosen)
            yield

        def recorded(call: Tensors, *tensors: torch.Tensor) -> Any:
            results = forward(call, *tensors)
            if capturing:
                capturing[-1].calls.append((call, tensors, results))
            return results

        monkeypatch.setattr(Tensors, "forward", recorded)
        for name, stub in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": graph,
            "stream": stream,
            "current_stream": Stream,
            "graph_pool_handle": object,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stub)
