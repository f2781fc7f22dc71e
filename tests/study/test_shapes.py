"""One process serves several shapes: what a compiler makes at each, and which options do not suit several."""

from typing import Any

import pytest

from sdopt.errors import UsageError
from sdopt.measure.compilation import compilation
from sdopt.worker.host import PipelineHost
from tests.command import SMOKE
from tests.fixtures import CPU, Composers
from tests.trial.options import Call, handle_calls


@pytest.mark.slow
def test_a_worker_counts_graphs_and_traces_at_each_shape(composer: Composers) -> None:
    """A stand-in for a compiler makes a graph for each image of a call; one image is no batch to slice."""
    host = PipelineHost(
        composer([*SMOKE, "workload.batch_size=[1,2]", "memory=vae_slicing"]).variant(
            None
        ),
        CPU,
    )
    host.prepare()

    def compiles(call: Call, arguments: dict[str, Any]) -> Any:
        for _ in arguments["generator"]:
            with compilation():
                pass
        return call(**arguments)

    handle_calls(host._pipe, compiles)
    for place in range(2):
        assert host.time_once(place).graphs == 1 + place
        [sliced] = [
            item
            for item in host.prove(place).evidence
            if item.axis == "memory.vae_slicing"
        ]
        assert sliced.engaged == bool(place)


FIXED = "compiler.dynamic=false"
GUIDANCE = f"compiler=inductor {FIXED} caching=guidance_interval workload.steps=10"


def sizes(count: int) -> str:
    return "workload.size=[" + ",".join(str(64 + 8 * n) for n in range(count)) + "]"


@pytest.mark.parametrize(
    ("overrides", "conflict"),
    [
        # An option names the shape at which it cannot take effect, or what it lacks at any.
        (
            "memory=[vae_slicing] workload.size=64 workload.batch_size=[1,2]",
            "or more (at 64×64, batch 1)",
        ),
        (
            "memory=[vae_slicing] workload.size=[64,72]",
            "set workload.batch_size to 2 or more",
        ),
        # A compiler makes no more than so many graphs: of each shape one, or several.
        (
            f"compiler=inductor {FIXED} {sizes(9)}",
            "give fewer shapes, or choose compiler.dynamic=null",
        ),
        (f"compiler=inductor {sizes(9)}", ""),
        (f"compiler=regional {FIXED} {sizes(5)}", "needs 10 graphs for 5 shapes"),
        (
            f"compiler=regional model=sd15 model.weights=random {FIXED} {sizes(3)}",
            "needs 12 graphs for 3 shapes",
        ),
        (f"{GUIDANCE} {sizes(4)}", ""),
        # Steps without guidance run half of the batch, which may be the whole batch of another shape.
        (f"{GUIDANCE} workload.batch_size=[1,3,5,7,9]", "needs 10 graphs for 5 shapes"),
        (f"{GUIDANCE} workload.batch_size=[1,2,4,8,16]", ""),
        # Sizes that become symbols, beside autograd.
        (
            "compiler=inductor compiler.dynamic=true workload.size=64 grad_mode=enabled",
            "records for any shape",
        ),
        (
            "compiler=inductor workload.size=[64,96] grad_mode=enabled",
            "records for any shape",
        ),
        ("compiler=inductor workload.batch_size=[1,2] grad_mode=enabled", ""),
        (f"compiler=inductor {FIXED} workload.size=[64,96] grad_mode=enabled", ""),
        # A text encoder does not see the size.
        (
            f"compiler=inductor compiler.targets=[text_encoder,decoder] {sizes(9)} grad_mode=enabled",
            "autograd records",
        ),
        (
            f"compiler=inductor compiler.targets=[text_encoder] {sizes(9)} grad_mode=enabled",
            "",
        ),
        (f"compiler=inductor compiler.targets=[text_encoder] {sizes(9)} {FIXED}", ""),
    ],
)
def test_a_conflict_names_the_shapes_or_what_is_wrong_with_any(
    composer: Composers, overrides: str, conflict: str
) -> None:
    found = composer([*SMOKE, *overrides.split()]).variant("it").conflicts(CPU)
    assert [conflict in said for said in found] == [True] * bool(conflict)


def test_a_workspace_that_is_sized_once_takes_one_shape(composer: Composers) -> None:
    found = (
        composer([*SMOKE, "compiler=deepspeed", "workload.size=[64,72]"])
        .variant("it")
        .conflicts(CPU)
    )
    assert [
        said for said in found if said.endswith("give one workload.size and batch_size")
    ]


def test_shapes_belong_to_the_whole_study(composer: Composers) -> None:
    with pytest.raises(
        UsageError, match=r"a list in workload\.size or .* applies to the whole study"
    ):
        composer([*SMOKE, "workload.size=[64,72]"]).variant(
            "it", ["workload.batch_size=4"]
        )
