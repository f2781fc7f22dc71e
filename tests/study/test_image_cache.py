"""Which images are drawn, what their key depends on, and that none comes from a stale cache."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdopt.config.composer import HydraComposer
from sdopt.record.records import Environment
from sdopt.record.scores import ImageRecord
from sdopt.study.image_cache import ImageCache, content_key
from sdopt.worker.draws import draw_of, floor_draws, timed_draw
from tests.command import SABOTAGE, SMOKE, sdopt
from tests.fakes import fake_workers

ENVIRONMENT = Environment(
    "1", "abc", False, "3.11.7", "here", {"torch": "2.13.0"}, {"name": "a device"}, {"name": "a cpu"}, "forkserver", []
)
INPUTS = {"model": "weights", "prompts": "texts"}


def key_of(compose: type[HydraComposer], *overrides: str, **changes: Any) -> str:
    variant = compose(list(overrides)).variant(None)
    return content_key(variant, draw_of(variant), INPUTS, replace(ENVIRONMENT, **changes))


def test_timed_calls_are_given_what_the_quality_pass_draws(composer: type[HydraComposer]) -> None:
    variant = composer(["workload.prompt_count=3", "quality.prompt_count=10"]).variant(None)
    assert timed_draw(variant) == draw_of(variant)
    assert draw_of(variant).calls == 10
    fewer = composer(["workload.prompt_count=5", "quality.prompt_count=2"]).variant(None)
    assert timed_draw(fewer).prompts[:2] == draw_of(fewer).prompts
    assert timed_draw(fewer).calls == 5


def test_without_metrics_nothing_is_drawn_unless_it_is_asked_for(composer: type[HydraComposer]) -> None:
    assert draw_of(composer(["quality=none"]).variant(None)).calls == 0
    asked = composer(["quality=none", "quality.prompt_count=2"]).variant(None)
    assert draw_of(asked).prompts == timed_draw(asked).prompts[:2]


def test_a_gate_says_how_many_where_nothing_else_does(composer: type[HydraComposer]) -> None:
    assert draw_of(composer(["gate=default"]).variant(None)).calls == 96
    assert draw_of(composer(["gate=default", "quality.prompt_count=20"]).variant(None)).calls == 20
    assert composer(["gate=default"]).variant(None).protocol.replicates == 3
    assert composer(["gate=default", "protocol.replicates=2"]).variant(None).protocol.replicates == 2
    assert composer([]).variant(None).protocol.replicates == 3


def test_floors_change_the_order_of_computation_or_the_noise(composer: type[HydraComposer]) -> None:
    variant = composer([]).variant(None)
    draws = floor_draws(draw_of(variant), variant, 5, threads=2)
    assert {len(draw.prompts) for ways in draws.values() for draw in ways} == {5}
    assert [(draw.batch_size, draw.seed, draw.threads) for draw in draws["numerical"]] == [(4, 0, 1), (2, 0, 1)]
    assert [draw.batch_size for draw in draws["sampling"]] == [1]
    assert draws["sampling"][0].seed != 0
    assert list(draws)[-1] == "numerical"  # what may find no memory, and sets the number of threads, comes last


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=bf16"],
        ["workload.steps=7"],
        ["workload.seed=3"],
        ["workload.guidance_scale=2"],
        ["workload.batch_size=2"],
        ["scheduler=euler"],
        ["hardware.threads=2"],
        ["quality.prompt_count=9"],
        ["compiler=inductor", "compiler.mode=max-autotune"],
    ],
)
def test_the_key_depends_on_every_choice(composer: type[HydraComposer], overrides: list[str]) -> None:
    assert key_of(composer, *overrides) != key_of(composer)


def test_the_key_depends_on_weights_versions_code_and_device(composer: type[HydraComposer]) -> None:
    variant = composer([]).variant(None)
    keys = {
        key_of(composer),
        content_key(variant, draw_of(variant), INPUTS | {"model": "other weights"}, ENVIRONMENT),
        key_of(composer, packages={"torch": "2.13.1"}),
        key_of(composer, code="other"),
        key_of(composer, device={"name": "another"}),
        key_of(composer, python="3.12.1"),
    }
    assert len(keys) == 6
    assert key_of(composer) == key_of(composer)


class TestCache:
    @pytest.fixture
    def drawn(self, tmp_path: Path) -> tuple[Path, list[ImageRecord]]:
        folder = tmp_path / "drawn"
        folder.mkdir()
        records = []
        for number in range(3):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
            records.append(ImageRecord("a", number, 0, number, f"{number}.png", finite=number != 1))
        return folder, records

    def test_gives_back_what_was_kept(self, drawn: tuple[Path, list[ImageRecord]], tmp_path: Path) -> None:
        folder, records = drawn
        cache = ImageCache(tmp_path / "cache")
        assert cache.fetch("ab12", tmp_path / "again") is None
        cache.keep("ab12", folder, records)
        assert cache.fetch("ab12", tmp_path / "again") == records
        assert (tmp_path / "again/2.png").read_bytes() == (folder / "2.png").read_bytes()

    def test_what_is_not_whole_is_drawn_again(self, drawn: tuple[Path, list[ImageRecord]], tmp_path: Path) -> None:
        cache = ImageCache(tmp_path / "cache")
        cache.keep("ab12", *drawn)
        next((tmp_path / "cache").rglob("1.png")).unlink()
        assert cache.fetch("ab12", tmp_path / "again") is None

    def test_what_a_killed_process_left_half_filled_is_removed(
        self, drawn: tuple[Path, list[ImageRecord]], tmp_path: Path
    ) -> None:
        """A process that fills its folder now is not disturbed."""
        cache = ImageCache(tmp_path / "cache")
        stale, fresh = tmp_path / "cache/cd/tmpleft", tmp_path / "cache/cd/tmpnow"
        for folder in (stale, fresh):
            folder.mkdir(parents=True)
            (folder / "0.png").touch()
        os.utime(stale, (0, 0))
        cache.keep("ab12", *drawn)
        assert fresh.is_dir()
        assert not stale.exists()
        assert cache.fetch("ab12", tmp_path / "again") is not None


def test_images_of_a_users_own_option_are_not_kept(tmp_path: Path) -> None:
    """It may read files that no key knows of."""
    quality = ("quality=default", "quality.prompt_count=2", "quality.features=[]", "protocol.stage_calls=0")
    with fake_workers():
        finished = sdopt(tmp_path, "run", *SABOTAGE, *SMOKE, *quality, "+sabotage=harmless")
    assert finished.code == 0, finished.shown
    kept = {folder.name for folder in (tmp_path / "outputs/cache/images").glob("*/*")}
    assert [row.content_key in kept for row in finished.result.variants if row.images] == [True, False]
