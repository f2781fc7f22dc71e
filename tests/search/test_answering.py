"""What `sdopt optimize` answers, with fake workers."""

import json
import re
import shlex
from pathlib import Path

from tests.command import SMALL, sdopt
from tests.fakes import Fakes, fake_workers

OPTIMIZE = (
    "optimize",
    "emoji",
    "search.groups=[precision]",
    "search.options={precision: [fp32, bf16, fp16]}",
    "search.races=0",
    "gate=none",
    *(each for each in SMALL if not each.startswith("protocol.replicates")),
    "protocol.replicates=3",
)

IMAGES = ("quality=default", "quality.prompt_count=null")


def test_a_winner_is_a_sentence_a_picture_and_a_program(tmp_path: Path) -> None:
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05})):
        found = sdopt(tmp_path, *OPTIMIZE, "layout=channels_last")
        again = sdopt(tmp_path, *OPTIMIZE, "layout=channels_last", "search.budget_s=9000")
    assert found.code == 0, found.shown
    assert "more time does not extend it: search.title=… begins another one" in again.shown
    assert "precision=bf16 is" in found.shown
    assert "2 combinations" in found.shown
    [folder] = (tmp_path / "outputs" / "searches").iterdir()
    command = next(entry["command"] for entry in json.loads((folder / "search.json").read_text())["entries"])
    assert "study.baseline=[layout:channels_last]" in shlex.split(command), (
        "it is measured again over the same baseline"
    )
    shown = sdopt(tmp_path, "show", str(folder)).out
    assert shown.splitlines()[0] in found.out
    program = (folder / "optimized.py").read_text()
    assert not program.startswith("#")
    assert "dtype=torch.bfloat16" in program
    assert program.splitlines()[-1] in found.out
    assert (folder / "before_after.png").stat().st_size > 1000


def test_a_winner_of_a_model_that_a_function_builds_is_a_program_that_calls_it(tmp_path: Path) -> None:
    code = "from diffusers import DiffusionPipeline\nfrom sdopt.reference import MODEL\n"
    (tmp_path / "mine.py").write_text(code + "def make():\n    return DiffusionPipeline.from_pretrained(MODEL)\n")
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05})):
        found = sdopt(tmp_path, "optimize", "mine.py:make", *OPTIMIZE[2:])
    assert found.code == 0, found.shown
    [program] = (tmp_path / "outputs" / "searches").glob("*/optimized.py")
    assert f"runpy.run_path('{tmp_path / 'mine.py'}')['make']()" in program.read_text()
    assert "pipe.to(torch.bfloat16)" in program.read_text()


def test_without_a_winner_it_names_the_fastest_and_what_speaks_against_it(tmp_path: Path) -> None:
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05, "precision=fp16": 0.2}, black=["precision=bf16"])):
        found = sdopt(tmp_path, *OPTIMIZE, "gate=default", *IMAGES)
    assert found.code == 3, found.shown
    assert "Keep the baseline: none of the 2 combinations" in found.shown
    assert re.search(r"precision=bf16 was about (1\.9|2\.0)\d×, but: ", found.shown)
    assert not list(tmp_path.rglob("optimized.py"))
