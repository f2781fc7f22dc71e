"""Functions of a user's own file: options like any other, and a pipeline that one builds like any other model."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.library import load
from sdopt.options.patch import Patch
from sdopt.pipelines.factory import describe
from sdopt.record.records import Status
from sdopt.schema import Model, Task
from sdopt.statistics.outcomes import Standing, outcomes_of
from tests.command import SMALL, SMOKE, refused, sdopt
from tests.fakes import fake_workers

CODE = """
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

from sdopt.reference import MODEL

def steps(pipe):
    forward = pipe.unet.forward
    pipe.unet.forward = lambda sample, *a, **k: forward(sample * 1.1, *a, **k)

def null(pipe):
    pass

def paler(pipe):
    pipe.vae.decoder.conv_out.weight.data.mul_(0.7)

def nhwc(pipe):
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)

def nchw(pipe):
    pipe.unet.to(memory_format=torch.contiguous_format)
    pipe.vae.to(memory_format=torch.contiguous_format)

def fails(pipe):
    raise RuntimeError("my mistake")

other = 3

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

def other_task():
    return StableDiffusionImg2ImgPipeline.from_pretrained(MODEL)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def test_applies_and_says_what_it_changed(code: Path) -> None:
    done = sdopt(
        code, "run", f"patch={code}/mine.py:steps", "patch.contract=equivalent", "patch.claims=nothing", *SMOKE
    )
    assert done.code == 0, done.shown
    [row] = done.result.candidates
    assert row.status is Status.OK
    assert (row.contract, row.promises["patch"].claims) == (Contract.EQUIVALENT, [])
    [shown] = [found for found in row.measurements[0].shapes[0].evidence if found.axis == "patch"]
    assert "unet" in shown.summary
    with pytest.raises(UsageError, match="runs code"):
        load(done.folder)
    other = sdopt(code, "run", f"resume={done.folder}", "protocol.replicates=2", "patch=elsewhere/mine.py:steps")
    assert (other.code, "runs code" in other.err) == (2, True)
    again = sdopt(code, "run", f"resume={done.folder}", "protocol.replicates=2")
    assert (again.code, "patch=" in again.err) == (2, True)
    with fake_workers():
        assert sdopt(code, "run", f"resume={done.folder}", "protocol.replicates=2", "patch=mine.py:steps").code == 0


def test_one_that_does_nothing_has_no_effect_and_one_that_fails_says_why(code: Path) -> None:
    variants = (
        "study.variants={baseline:[],none:[patch:mine.py:null],paler:[patch:mine.py:paler],fails:[patch:mine.py:fails],"
        "last:[patch:mine.py:nhwc],undone:[layout:channels_last,patch:mine.py:nchw]}"
    )
    done = sdopt(code, "run", "study=explicit", variants, *SMOKE)
    found = {row.name: row for row in done.result.candidates}
    assert found["none"].status is Status.NOT_ENGAGED
    assert "not_engaged: the option ran, and nothing shows" in done.shown
    assert found["paler"].status is Status.OK  # values alone are other ones
    # What a default names is not held against a function, and is said; what was chosen is.
    assert found["last"].status is Status.OK
    assert "changed what layout=contiguous" in found["last"].reason
    plain = [outcome.standing for outcome in outcomes_of(done.result) if outcome.option == "contiguous"]
    assert plain == [Standing.PROVEN]
    assert found["undone"].status is Status.NOT_ENGAGED
    assert "layout=channels_last: 0 of" in found["undone"].reason
    assert "leave one of the two out" in found["undone"].reason
    assert found["fails"].status is Status.FAILED
    assert "my mistake" in found["fails"].reason


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("patch=mine.py:nothing", "defines no function nothing"),
        ("patch=mine.py:other", "defines no function other"),
        ("patch=yours.py:steps", "cannot be read"),
        ("patch=[mine.py:steps,mine.py:nothing]", "defines no function nothing"),
        ("patch=function", "names the functions"),
        ("model=mine.py:nothing", "defines no function nothing"),
        ("model=yours.py:make", "cannot be read"),
        ("model=mine.py:number", "returns a int"),
        ("model=mine.py:breaks", "RuntimeError: my mistake"),
        ("model=mine.py:other_task", "choose task=img2img"),
        ("model=mine.py:make workload.size=null", "64×64 pixels, and model.size=512: add model.size=64"),
        ("model=mine.py:noisy", "holds numbers in unet.conv_in.bias that are not finite"),
        ("model=factory", "model.factory: must be given"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(code: Path, override: str, said: str) -> None:
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
        ("pipe.enable_sequential_cpu_offload(device='cpu')", "is moved while it runs"),
        ("pipe.unet.to(torch.float8_e4m3fn)", "whose unet is quantized .such as conv_in"),
        ("pipe.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)", "whose unet is quantized"),
        ("raise SystemExit('no card')", "SystemExit: no card"),
        ("return pipe\n\nimport not_there\n\ndef other(pipe):\n    pass", "ModuleNotFoundError: No module named"),
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


WORK = ("layout=channels_last", "workload.prompts=[a red apple]", "workload.guidance_scale=4.5")


def test_draws_what_the_same_model_draws_and_no_result_runs_it(code: Path) -> None:
    (other := code / "other").mkdir()
    (own := code / "own").mkdir()
    plain = sdopt(other, "run", *SMOKE, *WORK)
    done = sdopt(own, "run", *SMOKE, *WORK, "model=factory", "model.factory=../mine.py:own")
    assert (plain.code, done.code) == (0, 0), done.shown
    images = [
        [(row.name, (each.folder / row.images[0].path).read_bytes()) for row in each.result.variants[:2]]
        for each in (plain, done)
    ]
    assert images[0] == images[1]
    row = done.result.candidates[0]
    assert row.status is Status.OK
    assert row.config.model.factory == f"{own}/../mine.py:own"
    assert {"model", "options"} <= {*row.inputs}
    with pytest.raises(UsageError, match="runs code"):
        load(done.folder, row.name)
    more = ("run", f"resume={done.folder}", "protocol.replicates=2")
    refused = sdopt(own, *more)
    assert (refused.code, f"model={row.config.model.factory}" in refused.err) == (2, True), refused.err
    with fake_workers():
        assert sdopt(own, *more, "model.factory=../mine.py:own").code == 0
    (code / "mine.py").write_text(CODE + "\nchanged = True\n")
    changed = sdopt(own, "run", f"resume={done.folder}", "protocol.replicates=3", "model=../mine.py:own")
    assert (changed.code, "contents of its options" in changed.err) == (2, True), changed.err


@pytest.mark.slow
def test_other_commands_take_it_or_say_why_not(code: Path) -> None:
    planned = sdopt(code, "plan", "model=mine.py:make", "hardware=t4")
    assert (planned.code, "a function builds it" in planned.shown) == (2, True), planned.shown
    with fake_workers():
        found = sdopt(code, "search", "model=mine.py:make", "search.groups=[layout]", "gate=none", *SMALL)
    assert found.code in (0, 3), found.err
