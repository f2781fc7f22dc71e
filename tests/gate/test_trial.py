"""The trial's own logic: its mistakes do what they say, and what counts as caught; the trial itself runs by command."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from hydra.utils import get_class
from omegaconf import OmegaConf

from sdopt import gate
from sdopt.gate import comparability, paying, trust
from sdopt.quality.metrics import FAMILIES
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.reference import PROMPTS, TRANSFORMER
from sdopt.statistics.measures import RULED
from tests.trial import CONF
from tests.trial.__main__ import main as trial
from tests.trial.__main__ import mistakes_in, study_of
from tests.trial.images import HARMS, Harm
from tests.trial.judging import HONEST, caught
from tests.trial.options import KeepsState, Mistake, Reordered

FAIL, OPEN, PASS = (
    Ruling("at_most", "mse", verdict, "said", 2.0, margin=1.0)
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
)


def test_what_should_catch_a_mistake_exists() -> None:
    """A name that no rule has would catch nothing, and only the slow trial would show it."""
    timed = {file.stem: yaml_of(file) for file in (CONF / "trial").glob("*.yaml")}
    for name, keys in timed.items():
        kind = get_class(keys["_target_"])
        assert issubclass(kind, Mistake)
        assert kind.kind == HONEST or keys.get("caught_by"), name
    named = {name: str(keys.get("caught_by", "")) for name, keys in timed.items()}
    named |= {harm.name: harm.caught_by for harm in HARMS}
    known = {*RULED, *(family.name for family in FAMILIES), *_own_rules()}
    words = {
        name: {*filter(None, rules.split("|"))} - known for name, rules in named.items()
    }
    assert {name: unknown for name, unknown in words.items() if unknown} == {}


def test_the_page_names_the_rules_of_every_gate_and_what_catches_them() -> None:
    page = (Path(gate.__file__).parent / "README.md").read_text()
    asked = page.partition("## Can it be believed?")[2].partition("\n## ")[0]
    assert len(rules := re.findall(r"^\| `(.+?)` \|", asked, re.MULTILINE)) >= 5
    assert {*rules} <= _own_rules()
    table = page.partition("| what goes wrong |")[2].partition("\n\n")[0]
    words = [words.partition(":")[0] for words in re.findall(r"`(.+?)`", table)]
    caught_by = [
        str(yaml_of(file).get("caught_by", ""))
        for file in (CONF / "trial").glob("*.yaml")
    ]
    assert {*re.split(r", | or ", " or ".join(words))} == {
        *filter(None, "|".join(caught_by).split("|"))
    }


def transformer() -> Any:
    """The packaged transformer, in which each branch of guidance has a call of its own."""
    pipe = FluxPipeline.from_pretrained(TRANSFORMER, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn_by(pipe: Any, seed: int = 0) -> np.ndarray:
    """Draws an image of each of the first two packaged captions in four steps."""
    prompts = json.loads(PROMPTS.read_text())["gate"][:2]
    noise = [torch.Generator().manual_seed(seed + number) for number in range(2)]
    sizes = {"height": 64, "width": 64, "max_sequence_length": 24}
    guidance = {"true_cfg_scale": 3.0, "negative_prompt": [""] * 2}
    call = {
        **sizes,
        **guidance,
        "generator": noise,
        "num_inference_steps": 4,
        "output_type": "np",
    }
    images: np.ndarray = pipe(prompts, **call).images
    return images


@pytest.mark.parametrize(
    "harm", [harm for harm in HARMS if harm.change], ids=lambda harm: harm.name
)
@pytest.mark.walk(3)
def test_harm_reaches_a_transformer(harm: Harm) -> None:
    pipe = transformer()
    plain = drawn_by(pipe, seed=5)
    assert harm.change is not None
    harm.change(pipe)
    changed = drawn_by(pipe, seed=5)
    assert not np.array_equal(changed, plain)
    every_image = harm.name not in (
        "NaN in one latent of 32",
        "text dropped late for one image of 6",
    )
    assert np.array_equal(changed[1], plain[1]) != every_image


def test_options_of_the_trial_reach_a_transformer() -> None:
    pipe = transformer()
    plain = drawn_by(pipe)
    Reordered().apply(pipe)
    reordered = drawn_by(pipe)
    assert 0 < np.abs(reordered - plain).max() < 1e-3, "another order of the same sums"
    KeepsState().apply(pipe)
    assert np.abs(drawn_by(pipe) - reordered).max() < 1e-6, "nothing to keep yet"
    assert np.abs(drawn_by(pipe, seed=9) - drawn_by(transformer(), seed=9)).max() > 1e-2


def test_mistakes_of_ones_own_join_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trial(["--config-dir", str(tmp_path)]) == 2
    assert "has no trial/*.yaml" in capsys.readouterr().err
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "of_mine.yaml").write_text(
        "_target_: tests.trial.options.Slow\nseconds: 0.1\n"
    )
    assert "of_mine" in mistakes_in(CONF, tmp_path, ("",))
    assert [*mistakes_in(CONF, tmp_path, ("of", "slower"))] == ["slower", "of_mine"]
    [variants] = [
        word
        for word in study_of(mistakes_in(CONF, tmp_path, ("of mine",)))
        if "study.variants" in word
    ]
    assert "trial=of_mine" in variants
    assert "trial=slower" not in variants


def yaml_of(file: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    return dict(content)


def _own_rules() -> set[str]:
    """Returns the names that the gate's code can give a ruling of its own, and its other strings."""
    trees = [
        ast.parse(Path(module.__file__ or "").read_text())
        for module in (comparability, trust, paying)
    ]
    return {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_what_counts_as_caught() -> None:
    for rulings, shared, fits in (
        ([FAIL], [OPEN], True),
        ([OPEN], [PASS], True),
        ([OPEN], [OPEN], False),  # what an honest option leaves open too
        ([PASS], [PASS], False),
    ):
        found = caught("it", "time", "lossy", rulings, shared)
        assert found.fits is bool(found.by) is fits
    assert not caught(
        "it", "time", "lossy", [FAIL], [PASS], "perceptual|clip_score"
    ).fits
    assert caught("it", "time", "lossy", [FAIL], [PASS], "perceptual|mse").effect == 2.0
    no_benefit = Ruling(
        "must pay", "", Verdict.FAIL, "no benefit: 0.995×", payoff="no benefit"
    )
    for rulings, fits in (
        ([OPEN], True),
        ([FAIL], False),
        ([no_benefit], True),
        ([no_benefit, FAIL], False),
    ):
        assert caught("it", HONEST, "lossy", rulings, []).fits is fits


@pytest.mark.slow
def test_mistakes_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = "slower,grows by prompt,collects garbage,only attached"
    assert (
        trial(
            [
                "--only",
                chosen,
                "--timed",
                "hardware=cpu",
                "hardware.threads=1",
                "workload.steps=4",
            ]
        )
        == 0
    )
