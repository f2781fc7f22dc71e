"""What `sdopt optimize` asks of a search, and what it answers, with fake workers."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sdopt.config.models import with_own_models
from sdopt.config.overrides import key_of, parsed_override
from sdopt.config.paths import options_of
from sdopt.errors import UsageError
from sdopt.record.files import read_result
from sdopt.search.answered import question_of
from sdopt.search.config import search_config
from sdopt.search.expectation import RECORDED
from sdopt.search.optimize import optimize_overrides
from tests.command import SMALL, sdopt
from tests.fakes import Fakes, fake_workers


def asked(
    *given: str,
    lora: str | None = None,
    memory: float | None = None,
    budget: str | None = None,
) -> list[str]:
    return optimize_overrides("emoji", lora, memory, budget, given)


def test_every_option_that_it_tries_exists() -> None:
    config = search_config(asked(lora="me/style", memory=8, budget="30m"))
    assert config.memory_gib == 8
    assert config.budget_s == 1800
    assert config.title == "emoji"
    for group, options in (config.options or {}).items():
        assert set(options) <= set(options_of(group))
    assert {"memory", "lora"} <= set(config.groups)
    assert not {"memory", "lora"} & set(search_config(asked()).groups)


def test_what_paid_off_in_a_record_is_tried() -> None:
    config = search_config(asked())
    for speedups in json.loads(RECORDED.read_text()).values():
        for choice, speedup in speedups.items():
            group, _, option = choice.partition("=")
            if speedup >= 1.3 and group in config.groups:
                assert option in (config.options or {})[group]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("1.5 h", 5400),
        ("soon", None),
        ("0m", None),
        ("45", None),
    ],
)
def test_budgets(said: str, seconds: float | None) -> None:
    if seconds is not None:
        assert search_config(asked(budget=said)).budget_s == seconds
    else:
        with pytest.raises(
            UsageError, match=r"--budget .*: give a time, as in 90s, 30m or 2h"
        ):
            asked(budget=said)


def test_a_lora_is_in_the_baseline(tmp_path: Path) -> None:
    file = tmp_path / "my style.safetensors"
    file.touch()
    assert {"lora=loaded", f"lora.path='{file}'"} <= set(asked(lora=str(file)))
    (tmp_path / "below").mkdir()
    assert f"lora.path='{file}'" in asked(
        lora=str(tmp_path / "below" / ".." / file.name)
    )
    with pytest.raises(UsageError, match="there is no such file"):
        asked(lora="gone.safetensors")


def test_what_is_given_wins() -> None:
    found = asked(
        "search.groups=[precision,caching]",
        "search.budget_s=60",
        "lora=fused",
        lora="me/style",
        budget="1h",
    )
    keys = [key_of(override) for override in found]
    assert len(keys) == len(set(keys))
    assert "lora=fused" in found
    config = search_config(found)
    assert config.groups == ["precision", "caching"]
    assert set(config.options or {}) == {"precision", "caching"}
    assert config.budget_s == 60


def test_the_search_is_named_after_the_file(tmp_path: Path) -> None:
    file = tmp_path / "dream, v1 (pruned).safetensors"
    save_file({"a": np.zeros(1)}, file)
    found = optimize_overrides(str(file), None, None, None, [])
    assert (
        search_config(with_own_models(found, options_of("model"))).title
        == "dream_v1_pruned"
    )


OPTIMIZE = (
    "optimize",
    "emoji",
    "search.groups=[precision]",
    "search.options={precision: [fp32, bf16, fp16]}",
    "search.races=0",
    "gate=none",
    *(
        each
        for each in SMALL
        if not each.startswith(("protocol.replicates", "protocol.programs_s"))
    ),
    "protocol.replicates=3",
)


def test_a_winner_is_a_sentence_a_picture_and_a_program(tmp_path: Path) -> None:
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05})):
        found = sdopt(tmp_path, *OPTIMIZE, "layout=channels_last")
    assert found.code == 0, found.shown
    assert "precision=bf16 is" in found.shown
    assert "2 combinations" in found.shown
    [folder] = (tmp_path / "outputs" / "searches").iterdir()
    command = next(
        entry["command"]
        for entry in json.loads((folder / "search.json").read_text())["entries"]
    )
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


@pytest.mark.slow
def test_a_winner_of_a_model_that_a_function_builds_is_a_program_that_calls_it(
    tmp_path: Path,
) -> None:
    code = (
        "from diffusers import DiffusionPipeline\nfrom sdopt.reference import MODEL\n"
    )
    (tmp_path / "mine.py").write_text(
        code + "def make():\n    return DiffusionPipeline.from_pretrained(MODEL)\n"
    )
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05})):
        found = sdopt(tmp_path, "optimize", "mine.py:make", *OPTIMIZE[2:])
    assert found.code == 0, found.shown
    [program] = (tmp_path / "outputs" / "searches").glob("*/optimized.py")
    assert f'sys.path.append("{tmp_path}")' in program.read_text()
    assert "from mine import make" in program.read_text()
    assert "pipe.to(torch.bfloat16)" in program.read_text()
    found = sdopt(tmp_path, "show", str(program.parent))
    assert "sdopt.load(" not in found.out, "it refuses code that a result names"


@pytest.mark.slow
def test_without_a_winner_it_names_the_fastest_and_what_speaks_against_it(
    tmp_path: Path,
) -> None:
    with fake_workers(
        Fakes(
            seconds={"precision=bf16": 0.05, "precision=fp16": 0.2},
            black=["precision=bf16"],
        )
    ):
        found = sdopt(
            tmp_path,
            *OPTIMIZE,
            "gate=default",
            "quality=default",
            "quality.prompt_count=null",
        )
    assert found.code == 3, found.shown
    assert "Keep the baseline: none of the 2 combinations" in found.shown
    assert re.search(
        r"precision=bf16 was about (1\.9|2\.0)\d× faster, but: ", found.shown
    )
    assert not list(tmp_path.rglob("optimized.py"))


def test_the_same_command_answers_at_once_and_again_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05})):
        first = sdopt(tmp_path, *OPTIMIZE)

    def not_asked(*_: object) -> None:
        raise UsageError("the machine was probed")

    [folder] = (tmp_path / "outputs" / "searches").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("sdopt.search.command.prepare", not_asked)
        again = sdopt(tmp_path, *OPTIMIZE, "search.budget_s=60")
        assert again.code == first.code
        assert "answered before" in again.shown
        answer = first.shown.partition("precision=bf16 is ")[2].partition("search: ")[0]
        assert answer
        assert answer in again.shown
        for other in (
            ["search.budget_s=7200"],
            ["--again"],
            ["workload.steps=2"],
            ["tracking.uri=x.db"],
        ):
            assert "the machine was probed" in sdopt(tmp_path, *OPTIMIZE, *other).shown
    with fake_workers(Fakes(seconds={"precision=bf16": 0.05})):
        assert sdopt(tmp_path, *OPTIMIZE, "--again").code == 0
    begun = {path.name for path in (tmp_path / "outputs" / "searches").iterdir()}
    assert begun == {folder.name, f"{folder.name}.2"}


def test_a_changed_file_is_another_question(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox")
    words = ["model=emoji", f"workload.prompts={prompts}"]
    before = question_of(words, None)
    assert question_of([*words, "search.budget_s=5", "search.trials=3"], None) == before
    prompts.write_text("a red fox")
    assert question_of(words, None) != before
    assert not question_of([*words, "model.revision=${oc.env:REVISION}"], None), (
        "the words do not tell"
    )
    assert not question_of([*words, "patch=mine.py:weaker"], None)


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ],
)
def test_another_commit_of_a_repository_is_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    """`sdopt optimize owner/name` answered at once for weights that the cache no longer takes for its main branch."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    main = tmp_path / below / "models--owner--name" / "refs" / "main"
    main.parent.mkdir(parents=True)
    main.write_text("0" * 40)
    before = question_of(["model=owner/name"], None)
    assert question_of(["model=owner/name"], None) == before
    main.write_text("1" * 40)
    assert question_of(["model=owner/name"], None) != before


def test_another_file_below_the_home_folder_is_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves `model=~/mine.safetensors` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.safetensors").write_text("1")
    before = question_of(["model=~/mine.safetensors"], None)
    (tmp_path / "mine.safetensors").write_text("trained again")
    assert question_of(["model=~/mine.safetensors"], None) != before
    listed = ["model.parts={vae: ~/mine.safetensors}"]
    before = question_of(listed, None)
    (tmp_path / "mine.safetensors").write_text("and again")
    assert question_of(listed, None) != before


def test_what_a_model_is_read_from_beside_its_file_is_asked_too(tmp_path: Path) -> None:
    """A name may have brackets, a configuration beside it say velocity, and a part of a folder lie in another one."""
    file = tmp_path / "mine, [v2].safetensors"
    folder, other = tmp_path / "folder", tmp_path / "other"
    for made in (folder, other):
        made.mkdir()
    (folder / "vae").symlink_to(other)
    weights = other / "weights.safetensors"
    yaml = file.with_suffix(".yaml")
    for path in (file, weights):
        path.write_text("1")
    asked_of = {file: file, yaml: file, weights: folder}
    for changed, model in asked_of.items():
        before = question_of([f"model={model}"], None)
        changed.write_text("trained again")
        assert question_of([f"model={model}"], None) != before, changed


@pytest.mark.slow
def test_a_larger_budget_goes_on_and_judges_what_ranks_before_the_winner(
    tmp_path: Path,
) -> None:
    """The first call has time for one of two options, both of which are faster, the later one by more."""
    seconds = {"precision=bf16": 0.05, "precision=fp16": 0.02}
    with fake_workers(Fakes(seconds=seconds)):
        first = sdopt(tmp_path, *OPTIMIZE, "search.trials=1")
        [folder] = (tmp_path / "outputs" / "searches").iterdir()
        tried = json.loads((folder / "search.json").read_text())
        second = sdopt(tmp_path, *OPTIMIZE, "search.budget_s=7200")
    record = json.loads((folder / "search.json").read_text())
    assert first.code == second.code == 0, second.shown
    assert tried["winner"] == "precision=bf16"
    assert "going on: 1 combination was tried before" in second.shown
    assert record["winner"] == "precision=fp16"
    assert record["judged"] == ["final-1", "final"]
    entries = {entry["name"]: entry for entry in record["entries"]}
    assert entries["precision=bf16"]["study"] == "final", (
        "what passed is not judged again"
    )
    assert [row.name for row in read_result(folder / "final-1").candidates] == [
        "precision=fp16"
    ]
    seeds = {
        read_result(folder / name).config.workload.seed
        for name in ("screen-00", "final", "final-1")
    }
    assert len(seeds) == 3, "each judgement has noise of its own"
    assert "/final-1', variant='precision=fp16'" in (folder / "search.md").read_text()


def test_a_file_is_that_of_the_model_that_is_named_beside_it(tmp_path: Path) -> None:
    """Without the file, the published model would be measured."""
    file = tmp_path / "mine of z.safetensors"
    file.touch()
    found = optimize_overrides(str(file), None, None, None, ["model=z_image"])
    assert "model=z_image" in found
    paths = [override for override in found if key_of(override) == "model.path"]
    assert [parsed_override(override).value() for override in paths] == [str(file)]
    assert "search.title=mine_of_z" in found
    with pytest.raises(UsageError, match="names a second model beside emoji"):
        optimize_overrides("emoji", None, None, None, ["model=z_image"])


def test_a_refused_budget_leaves_no_folder(tmp_path: Path) -> None:
    found = sdopt(tmp_path, *OPTIMIZE, "search.budget_s=1")
    assert found.code == 2, found.shown
    assert "search.budget_s=1: to try one option takes about" in found.shown
    assert not list((tmp_path / "outputs" / "searches").iterdir())
