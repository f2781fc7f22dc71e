"""A pipeline that a function of a user's own file builds is measured as any other model."""

from pathlib import Path

import pytest

from sdopt.errors import UsageError
from sdopt.library import load
from sdopt.record.records import Status
from tests.command import SMALL, SMOKE, sdopt
from tests.fakes import fake_workers

CODE = """
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

from sdopt.reference import MODEL

class Own(StableDiffusionPipeline):
    pass

def make():
    return StableDiffusionPipeline.from_pretrained(MODEL)

def own():
    return Own(**make().components, requires_safety_checker=False)

def number():
    return 3

def fails():
    raise RuntimeError("my mistake")

def noisy():
    pipe = make()
    pipe.unet.conv_in.bias.data[0] = float("nan")
    return pipe

def other_task():
    return StableDiffusionImg2ImgPipeline.from_pretrained(MODEL)
"""

WORK = ("layout=channels_last", "workload.prompts=[a red apple]", "workload.guidance_scale=4.5")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


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
    assert sdopt(own, "gate", str(done.folder), "gate=default", "--output", "verdicts").code in (0, 1, 3)
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=mine.py:nothing", "defines no function nothing"),
        ("model=yours.py:make", "cannot be read"),
        ("model=mine.py:number", "returns a int"),
        ("model=mine.py:fails", "RuntimeError: my mistake"),
        ("model=mine.py:other_task", "choose task=img2img"),
        ("model=mine.py:make workload.size=null", "64×64 pixels, and model.size=512: add model.size=64"),
        ("model=mine.py:noisy", "holds numbers in unet.conv_in.bias that are not finite"),
        ("model=factory", "model.factory: must be given"),
    ],
)
def test_what_cannot_be_measured_ends_in_one_line(code: Path, override: str, said: str) -> None:
    done = sdopt(code, "run", *SMOKE, "layout=channels_last", *override.split())
    assert (done.code, said in done.err) == (2, True), done.err
    assert "Traceback" not in done.err
    assert not list(code.rglob("result.json"))


def test_other_commands_take_it_or_say_why_not(code: Path) -> None:
    planned = sdopt(code, "plan", "model=mine.py:make", "hardware=t4")
    assert (planned.code, "a function builds it" in planned.shown) == (2, True), planned.shown
    searched = ("search", "model=mine.py:make", "search.groups=[layout]", "hardware=cpu", "tracking=none")
    assert sdopt(code, *searched, "dry_run=true").code == 0
    with fake_workers():
        found = sdopt(code, *searched, "gate=none", *SMALL)
    assert found.code in (0, 3), found.err
