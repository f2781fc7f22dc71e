"""Which images are drawn, and from which noise."""

from sdopt.config.composer import HydraComposer
from sdopt.worker.draws import draw_of, floor_draws, timed_draw


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
