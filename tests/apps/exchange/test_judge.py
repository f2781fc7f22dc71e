"""Images, times and scores that other programs made are judged by the rules of a study."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdopt.apps.exchange import judging
from sdopt.apps.exchange.pairing import partners, require_alike
from sdopt.apps.exchange.pictures import read_folder, read_table
from sdopt.apps.exchange.scores import export, import_scores
from sdopt.apps.exchange.study import GivenFolder, import_study
from sdopt.errors import UnavailableError, UsageError
from sdopt.gate.calibration import read_calibration
from sdopt.record.files import read_result
from sdopt.record.verdicts import Verdict
from sdopt.reference import MODEL
from sdopt.report.summary import summary_of
from sdopt.tracking.contents import logged_metrics
from tests.command import SMOKE, Finished, sdopt
from tests.fakes import fake_study

COUNT = 8


def pictures(seed: int = 0, noise: float = 0.0) -> np.ndarray:
    """Smooth pictures, all different: uint8 (n, 64, 64, 3)."""
    coarse = np.random.default_rng(seed).integers(
        30, 225, (COUNT, 6, 6, 3), dtype=np.uint8
    )
    smooth = [
        Image.fromarray(each).resize((64, 64), Image.Resampling.BICUBIC)
        for each in coarse
    ]
    wrong = noise * np.random.default_rng(99).standard_normal((COUNT, 64, 64, 3))
    return (
        np.clip(np.stack([np.asarray(each) for each in smooth]) + wrong, 0, 255)
        .round()
        .astype(np.uint8)
    )


def write(
    folder: Path, images: np.ndarray, seconds: float | None = None, listed: bool = True
) -> Path:
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number}.png")
    if listed:
        table(
            folder / "prompts.csv",
            ("file", "prompt", "seed"),
            [(f"{n}.png", f"thing {n}", n) for n in range(COUNT)],
        )
    if seconds is not None:
        random = np.random.default_rng(len(folder.name))
        calls = [
            (n % 4, n // 4, seconds * np.exp(0.01 * random.standard_normal()))
            for n in range(12)
        ]
        table(folder / "times.csv", ("round", "replicate", "seconds"), calls)
    return folder


def table(file: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([names, *rows])


Judge = Callable[..., Finished]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Judges without networks that look at images, which take seconds."""
    others = (
        "quality.features=[]",
        "tracking=none",
        "hardware=cpu",
        "--output",
        "outputs/judged",
    )
    return lambda *arguments: sdopt(tmp_path, "judge", *map(str, arguments), *others)


class TestJudging:
    def test_the_same_images_pass_as_exact_faster_times_as_a_gain_and_slower_ones_as_a_regression(
        self, tmp_path: Path, judge: Judge
    ) -> None:
        times = {"a": 0.2, "again": 0.2, "faster": 0.1, "slow": 0.4}
        first, again, faster, slow = (
            write(tmp_path / name, pictures(), seconds)
            for name, seconds in times.items()
        )
        done = judge(first, faster, slow, "--again", again, "--contract", "exact")
        assert done.code == 1, done.shown
        judged, regression = done.result.judgements
        assert (judged.verdict, judged.gains, regression.verdict) == (
            Verdict.PASS,
            ["speedup"],
            Verdict.FAIL,
        )
        assert "own word" in judged.note
        speedup = done.result.comparisons[0].shapes[0].speedup
        assert speedup is not None
        assert (speedup.low or 0) > 1.9
        assert done.result.control is not None
        assert "step" not in done.shown  # nobody told it
        assert "calls of each process" in (done.folder / "table.md").read_text()

    def test_two_of_one_second_have_folders_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folders: list[Path] = []

        def begun(*arguments: Any) -> None:
            folders.append(arguments[-1])
            raise UsageError("enough")

        def now() -> datetime:
            return datetime(2026, 1, 2, 3, 4, 5, len(folders), UTC)

        images = write(tmp_path / "images", pictures())
        monkeypatch.setattr(judging, "import_study", begun)
        monkeypatch.setattr(judging, "datetime", SimpleNamespace(now=now))
        for _ in range(2):
            with pytest.raises(UsageError, match="enough"):
                judging.judge_folders(
                    GivenFolder(images, [images]), ["hardware=cpu"], None, []
                )
        assert folders[0] != folders[1]

    def test_one_damaged_image_is_a_regression(
        self, tmp_path: Path, judge: Judge
    ) -> None:
        images = pictures()
        images[3] = 0
        done = judge(
            write(tmp_path / "a", pictures()),
            write(tmp_path / "b", images),
            "--contract",
            "exact",
        )
        assert done.code == 1
        failed = [
            ruling.rule
            for ruling in done.result.judgements[0].rulings
            if ruling.verdict is Verdict.FAIL
        ]
        assert {"tripwires", "exact"} <= {*failed}

    def test_without_a_second_baseline_no_gain_is_shown(
        self, tmp_path: Path, judge: Judge
    ) -> None:
        first, faster = (
            write(tmp_path / name, pictures(), s)
            for name, s in (("a", 0.2), ("b", 0.1))
        )
        done = judge(first, faster, "--contract", "exact")
        assert done.code == 3
        assert "--again" in done.shown
        page = (done.folder / "table.md").read_text()
        assert "Imported" in page
        assert "baselines failed" not in page  # there was only one

    def test_what_was_not_given_is_said_and_not_judged(
        self, tmp_path: Path, judge: Judge
    ) -> None:
        sides = [
            write(tmp_path / name, pictures(), listed=False) for name in ("a", "b")
        ]
        done = judge(*sides, "--contract", "exact")
        assert done.code == 0, done.shown
        assert "not judged, because it was not given: speed (times.csv)" in done.shown
        assert "--again" not in done.shown, "nothing was timed, so no gain is asked for"

    def test_the_form_that_score_exports_can_be_judged(
        self, finished: Finished, tmp_path: Path, judge: Judge
    ) -> None:
        assert (
            sdopt(tmp_path, "score", str(finished.folder), "--export", "out").code == 0
        )
        folders = [folder for folder in (tmp_path / "out").iterdir() if folder.is_dir()]
        first = tmp_path / "out" / "baseline"
        others = [folder for folder in folders if folder != first]
        assert others
        done = judge(first, *others)
        assert done.code in (0, 1, 3)
        assert len(done.result.variants) == len(folders)
        assert done.result.variants[0].measurements

    def test_other_calls_are_no_part_of_it(self, tmp_path: Path, judge: Judge) -> None:
        first, second = (write(tmp_path / name, pictures()) for name in ("a", "b"))
        done = judge(first, second, "workload.steps=4")
        assert done.code == 2
        assert "workload.steps" in done.err
        assert judge(first, "gate=strict").code == 2
        assert not (tmp_path / "outputs").exists()


def drawn_by_diffusers(folder: Path, changed: bool = False) -> Path:
    """Draws with diffusers alone, as a user's script does; keeps what the images were made from."""
    pipe = StableDiffusionPipeline.from_pretrained(
        MODEL, safety_checker=None, requires_safety_checker=False
    )
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    if changed:
        pipe.unet.to(memory_format=torch.channels_last)
    colours, things = (
        ("red", "blue", "green", "yellow"),
        ("apple", "cat", "car", "house", "star"),
    )
    prompts = [f"a {colour} {thing}" for thing in things for colour in colours]
    noise = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    folder.mkdir()
    for seed, image in enumerate(
        pipe(prompts, num_inference_steps=2, generator=noise).images
    ):
        image.save(folder / f"{seed}.png")
    rows = [(f"{seed}.png", prompt, seed) for seed, prompt in enumerate(prompts)]
    table(folder / "prompts.csv", ("file", "prompt", "seed"), rows)
    return folder


def test_what_plain_diffusers_drew_and_a_tenth_of_it_damaged(
    tmp_path: Path, judge: Judge
) -> None:
    base = drawn_by_diffusers(tmp_path / "base")
    changed = drawn_by_diffusers(tmp_path / "changed", changed=True)
    again = shutil.copytree(base, tmp_path / "again")
    damaged = shutil.copytree(changed, tmp_path / "damaged")
    for number in range(0, 20, 10):
        Image.new("RGB", (64, 64)).save(damaged / f"{number}.png")
    precision = ("--precision", "float32")
    done = judge(
        base,
        changed,
        damaged,
        "--again",
        again,
        *precision,
        "--contract",
        "equivalent",
        "--json",
    )
    assert done.code == 1, done.shown
    assert [judged.verdict for judged in done.result.judgements] == [
        Verdict.PASS,
        Verdict.FAIL,
    ]
    assert all(score is not None for score in done.result.floors["numerical"].values())
    [study] = json.loads(done.out)["studies"]
    _, worse = study["candidates"]
    assert worse["images"] == "worse"
    assert "2 of 20 images are broken" in worse["because"]
    assert {"a red apple", "a green car"} <= {one["prompt"] for one in worse["worst"]}


def test_a_calibration_of_two_folders_gives_margins(
    tmp_path: Path, judge: Judge
) -> None:
    folders = []
    for name, images in (
        ("a", pictures()),
        ("b", pictures(seed=1)),
        ("noisy", pictures(noise=30)),
    ):
        images[-1] = images[0]
        folders.append(write(tmp_path / name, images))
    first, second, noisy = folders
    plain = ("--output", "own.json", "quality.features=[]")
    made = sdopt(tmp_path, "calibrate", "--from", str(first), str(second), *plain)
    assert made.code == 0, made.shown
    assert f"1 of {COUNT} images are copies of others in every folder" in made.err
    assert read_calibration(tmp_path / "own.json").metrics["colour_error"].mean > 0.01
    same = sdopt(tmp_path, "calibrate", "--from", str(first), str(first), *plain)
    assert same.code == 2
    assert "the same image" in same.err
    assert sdopt(tmp_path, "calibrate", "--from", str(first), str(second)).code == 2
    assert judge(first, noisy, "gate.calibration=own.json").code == 1


METRIC = """
import csv, pathlib, sys

out = pathlib.Path(sys.argv[1])
rows = list(csv.DictReader((out / "images.csv").open(newline="")))
folders = {row["variant"]: row["variant"].replace(" ", "_") for row in rows}
for row in rows:
    row["Bytes"] = (out / folders[row["variant"]] / row["file"]).stat().st_size
with open(sys.argv[2], "w", newline="") as stream:
    table = csv.DictWriter(stream, ["variant", "file", "Bytes"], extrasaction="ignore")
    table.writeheader()
    table.writerows(rows)
"""
"""A metric by an interpreter that has nothing but Python: how many bytes the PNG of an image takes."""


@pytest.mark.slow
def test_another_interpreter_scores_what_a_run_exports(tmp_path: Path) -> None:
    work = (
        "workload.steps=2",
        "quality.metrics=true",
        "quality.prompt_count=4",
        "quality.features=[]",
    )
    run = sdopt(
        tmp_path, "run", *SMOKE, *work, "layout=channels_last", "--export", "out"
    )
    assert run.code == 0, run.shown
    (tmp_path / "metric.py").write_text(METRIC)
    alone = [sys.executable, "-I", "-S", "metric.py", "out", "scores.csv"]
    subprocess.run(alone, check=True, cwd=tmp_path)
    assert (
        sdopt(
            tmp_path,
            "score",
            str(run.folder),
            "--import",
            "scores.csv",
            "--lower",
            "bytes",
        ).code
        == 0
    )
    result = read_result(run.folder)
    name = result.candidates[0].name
    drawn = result.variant(name).images
    expected = [float((run.folder / image.path).stat().st_size) for image in drawn]
    assert result.variant(name).quality["penalty_bytes"].per_prompt == expected
    logged = logged_metrics(summary_of(result), result.variant(name))
    assert logged["quality/penalty_bytes"] == pytest.approx(np.mean(expected))
    assert "penalty_bytes" in sdopt(tmp_path, "show", str(run.folder), "--all").shown


class TestScores:
    @pytest.fixture(scope="class")
    def prepared(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Two folders, judged, and what `score` gives out of them."""
        folder = tmp_path_factory.mktemp("scores")
        sides = [str(write(folder / name, pictures())) for name in ("a", "b")]
        work = (
            "--contract",
            "exact",
            "quality.features=[]",
            "tracking=none",
            "hardware=cpu",
        )
        assert (
            sdopt(folder, "judge", *sides, *work, "--output", "outputs/judged").code
            == 0
        )
        assert sdopt(folder, "score", "outputs/judged", "--export", "out").code == 0
        return folder

    def rows(self, folder: Path, worse: float) -> list[dict[str, Any]]:
        found = read_table(folder / "out" / "images.csv")
        assert len(found) == 2 * COUNT
        return [
            {
                **row.values,
                "reward": number % 5 - (worse if row.values["variant"] == "b" else 0),
            }
            for number, row in enumerate(found)
        ]

    def test_are_judged_like_our_own(self, tmp_path: Path, prepared: Path) -> None:
        shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
        judged, rows = tmp_path / "outputs" / "judged", self.rows(tmp_path, worse=2.0)
        table(
            tmp_path / "scores.csv", list(rows[0]), [list(row.values()) for row in rows]
        )
        assert sdopt(tmp_path, "score", str(judged), "--import", "scores.csv").code == 0
        result = read_result(judged)
        assert len(result.variant("b").quality["score_reward"].per_prompt) == COUNT
        shown = sdopt(tmp_path, "show", str(judged)).shown
        assert "reward" in shown
        rule = "{metric:score_reward,margin:0.5,confidence:null}"  # too few prompts for an interval
        gate = ["gate=default", f"gate.rules={{exact:[{rule}]}}"]
        failed = sdopt(tmp_path, "gate", str(judged), *gate, "--output", "verdicts")
        assert failed.code == 1, failed.shown
        assert (
            sdopt(
                tmp_path,
                "score",
                str(judged),
                "--import",
                "scores.csv",
                "--lower",
                "reward",
            ).code
            == 0
        )
        assert {"penalty_reward"} == {
            name
            for name in read_result(judged).variant("b").quality
            if "reward" in name
        }
        turned = [gate[0], gate[1].replace("score_", "penalty_")]
        assert (
            sdopt(tmp_path, "gate", str(judged), *turned, "--output", "verdicts").code
            == 0
        )

    def test_that_are_replaced_leave_no_verdict_of_the_earlier_ones(
        self, tmp_path: Path, prepared: Path
    ) -> None:
        shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
        judged = tmp_path / "outputs" / "judged"

        def taken(worse: float) -> str:
            rows = self.rows(tmp_path, worse)
            listed = [list(row.values()) for row in rows]
            table(tmp_path / "scores.csv", list(rows[0]), listed)
            done = sdopt(tmp_path, "score", str(judged), "--import", "scores.csv")
            assert done.code == 0
            return done.err

        rule = "{metric:score_reward,margin:0.5,confidence:null}"
        taken(worse=0.0)
        gate = ["gate=default", f"gate.rules={{exact:[{rule}]}}"]
        assert sdopt(tmp_path, "gate", str(judged), *gate).code == 0
        assert taken(worse=0.0) == "", "the same scores, and so the same verdicts"
        assert read_result(judged).judgements
        assert "its verdicts were of other scores" in taken(worse=2.0)
        result = read_result(judged)
        assert (result.gate, result.judgements) == ("", [])
        assert result.looks

    def test_go_by_folders_of_their_own_and_a_missing_image_is_named(
        self, tmp_path: Path, prepared: Path
    ) -> None:
        folder = prepared / "outputs" / "judged"
        result = read_result(folder)
        for variant, name in zip(result.variants, ("x y", "x_y"), strict=True):
            variant.name = name
        export(result, folder, tmp_path / "out")
        assert {
            path.name for path in (tmp_path / "out").iterdir() if path.is_dir()
        } == {"x_y", "x_y_"}
        result.variants[0].images[0].path = "gone.png"
        with pytest.raises(UnavailableError, match=r"judged/gone.png: No such file"):
            export(result, folder, tmp_path / "again")

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_of_a_table_as_pandas_and_spreadsheets_write_it(
        self, tmp_path: Path, prepared: Path, delimiter: str
    ) -> None:
        rows = self.rows(prepared, worse=0.0)
        names = ["", "Unnamed: 0", "index", *rows[0]]
        as_read = [
            row | {"prompt": "two\u2028lines", "seed": f"{row['seed']}.0"}
            for row in rows
        ]
        lines = [
            [number, number, number, *row.values()]
            for number, row in enumerate(as_read)
        ]
        file = tmp_path / "scores.csv"
        with file.open("w", encoding="utf-8-sig", newline="") as stream:
            csv.writer(stream, delimiter=delimiter).writerows([names, *lines])
        assert import_scores(
            read_result(prepared / "outputs" / "judged"), file, ()
        ) == ["score_reward"]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda rows: rows[:-1], "have no row"),
            (lambda rows: [*rows, rows[0]], "has a row already"),
            (lambda rows: [{**row, "reward": "good"} for row in rows], "not a number"),
            (lambda rows: [{**row, "reward": "nan"} for row in rows], "not a number"),
            (
                lambda rows: [{**row, "reward": "0,5"} for row in rows],
                r"not a number \(write 0\.5\)",
            ),
            (
                lambda rows: [{**row, "my reward": 1, "my_reward": 2} for row in rows],
                "my reward, my_reward several",
            ),
            (
                lambda rows: [{**row, "LPIPS (alex)": 0.1} for row in rows],
                r"less is usually better: give --lower lpips \(alex\)",
            ),
            *(
                (
                    lambda rows, name=name: [{**row, name: 0.1} for row in rows],
                    f"less is usually better: give --lower {name}",
                )
                for name in ("fid50k", "sfid", "delta_e", "nrmse", "rank", "seconds")
            ),
            (
                lambda rows: [{**row, "variant": "c"} for row in rows],
                "not in the study",
            ),
            (
                lambda rows: [{**row, "file": "99999_00.png"} for row in rows],
                "has 0 images",
            ),
            (
                lambda rows: [
                    {k: v for k, v in row.items() if k != "reward"} for row in rows
                ],
                "no column of scores",
            ),
        ],
    )
    def test_that_do_not_fit_are_refused(
        self,
        tmp_path: Path,
        prepared: Path,
        change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
        said: str,
    ) -> None:
        rows, file = change(self.rows(prepared, worse=0.0)), tmp_path / "scores.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows))
        with pytest.raises(UsageError, match=said):
            import_scores(read_result(prepared / "outputs" / "judged"), file, ())


def animate(folder: Path) -> None:
    frames = [Image.fromarray(image) for image in pictures()[:2]]
    frames[0].save(folder / "3.png", save_all=True, append_images=frames[1:])


def in_jpeg_xl(folder: Path) -> None:
    """Writes an image in a format that Pillow does not read, in place of one that it does."""
    (folder / "3.png").unlink()
    table = folder / "prompts.csv"
    table.write_text(table.read_text().replace("3.png", "3.jxl"))
    (folder / "3.jxl").write_bytes(b"\xff\x0a\xfa\x1f\x01\x91\x08\x06\x01\x00\x4c\x00")


def listed_twice(folder: Path) -> None:
    with (folder / "prompts.csv").open("a", newline="") as stream:
        csv.writer(stream).writerow(["3.png", "another thing", 3])


A1111 = "a cat, (red:1.2)\nNegative prompt: blurry\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 42, Size: 64x64"

COMFY = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": ["9", 0],
            "positive": ["6", 0],
            "negative": ["7", 0],
            "steps": 20,
        },
    },
    "6": {
        "class_type": "CLIPTextEncode",
        "inputs": {"text": ["8", 0], "clip": ["4", 1]},
    },
    "7": {
        "class_type": "CLIPTextEncode",
        "inputs": {"text": "blurry", "clip": ["4", 1]},
    },
    "8": {"class_type": "PrimitiveString", "inputs": {"value": "a cat, (red:1.2)"}},
    "9": {"class_type": "Seed", "inputs": {"seed": 42}},
}


class TestPartners:
    def in_png(self, folder: Path, **texts: str) -> None:
        info = PngInfo()
        for key, value in texts.items():
            info.add_text(key, value)
        folder.mkdir()
        Image.new("RGB", (16, 16)).save(folder / "a.png", pnginfo=info)

    def test_what_programs_leave_in_files_is_read(self, tmp_path: Path) -> None:
        self.in_png(tmp_path / "a", parameters=A1111)
        self.in_png(tmp_path / "b", prompt=json.dumps(COMFY))
        [mine], [other] = (read_folder(tmp_path / name) for name in "ab")
        assert mine.made_from == other.made_from == ("a cat, (red:1.2)", "blurry", 42)
        assert partners([mine], [other], (tmp_path / "a", tmp_path / "b")) == [other]
        for name, prompt in (("c", "a bag, Seed: 5"), ("d", "")):
            self.in_png(
                tmp_path / name,
                parameters=A1111.replace("a cat, (red:1.2)", prompt).strip(),
            )
            assert read_folder(tmp_path / name)[0].made_from == (prompt, "blurry", 42)

    @pytest.mark.parametrize(
        ("said", "made_from"),
        [
            (
                "Seed: 5 of a flower\nSteps: 3 of them\n",
                ("Seed: 5 of a flower\nSteps: 3 of them", "", 42),
            ),
            ("Negative prompt: blurry\n", ("", "blurry", 42)),
            ("", ("", "", 42)),
        ],
    )
    def test_a_prompt_may_read_like_settings(
        self, tmp_path: Path, said: str, made_from: tuple[str, str, int]
    ) -> None:
        self.in_png(
            tmp_path / "a",
            parameters=f"{said}Steps: 20, Seed: 42, Size: 64x64\nTemplate: a {{cat|dog}}",
        )
        assert read_folder(tmp_path / "a")[0].made_from == made_from

    @pytest.mark.parametrize(
        "graph",
        [
            "[]",
            "{",
            '{"3": {"inputs": {"positive": ["3", 0], "seed": ["3", 0]}}}',
            '"x"',
        ],
    )
    def test_a_graph_that_says_nothing_is_no_error(
        self, tmp_path: Path, graph: str
    ) -> None:
        self.in_png(tmp_path / "a", prompt=graph)
        assert read_folder(tmp_path / "a")[0].made_from is None

    def test_by_prompt_and_seed_where_names_differ(self, tmp_path: Path) -> None:
        first, second = (write(tmp_path / name, pictures()) for name in ("a", "b"))
        rows = [
            (f"{n}.png", f"thing {COUNT - 1 - n}", COUNT - 1 - n) for n in range(COUNT)
        ]
        for file in sorted(second.glob("*.png")):
            file.rename(second / f"x{file.name}")
        table(
            second / "prompts.csv",
            ("file_name", "text", "seed"),
            [(f"x{name}", *rest) for name, *rest in rows],
        )
        found = partners(read_folder(first), read_folder(second), (first, second))
        assert [picture.file.stem for picture in found] == [
            f"x{COUNT - 1 - n}" for n in range(COUNT)
        ]

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda folder: (folder / "3.png").unlink(), "listed, and is not there"),
            (lambda folder: (folder / "3.png").rename(folder / "y.png"), "not"),
            (
                lambda folder: Image.new("RGB", (64, 64)).save(folder / "3.jpg"),
                "several images are named 3",
            ),
            (
                lambda folder: Image.new("RGB", (32, 32)).save(folder / "0.png"),
                "is 32×32",
            ),
            (
                lambda folder: Image.new("RGB", (32, 32)).save(folder / "5.png"),
                "is 32×32",
            ),
            (
                lambda folder: Image.new("I;16", (64, 64)).save(
                    folder / "prompts.csv", "PNG"
                ),
                "UTF-8",
            ),
            (
                lambda folder: (folder / "prompts.csv").write_text(
                    "file,prompt,seed\n0.png,a,one\n"
                ),
                "not",
            ),
            (listed_twice, "3.png is listed several times"),
            (
                lambda folder: (folder / "times.csv").write_text("seconds\n-1\n"),
                "above 0",
            ),
            (
                lambda folder: (folder / "times.csv").write_text("secs\n1\n"),
                "seconds is missing",
            ),
            (
                lambda folder: (folder / "times.csv").write_text(
                    "seconds, Seconds\n1,2\n"
                ),
                "the name seconds",
            ),
            (animate, "2 frames"),
            (in_jpeg_xl, "3.jxl: cannot be read as an image"),
        ],
    )
    def test_folders_that_do_not_fit_are_refused(
        self, tmp_path: Path, spoil: Callable[[Path], object], said: str
    ) -> None:
        first, second = (write(tmp_path / name, pictures()) for name in ("a", "b"))
        spoil(second)
        study = fake_study()[1]
        with pytest.raises(UsageError, match=said):
            import_study(
                GivenFolder(first, [second]),
                study.config,
                study.environment,
                "now",
                tmp_path / "out",
            )
        for again in (first / ".." / "a", second):
            with pytest.raises(
                UsageError, match="is given twice; name each folder once"
            ):
                import_study(
                    GivenFolder(first, [second], again),
                    study.config,
                    study.environment,
                    "now",
                    tmp_path / "out",
                )

    def test_images_from_other_noise_are_no_comparison(self, tmp_path: Path) -> None:
        sides = [
            read_folder(write(tmp_path / str(seed), pictures(seed), listed=False))
            for seed in range(2)
        ]
        with pytest.raises(UsageError, match="other noise"):
            require_alike(*sides)
        grey = write(tmp_path / "grey", np.full_like(pictures(), 127), listed=False)
        require_alike(sides[0], read_folder(grey))  # all alike: tripwires judge that
        require_alike(
            sides[0],
            read_folder(write(tmp_path / "noisy", pictures(noise=60), listed=False)),
        )
