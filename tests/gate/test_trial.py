"""The trial's sabotages: what they do to images, and what counts as caught."""

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from sdopt import gate
from sdopt.analysis.measures import RULED
from sdopt.assembly import Assembly
from sdopt.gate import belief, paying, work
from sdopt.optimizations import Contract
from sdopt.pipelines.loading import load_pipeline
from sdopt.quality.appearance import fine_detail, palette
from sdopt.quality.metrics import FAMILIES
from sdopt.results.verdicts import Payoff, Ruling, Verdict
from sdopt.schema import Model, Scheduler, Task
from tests.trial import CONF
from tests.trial.appearance import Cast, Faded, UnevenSharpness
from tests.trial.base import Retouch
from tests.trial.caught import caught
from tests.trial.few import BlackImage, OtherImage
from tests.trial.honest import Reordered
from tests.trial.registry import CLASSES, drawn_sabotages, title_of

FAIL, OPEN, PASS = (
    Ruling("at_most", "mse", verdict, "said", 2.0, margin=1.0)
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
)


def images(option: Retouch | Reordered | None = None, count: int = 4) -> np.ndarray:
    pipe = load_pipeline(Model(), Scheduler(), Task(), "cpu", {}, False)
    Assembly.of(pipe, {} if option is None else {"trial": option})
    latents = torch.randn((count, pipe.unet.config.in_channels, 8, 8), generator=torch.Generator().manual_seed(1))
    prompts = ["a red apple", "a green tree", "a blue ball", "a yellow star"][:count]
    found: np.ndarray = pipe(prompts, latents=latents, num_inference_steps=3, output_type="np").images
    return found


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    return images()


class TestRetouching:
    @pytest.mark.parametrize("option", [BlackImage(every=2), OtherImage(every=3), Cast(), Faded(), UnevenSharpness()])
    def test_what_it_would_draw_is_made_of_what_the_baseline_drew(self, option: Retouch, plain: np.ndarray) -> None:
        decoded = torch.from_numpy(plain).permute(0, 3, 1, 2) * 2 - 1
        made = (option.retouch(decoded, range(len(decoded))) / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
        assert np.abs(made - images(option)).max() < 1e-4
        assert np.abs(made - plain).max() > 0.01

    def test_a_mean_does_not_see_changes_in_turn(self, plain: np.ndarray) -> None:
        """What the rules that compare image by image are for."""
        levels = (plain * 255).round().astype(np.uint8)
        changed = (images(Cast(share=0.02)) * 255).round().astype(np.uint8)
        shift = palette(changed)[:, :3] - palette(levels)[:, :3]
        assert np.abs(shift.mean(axis=0)).max() < 0.5 * np.abs(shift).max()
        assert np.abs(fine_detail(changed) - fine_detail(levels)).max() < 0.01


def test_an_honest_option_sums_in_another_order(plain: np.ndarray) -> None:
    drawn = images(Reordered())
    assert 0 < np.abs(drawn - plain).max() < 1e-4


class TestRegistry:
    def test_every_class_has_sabotages_of_its_own(self) -> None:
        counted = Counter(title for title, _ in drawn_sabotages().values())
        for module in CLASSES:
            assert counted[module.TITLE] >= 3 or not hasattr(module, "SABOTAGES"), module.TITLE
        assert {option.contract for _, option in drawn_sabotages().values()} == {Contract.EQUIVALENT, Contract.LOSSY}
        assert all(option.caught_by for _, option in drawn_sabotages().values())

    def test_what_is_timed_belongs_to_a_class(self) -> None:
        targets = [line.split()[1] for file in _yamls() for line in file.read_text().splitlines() if "_target_" in line]
        assert {title_of(target) for target in targets} >= {"time and memory", "honest", "a few images of many"}

    def test_what_should_catch_a_sabotage_exists(self) -> None:
        """A name that no rule has would catch nothing, and only the slow trial would show it."""
        timed = {file.stem: str(OmegaConf.select(OmegaConf.load(file), "caught_by", default="")) for file in _yamls()}
        drawn = {name: option.caught_by for name, (_, option) in drawn_sabotages().items()}
        known = {*RULED, *(family.name for family in FAMILIES), *_own_rules()}
        assert any(timed.values())
        named = {name: {*filter(None, words.split("|"))} for name, words in (timed | drawn).items()}
        assert {name: words - known for name, words in named.items() if words - known} == {}

    @pytest.mark.parametrize("preset", ["gate_trial", "gate_trial_measuring"])
    def test_a_study_has_honest_options_of_the_contracts_that_it_judges(self, preset: str) -> None:
        """Without one, whatever a rule leaves open would count as caught."""
        content: Any = OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{preset}.yaml"))
        study = content["study"]
        judged = {edge["candidate"] for edge in study["edges"]}
        honest = {name for name in judged if name.startswith("honest, ")}
        options = {name: _option(study["variants"][name]) for name in judged - honest}
        assert {f"honest, {option['promise']}" for option in options.values()} <= honest
        claims = any(option.get("claim") for option in options.values())
        told = [override for name in honest for override in study["variants"][name]]
        assert not claims or {"+trial.claim=latency", "precision=bf16"} & {*told}

    def test_the_documentation_names_the_rules_of_every_gate(self) -> None:
        page = (Path(gate.__file__).parent / "README.md").read_text()
        asked = page.partition("## Can it be believed?")[2].partition("\n## ")[0]
        named = re.findall(r"^\| `(.+?)` \|", asked, re.MULTILINE)
        assert len(named) >= 10
        assert {*named} <= _own_rules()


def _own_rules() -> set[str]:
    """Returns the names that the gate's code can give a ruling of its own, and its other strings."""
    trees = [ast.parse(Path(module.__file__ or "").read_text()) for module in (belief, paying, work)]
    return {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _option(overrides: list[str]) -> dict[str, Any]:
    """Returns the keys of the trial's option that a variant chooses."""
    [name] = [override.removeprefix("+trial=") for override in overrides if override.startswith("+trial=")]
    content: Any = OmegaConf.to_container(OmegaConf.load(CONF / "trial" / f"{name}.yaml"))
    return {"promise": "lossy", **content}


def _yamls() -> list[Path]:
    return sorted((CONF / "trial").glob("*.yaml"))


class TestCaught:
    @pytest.mark.parametrize(
        ("rulings", "shared", "fits"),
        [
            ([FAIL], [PASS], True),
            ([OPEN], [PASS], True),
            ([OPEN], [OPEN], False),  # what an honest option leaves open too
            ([FAIL], [OPEN], True),
            ([PASS], [PASS], False),
        ],
    )
    def test_open_counts_where_an_honest_option_passes(
        self, rulings: list[Ruling], shared: list[Ruling], fits: bool
    ) -> None:
        found = caught("it", "class", "lossy", rulings, shared)
        assert found.fits is fits
        assert bool(found.by) is fits  # nothing "caught" what passed

    def test_another_rule_than_expected_is_no_catch(self) -> None:
        assert not caught("it", "class", "lossy", [FAIL], [PASS], "perceptual|clip_score").fits
        assert caught("it", "class", "lossy", [FAIL], [PASS], "perceptual|mse").effect == 2.0

    def test_an_honest_option_may_be_open_and_must_not_fail(self) -> None:
        assert caught("it", "honest", "lossy", [OPEN], None).fits
        assert not caught("it", "honest", "lossy", [FAIL], None).fits
        no_benefit = Ruling("must pay", "", Verdict.FAIL, "no benefit: 0.995×", payoff=Payoff.NO_BENEFIT)
        assert caught("it", "honest", "lossy", [no_benefit], None).fits
        assert not caught("it", "honest", "lossy", [no_benefit, FAIL], None).fits
