"""The presets of published studies, each with the packaged model on a CPU, where some cannot run; none is timed."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from sdopt.config.groups import data_sheets
from sdopt.config.paths import CONF
from sdopt.hardware.cards import planned_device
from sdopt.pipelines.sampling import scheduler_class
from sdopt.record.records import Status
from sdopt.reference import MODEL
from sdopt.statistics.reproduction import claims_of
from sdopt.study.designs import CONTROL
from tests.command import SMOKE, Finished, sdopt
from tests.fakes import fake_workers
from tests.fixtures import Composers

STUDIES = sorted(
    path.stem
    for path in (CONF / "experiment").glob("*.yaml")
    if OmegaConf.select(OmegaConf.load(path), "study.published") is not None
)
LIGHT = "hf_memory_speed"
"""On each commit; the others take as long, and go the same way."""
LESS = {
    "blade_sd15": ["workload.size=[64,96]"],
    "blade_sd15_pipelines": ["workload.steps=2"],
    "paraattention_flux": ["workload.steps=2"],
    "pytorch2_sd21": ["workload.batch_size=[1,2]"],
}
"""Lists of sizes and batches for a CPU, and steps enough for the start image's strength, or to skip a block."""


def run(folder: Path, name: str, *overrides: str) -> Finished:
    with fake_workers():
        return sdopt(
            folder,
            "run",
            f"experiment={name}",
            "model=emoji",
            *SMOKE,
            "protocol.stage_calls=0",
            *overrides,
        )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(
            ["scheduler=ddim"],
            marks=pytest.mark.xfail(raises=RuntimeError, strict=True),
        ),
    ],
)
def test_the_fastest_on_a_card_never_waits_for_it_within_a_step(
    composer: Composers, overrides: list[str]
) -> None:
    """A value on the meta device cannot be read, as a value on a card cannot without waiting for it."""
    chosen = composer(["experiment=fastest_cuda", *overrides]).current.scheduler
    configuration = json.loads(
        (MODEL / "scheduler" / "scheduler_config.json").read_text()
    )
    scheduler = scheduler_class(chosen).from_config(configuration, **chosen.options)
    scheduler.set_timesteps(4)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)  # the one read of an image
    scheduler.timesteps = scheduler.timesteps.to("meta")
    latents = torch.empty(1, 4, 8, 8, device="meta")
    for timestep in scheduler.timesteps:
        prediction = scheduler.scale_model_input(latents, timestep)
        latents = scheduler.step(prediction, timestep, latents).prev_sample


@pytest.mark.parametrize(
    "overrides",
    [["model=sd15"], ["model=sdxl", "precision=bf16"]],
    ids=["sd15", "sdxl"],
)
def test_every_row_of_the_fastest_can_run_on_a_card(
    composer: Composers, overrides: list[str]
) -> None:
    composed = composer(
        [
            "experiment=fastest_cuda",
            "model.weights=random",
            "workload.batch_size=[1,4,8]",
            *overrides,
        ]
    )
    variants = composed.current.study.plan(composed).variants
    card = planned_device(data_sheets()["h200"])
    assert {variant.name: variant.conflicts(card) for variant in variants} == {
        row.name: [] for row in variants
    }
    # Against half precision, float32 is slower and larger, so that no gate could pass: it is a reference alone.
    if "model=sd15" in overrides:
        edges = composed.current.study.plan(composed).edges
        weights = {
            v.name: getattr(v.optimizations["precision"], "weights", None)
            for v in variants
        }
        assert weights["float32"] == "float32"
        assert all(weights[edge.candidate] != "float32" for edge in edges)
        assert "float32" in {edge.reference for edge in edges}
    compiled = [
        variant for variant in variants if variant.name.startswith("all compiled")
    ]
    assert [variant.choices["caching"].partition("(")[0] for variant in compiled] == [
        "none",
        "deepcache",
        "none",
    ]
    for variant in compiled:
        assert variant.choices["attention"] == "fused_qkv"
        assert getattr(variant.optimizations["compiler"], "targets", []) == [
            "text_encoder",
            "denoiser",
            "decoder",
        ]


def test_there_are_the_five_articles_on_unets_and_those_on_transformers() -> None:
    published = [
        OmegaConf.load(CONF / "experiment" / f"{name}.yaml").study.published
        for name in STUDIES
    ]
    of_transformers = {"flux_dev", "sd3_medium", "pixart_sigma"}
    articles: dict[bool, set[str]] = {True: set(), False: set()}
    for one in published:
        articles[one.setup.model in of_transformers].add(one.article)
    assert len(articles[False]) == 5
    assert len(articles[True]) == 8


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == LIGHT else pytest.mark.slow)
        for name in STUDIES
    ],
)
def test_goes_on_without_the_rows_that_cannot_run_and_lists_them(
    tmp_path: Path, name: str
) -> None:
    finished = run(tmp_path, name, *LESS.get(name, []))
    assert finished.code == 0, finished.shown
    result = finished.result
    skipped = [row for row in result.variants if row.status is Status.SKIPPED]
    ran = [row for row in result.variants if row.status is Status.OK]
    assert len(skipped) + len(ran) == len(result.variants), finished.shown
    rows = 0 if name == "hf_flux_lora_fa3" else 1  # its rows all need a card
    assert len(ran) >= 2 + rows, "the baseline and its control"
    table, published = (
        (finished.folder / f"{page}.md").read_text() for page in ("table", "published")
    )
    claims = claims_of(result)
    for row in skipped:
        assert row.reason
        assert row.name in finished.shown
        assert row.name in table
        # What is a reference alone is named in the reasons of what is compared with it.
        about = [
            claim for claim in claims if row.name in (claim.variant, claim.reference)
        ]
        assert any(
            claim.verdict == "not run" and row.reason in claim.reason for claim in about
        )
    compared = [
        (edge.candidate, edge.reference)
        for edge in result.comparisons
        if edge.reference != edge.candidate
    ]
    # What a variant takes of memory is claimed of itself.
    edges = {(c.variant, c.reference) for c in claims}
    for candidate, reference in compared:
        assert candidate == CONTROL or {(candidate, reference), (candidate, "")} & edges
    # The packaged model reproduces no article.
    assert {claim.verdict for claim in claims} <= {
        "not run",
        "not judged",
        "no figure",
    }
    why = (
        "not measured at" if name == "blade_sd15" else "measured here with model emoji"
    )
    assert f"| not judged | {why}" in published or "not judged" not in {
        c.verdict for c in claims
    }


@pytest.mark.slow
def test_the_rules_of_mlperf(tmp_path: Path) -> None:
    (tmp_path / "captions.tsv").write_text("id\tcaption\n1\ta red apple\n2\ta dog\n")
    torch.save(torch.randn(1, 8, 4, 4), tmp_path / "latents.pt")
    given = [
        f"workload.prompts={tmp_path / 'captions.tsv'}",
        f"workload.latents={tmp_path / 'latents.pt'}",
    ]
    finished = run(
        tmp_path,
        "mlperf_sdxl",
        "gate=none",
        "precision=bf16",
        "workload.batch_size=2",
        *given,
    )
    assert finished.code == 0, finished.shown
    assert [row.status for row in finished.result.variants] == [Status.OK] * 3
    assert finished.result.config.scheduler.class_name == "EulerDiscreteScheduler"


def test_where_nothing_else_can_run_the_baseline_is_measured_if_asked_for(
    tmp_path: Path,
) -> None:
    study = [
        "study=explicit",
        'study.variants={plain: [], cudnn: ["attention=cudnn"]}',
        "workload.steps=1",
    ]
    with fake_workers():
        finished = sdopt(tmp_path, "run", *SMOKE, *study, "study.skip_conflicts=true")
    assert finished.code == 0, finished.shown
    assert [row.status for row in finished.result.variants] == [
        Status.OK,
        Status.SKIPPED,
        Status.OK,
    ]
    assert "needs a CUDA device" in finished.result.variants[1].reason
