"""What a program turns on is what a worker runs: of options that keep the image, the image cannot tell."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from sdopt.library.process import ProcessChanges
from sdopt.measure.trace import trace_call
from sdopt.pipelines.parts import Pipeline
from sdopt.programs.writer import written
from sdopt.variant import Variant
from sdopt.worker.host import PipelineHost
from tests.fixtures import CPU, Composers
from tests.programs.test_programs import _options, of

Counts = dict[str, float]


def of_the_worker(variant: Variant) -> Counts:
    """What runs in a call of a worker, by the name of the operator, the layer or the type."""
    changes = ProcessChanges()
    with changes.noted():
        host = PipelineHost(variant, CPU)
        host.prepare()
        host._call(0)  # as in a program, what is compiled is compiled in the first one
        counts = trace_call(host._pipe, lambda: host._call(0), cuda=False).counts()
    changes.put_back()
    return counts


def of_the_program(text: str) -> Counts:
    """What runs in the call of a program, which is made again under the profiler."""
    found: Counts = {}

    def traced(pipe: Pipeline, **arguments: Any) -> Any:
        def call() -> Any:
            given = arguments["generator"]
            several = isinstance(given, list)
            clones = [one.clone_state() for one in (given if several else [given])]
            generator = clones if several else clones[0]
            return pipe(**arguments | {"generator": generator})

        output = call()  # what is compiled is compiled in the first one
        torch.clear_autocast_cache()  # weights that it cast stay while its context does
        found.update(trace_call(pipe, call, cuda=False).counts())
        return output

    names: dict[str, Any] = {"__name__": "__main__", "traced": traced}
    changes, hydra = ProcessChanges(), GlobalHydra.get_state()
    GlobalHydra.instance().clear()  # a program composes its options by itself
    try:
        with changes.noted():
            exec(text.replace("image = pipe(", "image = traced(pipe, "), names)
    finally:
        GlobalHydra.set_state(hydra)
        changes.put_back()
    return found


def differing(variant: Variant, change: Callable[[str], str] = str) -> list[str]:
    """The names of what runs otherwise in the program of a variant than in its worker."""
    mine = of_the_worker(variant)
    theirs = of_the_program(change(written(variant, CPU).text))
    names = mine.keys() | theirs.keys()
    return [
        f"{name}: {mine.get(name, 0):g} in the worker, {theirs.get(name, 0):g}"
        for name in sorted(names)
        if mine.get(name, 0) != theirs.get(name, 0)
    ]


EXACT = (
    "attention=vanilla",
    "layout=channels_last",
    "grad_mode=inference_mode",
    "memory=[vae_slicing]",
    "workload.batch_size=2",
)
"""Options whose images differ by rounding at most."""


def test_options_that_keep_the_image_are_on(composer: Composers) -> None:
    variant = of(composer, *EXACT)
    assert differing(variant) == []


@pytest.mark.parametrize(
    "lost",
    [
        "pipe.unet.set_attn_processor(AttnProcessor())",
        "pipe.unet.to(memory_format=torch.channels_last)",
        "pipe.vae.enable_slicing()",
    ],
)
@pytest.mark.walk(1)
def test_one_that_is_lost_is_seen(composer: Composers, lost: str) -> None:
    """The red path: the image stays the same, and only what ran tells."""
    variant = of(composer, *EXACT)

    def without(text: str) -> str:
        assert f"{lost}\n" in text
        return text.replace(f"{lost}\n", "")

    assert differing(variant, without) != []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("model", ["emoji", "emoji_dit"])
@pytest.mark.parametrize("option", _options())
def test_every_option(composer: Composers, option: str, model: str) -> None:
    torch._dynamo.reset()
    for more in (
        [],
        ["workload.steps=10"],
        ["workload.batch_size=2", "workload.size=96"],
    ):
        variant = of(composer, f"model={model}", option, *more)
        if not variant.conflicts(CPU):
            break
    else:
        pytest.skip("; ".join(variant.conflicts(CPU)))
    assert differing(variant) == []
