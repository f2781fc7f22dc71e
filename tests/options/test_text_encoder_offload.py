"""`memory=text_encoder_offload`: text encoders are on the device while they encode, and no longer."""

from typing import Any

import accelerate
import numpy as np
import pytest
import torch

import sdopt.options.text_encoder_offload as room
from sdopt.options.compiler.inductor import Inductor
from sdopt.options.memory import PrecomputedEmbeddings
from sdopt.options.offload import ModelOffload
from sdopt.options.text_encoder_offload import TextEncoderOffload
from sdopt.pipelines.parts import bytes_of, denoiser_of, text_encoders_of
from tests.fixtures import CPU
from tests.options.applied import Applied, context_of
from tests.options.hosts import card
from tests.pipelines.tiny import tiny

CARD = card()

AXIS = "memory.text_encoder_offload"

DEVICE = torch.device("cpu", 0)
"""The device of these tests, which a move names apart from the host, `cpu`."""


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "device_of", lambda _pipe: DEVICE)


def watched(pipe: Any) -> list[tuple[str, str]]:
    """Returns what happens to a pipeline's text encoders from now on, and when its denoiser runs."""
    events: list[tuple[str, str]] = []
    for number, encoder in enumerate(text_encoders_of(pipe), 1):
        move = encoder.to

        def moved(
            place: Any, *rest: Any, number: int = number, move: Any = move
        ) -> Any:
            events.append((str(place), f"encoder {number}"))
            return move(place, *rest)

        encoder.__dict__["to"] = moved
        encoder.register_forward_hook(
            lambda *_, number=number: events.append(("runs", f"encoder {number}"))
        )
    denoiser_of(pipe).register_forward_pre_hook(
        lambda *_: events.append(("runs", "denoiser"))
    )
    return events


@pytest.mark.parametrize("name", ["flux", "sd3", "sana"])
@pytest.mark.walk(1)
def test_encoders_leave_before_the_denoiser_runs(on_a_device: None, name: str) -> None:
    plain = Applied(name, {}).images()
    applied = Applied(name, {AXIS: TextEncoderOffload()})
    events = watched(applied.pipe)
    assert np.array_equal(applied.images(), plain)
    first = events.index(("runs", "denoiser"))
    there: set[str] = set()
    for what, which in events[:first]:
        if what == "cpu:0":
            there.add(which)
            assert there == {which}, "one at a time"
        elif what == "cpu":
            there.discard(which)
        else:
            assert which in there, "an encoder runs on the device"
    assert not there, "none is left"
    steps = {event for event in events[first:] if event[0] == "cpu:0"}
    assert not steps, "none comes back while the denoiser runs"
    ran = [which for what, which in events if what == "runs"]
    assert len({*ran}) == len(text_encoders_of(applied.pipe)) + 1
    assert "encode_prompt" not in vars(applied.pipe), "as it was after the call"


def test_the_proof_asks_where_they_rest(
    on_a_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the device is the host, so that all of them rest there."""
    applied = Applied("flux", {AXIS: TextEncoderOffload()})
    _, finding, _ = applied.traced()
    assert not finding.engaged
    assert finding.facts["resting_on_device_gib"] == finding.facts["encoders_gib"] > 0

    def elsewhere(network: Any, device: str | None = None) -> int:
        return bytes_of(network) if device is None else 0

    monkeypatch.setattr(room, "bytes_of", elsewhere)
    assert applied.traced()[1].engaged
    accelerate.hooks.remove_hook_from_module(applied.pipe.text_encoder)
    _, finding, _ = applied.traced()
    assert not finding.engaged
    assert finding.facts["hooked"] == 1


def test_what_it_cannot_be_combined_with() -> None:
    pipe, option = tiny("flux"), TextEncoderOffload()

    def obstacles(device: Any = CARD, **chosen: Any) -> list[str]:
        return option.conflicts(context_of(pipe, device, **chosen))

    assert obstacles() == []
    assert obstacles(compiler=Inductor(targets=["denoiser"])) == []
    whole = Inductor(targets=["text_encoder", "denoiser"])
    assert "compiler.targets" in obstacles(compiler=whole)[0]
    assert "moves the text encoders too" in obstacles(memory=ModelOffload())[0]
    assert "frees" in obstacles(memory=PrecomputedEmbeddings())[0]
    assert "needs a CUDA device" in obstacles(CPU)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flux", "sana"])
def test_on_cuda_the_denoiser_runs_without_them(name: str) -> None:
    device = torch.device("cuda")
    pipe = tiny(name)
    pipe.__dict__["_sdopt_device"] = device
    TextEncoderOffload().apply(pipe)
    held: list[int] = []

    def note(*_: object) -> None:
        encoders = text_encoders_of(pipe)
        held.append(sum(bytes_of(encoder, "cuda") for encoder in encoders))

    denoiser_of(pipe).register_forward_pre_hook(note)
    with TextEncoderOffload().context(pipe):
        as_asked = {"use_resolution_binning": False} if name == "sana" else {}
        pipe("a red circle", height=64, width=64, num_inference_steps=2, **as_asked)
    assert held
    assert not any(held)
    assert next(denoiser_of(pipe).parameters()).device.type == "cuda"
