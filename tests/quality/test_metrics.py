"""The table of metrics: names, and what each of them needs."""

import pytest

from sdopt.errors import UsageError
from sdopt.quality.metrics import FAMILIES, metric_named, slug


def test_every_metric_is_found_by_its_name() -> None:
    names = set()
    for family in FAMILIES:
        name = f"{family.name}_emojiclip" if family.over_features else family.name
        metric = metric_named(name)
        assert metric.name == name
        assert metric.family is family
        names.add(name)
    assert len(names) == len(FAMILIES)


def test_the_needs_and_limits_of_each_metric_fit() -> None:
    for family in FAMILIES:
        assert family.needs_prompts + family.needs_pair + family.needs_reference_set <= 1, family.name
        assert family.per_image != family.needs_reference_set, family.name
        assert 1 <= family.least <= family.decides_from, family.name
        # Parity with the reference is all that random weights can show.
        assert not family.on_random_weights or (family.needs_pair and not family.over_features), family.name


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("emojiclip", "emojiclip"),
        ("clip:openai/clip-vit-large-patch14", "clip_vit_large_patch14"),
        ("clip:/home/me/My CLIP/", "my_clip"),
    ],
)
def test_features_in_names(features: str, expected: str) -> None:
    assert slug(features) == expected


def test_other_features_are_named_too() -> None:
    metric = metric_named("clip_score_clip_vit_base_patch32", ["emojiclip", "clip:openai/clip-vit-base-patch32"])
    assert metric.features == "clip:openai/clip-vit-base-patch32"
    assert metric.name == "clip_score_clip_vit_base_patch32"


@pytest.mark.parametrize(
    "name", ["fid", "clip_score", "mse_emojiclip", "clip_score_effnet", "perceptual_inception", "x"]
)
def test_names_of_no_metric(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name}: no such metric; there are .*psnr_db, .*fid_<features>"):
        metric_named(name)


def test_two_features_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="called alike"):
        metric_named("fid_clip", ["clip:/a/clip", "clip:/b/clip"])
