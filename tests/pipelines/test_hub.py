"""Models on the Hugging Face Hub, from a local cache with the network off, and from a hub that refuses."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.hf_api import ModelInfo
from safetensors.torch import load_file

from sdopt.config.composer import HydraComposer
from sdopt.errors import UsageError
from sdopt.pipelines.catalog import PACKAGED
from sdopt.pipelines.fetching import fetch_models
from sdopt.pipelines.hub import download_bytes, hub_configs, hub_folder
from sdopt.pipelines.loading import load_part
from sdopt.preparation import awaits_clip, fetch_clip
from sdopt.quality.available import PUBLISHED, fetch_features
from sdopt.record.records import Status
from sdopt.reference import CLIP
from sdopt.schema import Model
from tests.command import SMOKE, refused, sdopt, start
from tests.pipelines.loaded import load

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MINE = "model.hub_id=somebody/small-emoji"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A hub cache as huggingface_hub lays it out, with the reference model under an id of its own."""
    hub = tmp_path / "hub"
    repository = hub / "models--somebody--small-emoji"
    for number, file in enumerate(sorted((PACKAGED / "emoji").rglob("*.*"))):
        blob = repository / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        place = repository / "snapshots" / COMMIT / file.relative_to(PACKAGED / "emoji")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return hub


def offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Turns the network off, with a folder as the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def in_cache(hub: Path, folder: Path, repository: str) -> Path:
    """Puts a folder into a cache of the hub; returns its place there."""
    place = hub / f"models--{repository.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return place / "snapshots" / COMMIT


def add_clip(cache: Path) -> None:
    """Puts the packaged CLIP into a cache under the name of the published one."""
    in_cache(cache, CLIP, PUBLISHED.removeprefix("clip:"))


class TestCache:
    @pytest.mark.slow  # it imports PyTorch anew
    def test_is_all_that_a_study_needs(self, tmp_path: Path, cache: Path) -> None:
        """With the published CLIP, which nobody names."""
        add_clip(cache)
        work = (
            "model.weights=hub",
            MINE,
            "model.name=small",
            "quality=default",
            "quality.prompt_count=3",
        )
        # In a process of its own: huggingface_hub reads its environment when it is imported.
        environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
        finished = start(tmp_path, "run", *SMOKE, *work, **environment).finish(
            timeout_s=600
        )
        assert finished.code == 0, finished.err
        assert [row.status for row in finished.result.variants] == [Status.OK] * 2
        assert finished.result.config.model.hub_id == "somebody/small-emoji"
        assert finished.result.variants[0].images
        assert (
            "clip_score_clip_vit_large_patch14" in finished.result.variants[0].quality
        )

    def test_a_published_clip_scores_without_being_named(
        self,
        cache: Path,
        composer: type[HydraComposer],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        offline(monkeypatch, cache)
        work = (
            "model.weights=hub",
            MINE,
            "model.name=small",
            "quality=default",
            "quality.prompt_count=3",
        )
        composed = composer([*SMOKE, *work])
        assert awaits_clip(composed)
        fetched, said = [], StringIO()
        monkeypatch.setattr(HydraComposer, "refresh", lambda _: fetched.append(1))
        with redirect_stderr(said):
            fetch_clip(composed)
        assert not fetched
        assert (
            f"no CLIP score: features {PUBLISHED}: not complete in the local cache"
            in said.getvalue()
        )
        with pytest.raises(
            UsageError,
            match="features clip:somebody/clip: not complete in the local cache",
        ):
            fetch_features("clip:somebody/clip")
        add_clip(cache)
        composed = composer([*SMOKE, *work])
        assert not awaits_clip(composed)
        assert composed.current.recorded.quality.features == [PUBLISHED]
        assert not awaits_clip(composer([*SMOKE, *work[:-2], "quality=none"]))
        assert (
            composer([*SMOKE, "quality=default"]).current.quality.features is None
        )  # emoji has its own

    def test_without_the_model_is_a_usage_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offline(monkeypatch, tmp_path / "empty")
        said = "model.hub_id=somebody/small-emoji: not complete in the local cache"
        refused(tmp_path, "run", *SMOKE, "model.weights=hub", MINE, says=said)
        planned = sdopt(
            tmp_path, "run", *SMOKE, "model.weights=hub", MINE, "dry_run=true"
        )
        assert planned.code == 0, planned.err
        assert not list(tmp_path.rglob("*.log")), "no worker was started"
        assert (
            "download of somebody/small-emoji: unknown, the hub cannot be asked"
            in planned.shown
        )

    def test_a_transformer_in_a_file_needs_the_other_parts(
        self,
        tmp_path: Path,
        tiny_folder: Callable[[str], Path],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        hub, weights = tmp_path / "hub", "diffusion_pytorch_model.safetensors"
        file = tmp_path / "flux.safetensors"
        shutil.copy(tiny_folder("flux") / "transformer" / weights, file)
        there = in_cache(hub, tiny_folder("flux"), "somebody/flux")
        (there / "transformer" / weights).unlink()
        offline(monkeypatch, hub)
        model = Model("folder", "path", path=str(file), base="somebody/flux")
        fetch_models([model])
        network = load_part(model, "transformer", torch.float32)
        assert network.state_dict()["x_embedder.weight"].equal(
            load_file(file)["x_embedder.weight"]
        )
        (there / "vae" / weights).unlink()
        with pytest.raises(UsageError, match="not complete in the local cache"):
            fetch_models([model])

    def test_what_would_be_downloaded_is_what_a_pipeline_needs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offline(monkeypatch, tmp_path / "empty")
        sizes = {
            "model_index.json": 1,
            "unet/config.json": 20,
            "unet/diffusion_pytorch_model.safetensors": 3000,
            "unet/diffusion_pytorch_model.fp16.safetensors": 1500,
            "unet/diffusion_pytorch_model.bin": 3000,
            "safety_checker/model.safetensors": 900,
            "sd-v1-5.ckpt": 9000,
            "tokenizer/sentencepiece.bpe.model": 500,
        }
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        made: Any = ModelInfo
        info = made(id="somebody/small-emoji", siblings=siblings)
        monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: info)
        model = Model(weights="hub", hub_id="somebody/small-emoji")
        assert download_bytes(model) == 1 + 20 + 500 + 3000
        assert download_bytes(replace(model, variant="fp16")) == 1 + 20 + 500 + 1500

    def test_with_a_file_missing(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offline(monkeypatch, cache)
        model = Model(weights="hub", hub_id="somebody/small-emoji")
        assert hub_folder(model, fetch=False) == hub_folder(model, fetch=True)
        fetch_models([model, model])
        assert download_bytes(model) == 0
        assert load(model).unet.config.in_channels == 8
        [file] = cache.glob("*/snapshots/*/vae/*.safetensors")
        file.unlink()
        assert download_bytes(model) is None
        with pytest.raises(
            UsageError,
            match=r"model\.hub_id=somebody/small-emoji: .*(vae/ holds no|not complete in)",
        ):
            fetch_models([model])

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (
                "unet/diffusion_pytorch_model.bin",
                "no safetensors files of unet, and sdopt loads no pickled weights",
            ),
            (
                "unet/diffusion_pytorch_model.fp16.safetensors",
                "unet/ holds only files of a variant (fp16)",
            ),
        ],
    )
    def test_with_weights_that_are_not_read(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch, names: str, said: str
    ) -> None:
        """What the repository has is asked: of what is not read, nothing is fetched."""
        offline(monkeypatch, cache)
        there = [
            names,
            "vae/diffusion_pytorch_model.safetensors",
            "text_encoder/model.safetensors",
        ]
        monkeypatch.setattr("sdopt.pipelines.hub._names", lambda *_: there)
        with pytest.raises(UsageError) as caught:
            fetch_models([Model(weights="hub", hub_id="somebody/small-emoji")])
        assert said in caught.value.problems[0]

    def test_of_another_family(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has no folder unet/, and is told before any of it is fetched."""
        offline(monkeypatch, cache)
        [index] = cache.glob("*/snapshots/*/model_index.json")
        index.write_text('{"_class_name": "KolorsPipeline"}')
        with pytest.raises(
            UsageError, match="is a KolorsPipeline; sdopt runs StableDiffusionPipeline"
        ):
            hub_configs("somebody/small-emoji")


class _Hub(BaseHTTPRequestHandler):
    """Answers as the hub does where it gives nothing away: by the header that names the reason."""

    def do_GET(self) -> None:
        code, reason = (
            (403, "GatedRepo") if "gated" in self.path else (404, "RepoNotFound")
        )
        self.send_response(code)
        self.send_header("X-Error-Code", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 (the name is the base class's)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("refusing")
def test_refusals_are_in_the_words_of_the_hub_for_all_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        fetch_models(
            [
                Model(weights="hub", hub_id=name)
                for name in ("a/gated", "b/nothing", "not a name")
            ]
        )
    gated, unknown, misnamed = caught.value.problems
    assert gated.startswith("model.hub_id=a/gated: ")
    assert "gated" in gated.removeprefix("model.hub_id=a/gated: ")
    assert "Repository Not Found" in unknown
    assert "'not a name'" in misnamed
