"""What compilers really make of the packaged model: each of them takes a minute or more on two cores."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import sdopt
from sdopt.config.composer import HydraComposer
from sdopt.contract import Contract
from sdopt.measure.compilation import compiled_so_far
from sdopt.options.compiler import InductorDynamic
from sdopt.pipelines.parts import denoiser_of, unwrapped
from sdopt.worker.host import PipelineHost
from tests.command import SMOKE
from tests.fixtures import CPU, Load
from tests.options import walk
from tests.options.hosts import TWO_STEPS, evidence, latents
from tests.pipelines.tiny import TINY, tiny

pytestmark = pytest.mark.slow

CASES = {
    "every target": [
        "compiler=inductor",
        "compiler.targets=[text_encoder,denoiser,decoder]",
    ],
    "regional": ["compiler=regional"],
    "regional, two of five steps whole": [
        "compiler=regional",
        "caching=deepcache",
        "workload.steps=5",
    ],
    "any shape": ["compiler=inductor_dynamic"],
    "whole step": ["compiler=whole_step"],
    "whole step of Euler": ["compiler=whole_step", "scheduler=euler"],
    "whole step of an image": [
        "compiler=whole_step",
        "scheduler=euler",
        "task=inpaint",
        "task.strength=1",
    ],
    "package": ["compiler=aot"],
    "openvino": ["compiler=openvino"],
    "openvino of the decoder too": [
        "compiler=openvino",
        "compiler.targets=[denoiser,decoder]",
    ],
    "onnxruntime": ["compiler=onnxruntime"],
}


def work(overrides: list[str]) -> list[str]:
    """The overrides that choose another scheduler or task, which eager needs too."""
    return [override for override in overrides if not override.startswith("compiler")]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    torch._dynamo.reset()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sdopt" / "aot"


@pytest.fixture
def dynamo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchDynamo, which decides what is compiled anew and what runs eagerly, without Inductor behind it."""
    torch._dynamo.reset()
    compile_with = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda module, dynamic, **_: compile_with(
            module, backend="eager", dynamic=dynamic
        ),
    )


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_is_proved_and_gives_the_latents_of_eager(
    session: Load, tmp_path: Path, overrides: list[str]
) -> None:
    for package in {"compiler=openvino", "compiler=onnxruntime"} & set(overrides):
        pytest.importorskip(package.partition("=")[2])
    compiled = session(TWO_STEPS, *overrides)
    ours, plain = (
        latents(host, tmp_path / str(i))
        for i, host in enumerate((compiled, session(TWO_STEPS, *work(overrides))))
    )
    found = evidence(compiled, "compiler")
    assert found.engaged, found
    assert compiled._variant.optimizations["compiler"].contract is Contract.EQUIVALENT
    assert compiled_so_far()[0] > 0
    assert float((ours - plain).abs().max()) < 1e-3 * float(plain.std())
    restore(compiled)
    assert not evidence(compiled, "compiler").engaged


ON_TRANSFORMERS = ("trace", "regional", "inductor", "aot", "openvino", "onnxruntime")


@pytest.mark.usefixtures("packages")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of exporters
@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("compiler", ON_TRANSFORMERS)
def test_a_compiled_transformer_draws_what_eager_does(compiler: str, name: str) -> None:
    """With two prompts of different lengths in a call, and then with each of them alone."""
    chosen = f"compiler={compiler}"
    if not walk.is_installed(chosen) or name in walk.LOUD.get(chosen, ()):
        pytest.skip("not here")
    pipe = tiny(name)
    sdopt.optimize(pipe, compiler=compiler, prompts=[*walk.PROMPTS, ""])
    long, short = walk.PROMPTS[1:], walk.PROMPTS[:1]
    for prompts in (walk.PROMPTS, long, short):
        plain = drawn(tiny(name), prompts)
        far = abs(drawn(pipe, prompts) - plain).max()
        assert far < 1e-2 * plain.std(), prompts


def drawn(pipe: Any, prompts: list[str]) -> Any:
    """Returns the pictures of a short call as numbers between 0 and 1."""
    generators = [torch.Generator().manual_seed(seed) for seed, _ in enumerate(prompts)]
    call = walk.call_of(pipe, len(prompts)) | {"generator": generators}
    prompts = [*prompts]  # which a pipeline may change
    return pipe(prompt=prompts, num_inference_steps=3, output_type="np", **call).images


def restore(host: PipelineHost) -> None:
    """Undoes what a compiler did to the denoiser."""
    unet = unwrapped(denoiser_of(host._pipe))
    for module in unet.modules():
        module._compiled_call_impl = None
    host._pipe.unet = unet
    for name in ("step", "scale_model_input", "set_timesteps"):
        vars(host._pipe.scheduler).pop(name, None)


def test_a_package_is_compiled_once(
    session: Load, packages: Path, tmp_path: Path
) -> None:
    cold = session("compiler=aot", TWO_STEPS)
    first = latents(cold, tmp_path / "first")
    cold_s, _ = compiled_so_far()
    assert len(list(packages.glob("*.pt2"))) == 1
    assert packages.stat().st_mode & 0o777 == 0o700
    warm = session("compiler=aot", TWO_STEPS)
    assert torch.equal(latents(warm, tmp_path / "second"), first)
    assert [
        said.split()[0] for said in evidence(warm, "compiler").facts["packages"]
    ] == ["loaded"]
    assert compiled_so_far()[0] < cold_s
    # A package has no weights: with those of another model it draws other images.
    other = session("compiler=aot", TWO_STEPS)
    with torch.no_grad():
        other._pipe.unet.conv_out.weight.mul_(0.5)
    assert not torch.equal(latents(other, tmp_path / "third"), first)


@pytest.mark.usefixtures("dynamo_alone")
@pytest.mark.parametrize(
    ("attention", "square", "anew"),
    [
        ("default", False, 0),
        ("default", True, 1),
        ("sliced", False, 1),
        ("sliced_max", False, 1),
    ],
)
def test_any_shape_is_refuted_where_sizes_are_constants(
    session: Load,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    square: bool,
    anew: int,
) -> None:
    if square:
        monkeypatch.setattr(InductorDynamic, "context", lambda *_: nullcontext())
    host = session("compiler=inductor_dynamic", f"attention={attention}", TWO_STEPS)
    found = evidence(host, "compiler")
    assert found.facts["compiled_anew"] == anew
    assert found.engaged is (anew == 0)


SHAPES = "workload.steps=2 workload.size=[64,96] workload.batch_size=[1,2]"
GUIDED_IN_PART = "caching=guidance_interval workload.steps=3 workload.batch_size=[1,2]"


@pytest.mark.usefixtures("dynamo_alone")
@pytest.mark.parametrize(
    ("chosen", "graphs"),
    [
        (f"compiler=inductor_dynamic {SHAPES}", [1, 0, 0, 0]),
        (f"compiler=inductor compiler.dynamic=false {SHAPES}", [1, 1, 1, 1]),
        # For one image, batches of 2 and 1; for two, batches of 4 and 2.
        (f"compiler=inductor compiler.dynamic=false {GUIDED_IN_PART}", [2, 1]),
    ],
)
def test_what_a_new_shape_compiles_is_counted(
    composer: type[HydraComposer], chosen: str, graphs: list[int]
) -> None:
    host = PipelineHost(composer([*SMOKE, *chosen.split()]).variant(None), CPU)
    host.prepare()
    for expected in (graphs, [0] * len(graphs)):
        assert [
            host.time_once(place).graphs for place in range(len(graphs))
        ] == expected
    assert all(
        evidence.engaged
        for place in range(len(graphs))
        for evidence in host.prove(place).evidence
    )


@pytest.mark.usefixtures("dynamo_alone")
def test_calls_after_dynamos_limit_are_seen(session: Load) -> None:
    """A limit of one graph leaves out the other batch size."""
    chosen = (
        "compiler=inductor",
        "compiler.dynamic=false",
        "caching=guidance_interval",
        "workload.steps=3",
    )
    host = session(*chosen)
    with torch._dynamo.config.patch(recompile_limit=1):
        host.time_once()
        found = evidence(host, "compiler")
    assert not found.engaged
    assert found.facts["compiled_regions_run"] > 0
    assert "which are not all of 2 calls of the denoiser" in found.summary
