"""Functions of a user's own file: options like any other, and a pipeline that one builds like any other model."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdopt.apps.suite.outcomes import Standing, outcomes_of
from sdopt.assembly import Assembly
from sdopt.config.composer import composer_of
from sdopt.contract import Contract
from sdopt.errors import ConflictError, UsageError
from sdopt.library import load
from sdopt.options.patch import Patch
from sdopt.pipelines.factory import describe, remember
from sdopt.record.records import Status
from sdopt.record.samples import Evidence
from sdopt.schema import Model, Task
from sdopt.worker.draws import draw_of
from sdopt.worker.forkserver import start_fork_server
from sdopt.worker.host import PipelineHost
from sdopt.worker.process import WorkerProcess
from sdopt.worker.protocol import TracedCall, WorkerError
from tests.command import SMALL, SMOKE, refused, sdopt
from tests.fakes import FakeWorker, fake_workers
from tests.fixtures import CPU, Compose, Load

CODE = """
import numpy as np
import torch
from diffusers import DiffusionPipeline, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor2_0

from sdopt.reference import LORAS, MODEL, TRANSFORMER

def steps(pipe):
    forward = pipe.unet.forward
    pipe.unet.forward = lambda sample, *a, **k: forward(sample * 1.1, *a, **k)

def freer(pipe):
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)

def made_freer():
    pipe = make()
    freer(pipe)
    return pipe

def styled(pipe):
    pipe.load_lora_weights(str(LORAS), weight_name="fxemoji.safetensors")

def halved(pipe):
    pipe.unet.set_attn_processor(Halved())

def made_halved():
    pipe = make()
    halved(pipe)
    return pipe

class Halved(AttnProcessor2_0):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) / 2

def null(pipe):
    pass

def fewer(pipe):
    whole = pipe.scheduler.set_timesteps
    pipe.scheduler.set_timesteps = lambda steps, **how: whole(-(-steps // 2), **how)

def paler(pipe):
    pipe.vae.decoder.conv_out.weight.data.mul_(0.7)

def nhwc(pipe):
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)

def nchw(pipe):
    pipe.unet.to(memory_format=torch.contiguous_format)
    pipe.vae.to(memory_format=torch.contiguous_format)

class Own(StableDiffusionPipeline):
    pass

def make():
    return StableDiffusionPipeline.from_pretrained(MODEL)

def own():
    return Own(**make().components, requires_safety_checker=False)

def number():
    return 3

def breaks():
    raise RuntimeError("my mistake")

def noisy():
    pipe = make()
    pipe.unet.conv_in.bias.data[0] = float("nan")
    return pipe

def flux():
    return DiffusionPipeline.from_pretrained(TRANSFORMER)

def drawn():
    pipe = make()
    bias = pipe.unet.conv_in.bias.data
    bias += torch.from_numpy(np.random.rand(len(bias)).astype("float32"))
    return pipe

def other_task():
    return StableDiffusionImg2ImgPipeline.from_pretrained(MODEL)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("patch={}:freer caching=deepcache", "without FreeU"),
        ("model.factory={}:made_freer caching=deepcache", "without FreeU"),
        ("model.factory={}:made_halved attention=vanilla", "the processors Halved"),
        ("patch={}:styled attention=fused_qkv", "would ignore the LoRA"),
        ("patch={}:halved caching=deepcache", ""),
        ("model.factory={}:made_halved layout=channels_last", ""),
    ],
)
def test_what_an_option_would_leave_out_of_ones_own_is_refused(
    code: Path, variant: Compose, words: str, said: str
) -> None:
    overrides = words.format(code / "mine.py").split(" ")
    if "factory" in words:
        model = Model(weights="factory", factory=overrides[0].partition("=")[2])
        remember(model, describe(model, Task()))
        overrides += ["model=factory", "model.size=32"]
    chosen = variant(*overrides, "workload.size=32")
    if said:
        with pytest.raises(ConflictError, match=said):
            Assembly.load(chosen, "cpu")
    else:
        assert Assembly.load(chosen, "cpu").proofs


@pytest.mark.parametrize(
    ("function", "layer", "width"),
    [
        ("make", "unet.mid_block.attentions.{}.proj_in", 160),
        ("flux", "transformer.transformer_blocks.{}.attn.to_q", 192),
    ],
)
def test_a_lora_of_which_ones_own_lacks_a_layer_is_refused(
    code: Path, variant: Compose, function: str, layer: str, width: int
) -> None:
    shape = (4, width, 1, 1) if function == "make" else (4, width)
    pair = torch.ones(shape), torch.ones(shape).transpose(0, 1).contiguous()
    tensors: dict[str, torch.Tensor] = {}
    for number in (0, 9):
        names = [f"{layer.format(number)}.lora_{which}.weight" for which in "AB"]
        tensors |= {name: each.clone() for name, each in zip(names, pair, strict=True)}
    file, made = code / "half.safetensors", f"{code / 'mine.py'}:{function}"
    save_file(tensors, file)
    words = ["model=factory", f"model.factory={made}", "model.size=32"]
    chosen = variant(*words, "lora=loaded", f"lora.path={file}", "workload.size=32")
    with pytest.raises(
        ConflictError, match=r"half\.safetensors holds .* le(ave|ft) out"
    ):
        Assembly.load(chosen, "cpu")


def test_a_fused_lora_counts_beside_one_that_a_function_loads(
    code: Path, session: Load
) -> None:
    words = ("lora=fused", "lora.weight_name=high_contrast.safetensors")
    both = session(*words, f"patch={code}/mine.py:styled", "workload.steps=2").prove()
    by_axis = {each.axis: each for each in both.evidence}
    assert by_axis["lora"].engaged, by_axis["lora"].summary
    assert by_axis["patch"].engaged


@pytest.mark.parametrize(
    ("layout", "function", "idle", "said"),
    [
        ("contiguous", "steps", set(), "unet"),
        ("contiguous", "null", {"patch"}, "left the pipeline"),
        ("contiguous", "fewer", set(), "scheduler"),
        ("contiguous", "paler", set(), "vae"),  # values alone are other ones
        ("contiguous", "nhwc", {"layout"}, "unet"),
        ("channels_last", "nchw", {"layout"}, "unet"),
    ],
)
def test_says_what_it_changed(
    session: Load, code: Path, layout: str, function: str, idle: set[str], said: str
) -> None:
    traced = session(f"layout={layout}", f"patch={code}/mine.py:{function}").prove()
    evidence = {item.axis: item for item in traced.evidence}
    assert {axis for axis, item in evidence.items() if not item.engaged} == idle
    assert said in evidence["patch"].summary


@pytest.mark.slow
def test_what_a_default_names_is_not_held_against_it_but_what_was_chosen_is(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = {("none", "patch"), ("last", "layout"), ("undone", "layout")}

    def prove(worker: FakeWorker, _shape_index: int = 0) -> TracedCall:
        choices = worker.variant.choices.items()
        found = [
            Evidence(axis, name, (worker.variant.name, axis) not in idle, "0 of 3")
            for axis, name in choices
        ]
        return TracedCall(found, None, {"operators": 1.0}, [])

    monkeypatch.setattr(FakeWorker, "_prove", prove)
    variants = (
        "{baseline:[],none:[patch:mine.py:null],"
        "last:[patch:mine.py:nhwc],undone:[layout:channels_last,patch:mine.py:nchw]}"
    )
    with fake_workers():
        done = sdopt(
            code, "run", "study=explicit", f"study.variants={variants}", *SMOKE
        )
    found = {row.name: row for row in done.result.candidates}
    assert found["none"].status is Status.NOT_ENGAGED
    assert "not_engaged: the option ran, and nothing shows" in done.shown
    assert found["last"].status is Status.OK
    assert "changed what layout=contiguous" in found["last"].reason
    plain = [
        outcome.standing
        for outcome in outcomes_of(done.result)
        if outcome.option == "contiguous"
    ]
    assert plain == [Standing.TOOK_EFFECT]
    assert found["undone"].status is Status.NOT_ENGAGED
    assert "layout=channels_last: 0 of 3" in found["undone"].reason
    assert "leave one of the two out" in found["undone"].reason


def test_a_model_that_cannot_be_built_is_an_error(code: Path) -> None:
    for function, said in (
        ("mine.py:nothing", "defines no function nothing"),
        ("mine.py:number", "returns a int"),
        ("mine.py:other_task", "choose task=img2img"),
        ("mine.py:noisy", "holds numbers in unet.conv_in.bias that are not finite"),
    ):
        with pytest.raises(UsageError, match=said):
            describe(Model("mine", "factory", factory=f"{code}/{function}"), Task())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("drawn", "builds other weights each time .unet.conv_in.bias."),
        ("flux", ""),
    ],
)
def test_a_worker_runs_the_model_that_was_described(
    variant: Compose, code: Path, function: str, said: str
) -> None:
    """What a function draws by chance differs between processes; and a worker knows what it has built."""
    words = [f"model={code}/mine.py:{function}", "workload.size=64"]
    if function == "flux":
        words += ["scheduler=flow_euler", "model.max_sequence_length=24"]
    chosen = variant(*words, "model.size=64", "workload.steps=1")
    remember(chosen.model, describe(chosen.model, Task()))
    places = code / "log", code / "scratch"
    worker = WorkerProcess(start_fork_server(), CPU, 60, chosen, *places)
    try:
        if said:
            with pytest.raises(WorkerError, match=said):
                worker.ask(PipelineHost.prepare)
        else:
            worker.ask(PipelineHost.prepare)
            assert worker.ask(PipelineHost.time_once).seconds > 0
    finally:
        worker.kill()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=mine.py:breaks", "RuntimeError: my mistake"),
        (
            "model=mine.py:make workload.size=null",
            "64×64 pixels, and model.size=512: add model.size=64",
        ),
        ("model=factory", "model.factory: must be given"),
        ("patch=mine.py:nothing", "defines no function nothing"),
        (
            "model=mine.py:made_halved workload.size=64 model.size=64 attention=vanilla",
            "attention=vanilla: would replace the processors Halved",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(
    code: Path, override: str, said: str
) -> None:
    refused(code, "run", *SMOKE, "layout=channels_last", *override.split(), says=said)


OWN = """
from __future__ import annotations
from dataclasses import dataclass

import torch
from diffusers import StableDiffusionPipeline
from lies_beside import MODEL

@dataclass
class Settings:
    source: str = str(MODEL)

def make():
    pipe = StableDiffusionPipeline.from_pretrained(Settings().source)
    BODY
    return pipe
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", None),
        ("pipe.text_encoder = None", "returns a pipeline without text_encoder"),
        ("pipe.unet.register_to_config(in_channels=17)", "a model for inpainting only"),
        ("pipe.unet.encoder_hid_proj = pipe.vae", "with an IP-Adapter, whose pictures"),
        ("pipe.unet.image_proj = pipe.vae", "with an IP-Adapter, whose pictures"),
        ("pipe.enable_sequential_cpu_offload(device='cpu')", "is moved while it runs"),
        (
            "pipe.load_lora_weights(MODEL.with_name('loras') / 'fxemoji.safetensors')",
            "with a LoRA beside the weights of its unet: fuse it",
        ),
        (
            "pipe.unet.to(torch.float8_e4m3fn)",
            "whose unet is quantized .such as conv_in",
        ),
        (
            "pipe.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)",
            "whose unet is quantized",
        ),
        ("raise SystemExit('no card')", "SystemExit: no card"),
        (
            "return pipe\n\nimport not_there\n\ndef other(pipe):\n    pass",
            "ModuleNotFoundError: No module named",
        ),
    ],
)
def test_a_file_may_import_what_lies_beside_it_and_must_return_a_whole_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str | None
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lies_beside.py").write_text("from sdopt.reference import MODEL\n")
    (tmp_path / "own.py").write_text(OWN.replace("BODY", body))
    model = Model(weights="factory", factory=f"{tmp_path}/own.py:make")
    with nullcontext() if said is None else pytest.raises(UsageError, match=said):
        assert describe(model, Task()).size == 64


def test_several_are_called_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(pipe):\n    pipe.calls = ['a']\n")
    (tmp_path / "b.py").write_text("def f(pipe):\n    pipe.calls.append('b')\n")

    class Pipe:
        components: dict[str, Any] = {}  # noqa: RUF012 (as a pipeline's own)

    pipe: Any = Pipe()
    found = Patch([f"{tmp_path}/a.py:f", f"{tmp_path}/b.py:f"]).apply(pipe)
    trace: Any = None
    assert pipe.calls == ["a", "b"]
    assert found(trace).engaged


def test_keeps_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    patch = Patch(["mine.py:steps"], "equivalent", "both")
    assert (patch.functions, patch.contract, patch.claims) == (
        ["mine.py:steps"],
        "equivalent",
        "both",
    )
    assert patch.promised() is Contract.EQUIVALENT
    assert patch.claimed() == {"latency", "memory"}
    assert patch.located().functions == [f"{tmp_path / 'mine.py'}:steps"]
    assert replace(patch, claims="nothing").claimed() == frozenset()


WORK = ("workload.prompts=[a red apple]", "workload.guidance_scale=4.5")


FUNCTIONS = ("model.factory=../mine.py:own", "patch=../mine.py:steps")


def test_draws_what_the_same_model_draws(code: Path) -> None:
    def drawn(folder: Path, *words: str) -> bytes:
        with composer_of([*SMOKE, *WORK, *words]) as composer:
            model = composer.current.model
            if model.factory:
                remember(model, describe(model, Task()))
            host = PipelineHost(composer.variant(None), CPU)
        host.prepare()
        [record] = host.generate(0, draw_of(host._variant), folder).records
        return (folder / record.path).read_bytes()

    built = ("model=factory", f"model.factory={code}/mine.py:own")
    plain = drawn(code / "plain")
    assert drawn(code / "built", *built) == plain
    assert drawn(code / "patched", *built, f"patch={code}/mine.py:steps") != plain


def test_no_result_runs_what_nobody_named(code: Path) -> None:
    (own := code / "own").mkdir()
    contract = ("patch.contract=equivalent", "patch.claims=nothing")
    with fake_workers():
        done = sdopt(own, "run", *SMOKE, *WORK, "model=factory", *FUNCTIONS, *contract)
    assert done.code == 0, done.shown
    row = done.result.variants[1]
    assert row.status is Status.OK
    assert (row.contract, row.promises["patch"].claims) == (Contract.EQUIVALENT, [])
    assert row.config.model.factory == f"{own}/../mine.py:own"
    # What a study in another folder calls them, too.
    assert row.config.model.title == "mine.py:own"
    assert row.name == "patch=mine.py:steps(contract=equivalent, claims=nothing)"
    assert {"model", "options"} <= {*row.inputs}
    with pytest.raises(UsageError, match="runs code"):
        load(done.folder, row.name)
    more = ("run", f"resume={done.folder}", "protocol.replicates=2")
    for named, lacking in (
        (FUNCTIONS[1:], f"model={row.config.model.factory}"),
        (FUNCTIONS[:1], "patch="),
    ):
        refused = sdopt(own, *more, *named)
        assert (refused.code, "runs code" in refused.err, lacking in refused.err) == (
            2,
            True,
            True,
        ), refused.err
    elsewhere = sdopt(own, *more, FUNCTIONS[0], "patch=elsewhere/mine.py:steps")
    assert (elsewhere.code, "runs code" in elsewhere.err) == (2, True)
    # As the command says that keeps what was measured.
    words_before = ["model=factory", *FUNCTIONS, f"hydra.run.dir={done.folder}"]
    taken = sdopt(own, "run", *words_before)
    words = taken.err.partition(" run resume=")[2].partition("`")[0].split()[1:]
    assert len(words) == 2, taken.err
    with fake_workers():
        assert sdopt(own, *more, *words).code == 0
    (code / "mine.py").write_text(CODE + "\nchanged = True\n")
    changed = sdopt(
        own, "run", f"resume={done.folder}", "protocol.replicates=3", *FUNCTIONS
    )
    assert (changed.code, "contents of its options" in changed.err) == (2, True), (
        changed.err
    )


@pytest.mark.slow
def test_other_commands_take_it_or_say_why_not(code: Path) -> None:
    planned = sdopt(code, "plan", "model=mine.py:make", "hardware=t4")
    assert (planned.code, "a function builds it" in planned.shown) == (2, True), (
        planned.shown
    )
    with fake_workers():
        found = sdopt(
            code,
            "search",
            "model=mine.py:make",
            "search.groups=[layout]",
            "gate=none",
            *SMALL,
        )
    assert found.code in (0, 3), found.err
