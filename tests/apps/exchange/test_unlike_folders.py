"""Folders whose images were made or saved in other ways, or whose pairs do not belong together."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdopt.apps.exchange.pictures import unread_below
from sdopt.apps.exchange.settings import named_settings
from sdopt.apps.exchange.study import GivenFolder, import_study
from sdopt.contract import Contract
from sdopt.errors import UsageError
from sdopt.gate.comparability import comparable
from sdopt.gate.differences import differences
from sdopt.gate.rule_context import RuleContext
from sdopt.record.records import StudyResult
from sdopt.record.verdicts import Ruling, Verdict
from sdopt.report.answer_json import baseline_digest
from sdopt.report.notes import notes_of
from sdopt.report.summary import summary_of
from tests.fakes import fake_study

COUNT = 8

Change = Callable[[Path], object]


def picture(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC)


def said(seed: int, **settings: str) -> PngInfo:
    entries = {
        "Steps": "30",
        "Sampler": "Euler a",
        "CFG scale": "7",
        "Seed": str(seed),
        "Size": "64x64",
    } | settings
    info = PngInfo()
    listed = ", ".join(f"{name}: {value}" for name, value in entries.items())
    info.add_text("parameters", f"a harbour, dusk\nNegative prompt: fog\n{listed}")
    return info


def web_ui(folder: Path, first: int = 0, **settings: str) -> Path:
    """Writes images as A1111 does; `first` is the first one's seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(COUNT):
        seed = first + number
        picture(seed).save(folder / f"{number:05d}.png", pnginfo=said(seed, **settings))
    return folder


def plain(
    folder: Path,
    seeds: Sequence[int] = range(COUNT),
    suffix: str = ".png",
    **options: Any,
) -> Path:
    """Writes images that say nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        picture(seed).save(folder / f"{number:05d}{suffix}", **options)
    return folder


def plain_pixels(folder: Path) -> None:
    """Gives images of any seeds the same pixels, and keeps what they say."""
    for number, file in enumerate(sorted(folder.glob("*.png"))):
        info = PngInfo()
        with Image.open(file) as image:
            info.add_text("parameters", image.info["parameters"])
        picture(number).save(file, pnginfo=info)


def comfy(folder: Path, start: int, batch: int = 1) -> Path:
    """Writes images as ComfyUI does, whose numbers go on from call to call; a batch has one seed."""
    folder.mkdir(parents=True)
    for number in range(COUNT):
        nodes = {
            "1": {"inputs": {"text": "a harbour"}},
            "2": {
                "inputs": {
                    "seed": number // batch,
                    "steps": 20,
                    "positive": ["1", 0],
                    "negative": ["1", 0],
                }
            },
        }
        info = PngInfo()
        info.add_text("prompt", json.dumps(nodes))
        picture(number).save(
            folder / f"ComfyUI_{start + number:05d}_.png", pnginfo=info
        )
    return folder


def judged(
    base: Path, other: Path, again: Path | None = None, changes: str = ""
) -> StudyResult:
    study = fake_study()[1]
    given = GivenFolder(
        base,
        [other],
        again,
        Contract.LOSSY,
        changes=named_settings(changes) if changes else (),
    )
    return import_study(
        given, study.config, study.environment, "now", base.parent / "out"
    )


class TestSettings:
    def test_that_differ_come_first_and_make_nothing_comparable(
        self, tmp_path: Path
    ) -> None:
        base, again = web_ui(tmp_path / "base"), web_ui(tmp_path / "again")
        other = web_ui(tmp_path / "fewer", 0, **{"Steps": "20", "Clip skip": "2"})
        result = judged(base, other, again)
        [candidate] = result.candidates
        assert candidate.unlike == [
            "steps 20 (baseline 30)",
            "clip skip 2 (baseline 1)",
        ]
        assert summary_of(result).sentence.startswith(
            "Not the same work: the images of fewer say steps 20"
        )
        assert summary_of(result).best is None
        assert [
            ruling.verdict for ruling in comparable(candidate, result.variants[0])
        ] == [Verdict.NOT_COMPARABLE]

    def test_that_are_meant_to_differ_are_the_option(self, tmp_path: Path) -> None:
        base, other = web_ui(tmp_path / "base"), web_ui(tmp_path / "fewer", Steps="20")
        assert judged(base, other, changes="steps").candidates[0].unlike == []
        with pytest.raises(UsageError, match="--changes speed: unknown setting"):
            judged(base, other, changes="steps,speed")

    def test_of_the_baseline_made_once_more_must_be_its_own(
        self, tmp_path: Path
    ) -> None:
        base, other = web_ui(tmp_path / "base"), web_ui(tmp_path / "same")
        again = web_ui(tmp_path / "again", Steps="20")
        for changes in ("", "steps"):  # which are the candidate's
            with pytest.raises(UsageError, match=r"more than chance .*steps 20"):
                judged(base, other, again, changes)
        jpeg = plain(tmp_path / "jpeg", suffix=".jpg")
        with pytest.raises(UsageError, match="files: JPEG"):
            judged(base, other, jpeg)

    def test_in_a_table_count_and_a_tag_in_a_prompt_is_one(
        self, tmp_path: Path
    ) -> None:
        base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
        for folder, prompt, steps in (
            (base, "a cat", 30),
            (other, "a cat, <lora:lcm:1>", 6),
        ):
            rows = [f'{n:05d}.png,"{prompt}",{n},{steps}' for n in range(COUNT)]
            (folder / "prompts.csv").write_text(
                "\n".join(["file,prompt,seed,num_inference_steps", *rows])
            )
        assert judged(base, other).candidates[0].unlike == [
            "steps 6 (baseline 30)",
            "LoRA lcm:1 (baseline none)",
        ]

    @pytest.mark.parametrize("columns", ["file,prompt", "file,prompt,seed"])
    def test_that_images_say_count_beside_a_table(
        self, tmp_path: Path, columns: str
    ) -> None:
        base = web_ui(tmp_path / "base")
        other = web_ui(tmp_path / "other", Tiling="True")
        for folder in (base, other):
            rows = [f"{n:05d}.png,a harbour,{n}" for n in range(COUNT)]
            count = len(columns.split(","))
            lines = [columns, *(",".join(row.split(",")[:count]) for row in rows)]
            (folder / "prompts.csv").write_text("\n".join(lines))
        assert judged(base, other).candidates[0].unlike == [
            "Tiling true (baseline none)"
        ]

    def test_images_of_one_name_that_another_order_numbered(
        self, tmp_path: Path
    ) -> None:
        base = web_ui(tmp_path / "base")
        other = tmp_path / "other"
        other.mkdir()
        for number, file in enumerate(sorted(base.glob("*.png"), reverse=True)):
            shutil.copy(file, other / f"{number:05d}.png")
        result = judged(base, other)
        digests = [image.digest for image in result.candidates[0].images]
        assert digests == [image.digest for image in result.variants[0].images]

    def test_seeds_that_images_say_count_beside_a_table(self, tmp_path: Path) -> None:
        base = web_ui(tmp_path / "base")
        other = web_ui(tmp_path / "other", first=100)
        table = "\n".join(["file,prompt", *(f"{n:05d}.png,x" for n in range(COUNT))])
        for folder in (base, other):
            (folder / "prompts.csv").write_text(table)
            plain_pixels(folder)
        with pytest.raises(
            UsageError, match=r"another seed than .*100 against 0"
        ) as told:
            judged(base, other)
        assert "same name" not in str(told.value)
        # Who lists seeds may number the images of a call, which have one seed in the files.
        listed = [f"{n:05d}.png,x,{n}" for n in range(COUNT)]
        for folder in (base, other):
            (folder / "prompts.csv").write_text(
                "\n".join(["file,prompt,seed", *listed])
            )
        assert judged(base, other).candidates[0].unlike == [
            "seed in the image 100 (baseline 0)"
        ]

    def test_that_one_side_does_not_tell_are_not_compared(self, tmp_path: Path) -> None:
        result = judged(web_ui(tmp_path / "base"), plain(tmp_path / "other"))
        [candidate] = result.candidates
        assert candidate.unlike == []
        assert [
            note for note in notes_of(summary_of(result)) if "settings" in note.lower()
        ] == [
            "Settings not compared: of the images of other, 8 of 8 do not say how they were made, as the baseline's do."
        ]


def test_results_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    """Both sides of a result took as many steps, and those of an earlier result more."""
    results: list[StudyResult] = []
    for steps in ("30", "15", "30"):
        folder = tmp_path / str(len(results))
        base = web_ui(folder / "base", Steps=steps)
        other = web_ui(folder / "other", Steps=steps)
        results.append(judged(base, other))
    first, fewer, same = results
    [(reason, waiver)] = differences(fewer, first)
    assert reason.startswith("contents of settings")
    assert waiver == ""
    assert differences(same, first) == []


def test_baselines_of_other_images_have_other_digests(tmp_path: Path) -> None:
    """Two answers with one digest may be compared, so that a baseline that was made anew must be told."""
    base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
    same = baseline_digest(judged(base, other))
    assert baseline_digest(judged(base, other)) == same
    picture(99).save(base / "00003.png")
    assert baseline_digest(judged(base, other)) != same


class TestFiles:
    @pytest.mark.parametrize(
        ("suffix", "options", "lossy"),
        [
            (".jpg", {"quality": 60}, True),
            (".webp", {"quality": 80}, True),
            (".webp", {"lossless": True}, False),
            (".bmp", {}, False),
        ],
    )
    def test_that_lose_details_are_said_and_fail_nothing(
        self, tmp_path: Path, suffix: str, options: dict[str, Any], lossy: bool
    ) -> None:
        result = judged(
            plain(tmp_path / "base"),
            plain(tmp_path / "other", suffix=suffix, **options),
        )
        [candidate] = result.candidates
        apart = candidate.files_apart(result.variants[0])
        assert bool(apart) == lossy
        assert apart in summary_of(result).sentence
        context = SimpleNamespace(candidate=candidate, reference=result.variants[0])
        ruling = RuleContext._despite_files(
            context,  # type: ignore[arg-type]
            Ruling("non_inferior", "x", Verdict.FAIL, ""),
        )
        assert (ruling.verdict is Verdict.INCONCLUSIVE) == lossy

    def test_of_one_quality_are_alike_and_of_two_are_not(self, tmp_path: Path) -> None:
        base, same, less = (
            plain(tmp_path / str(n), suffix=".jpg", quality=quality)
            for n, quality in enumerate((90, 90, 60))
        )
        assert (
            judged(base, same).candidates[0].files_apart(judged(base, same).variants[0])
            == ""
        )
        result = judged(base, less)
        assert "JPEG of quality 60" in result.candidates[0].files_apart(
            result.variants[0]
        )

    @pytest.mark.parametrize(
        ("quality", "apart"), [(80, False), (78, False), (40, True), (100, True)]
    )
    def test_of_webp_tell_by_their_quantizers(
        self, tmp_path: Path, quality: int, apart: bool
    ) -> None:
        base = plain(tmp_path / "base", suffix=".webp", quality=80)
        other = plain(
            tmp_path / "other", suffix=".webp", quality=quality, exif=b"Exif\0\0"
        )
        result = judged(base, other)
        said = result.candidates[0].files_apart(result.variants[0])
        assert bool(said) == apart
        assert ("lossy WebP of quantizer" in said) == apart
        if apart:
            with pytest.raises(UsageError, match="was not made like the baseline"):
                judged(base, plain(tmp_path / "third", suffix=".webp"), again=other)

    def test_with_a_hidden_text_in_their_alpha_are_opaque(self, tmp_path: Path) -> None:
        base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
        for file in other.iterdir():
            image = Image.open(file).convert("RGBA")
            image.putalpha(
                Image.fromarray(
                    np.random.default_rng(0).integers(
                        254, 256, (64, 64), dtype=np.uint8
                    )
                )
            )
            image.save(file)
        assert len(judged(base, other).candidates[0].images) == COUNT


def hires(folder: Path) -> None:
    for file in folder.iterdir():
        image = Image.open(file)
        image.resize((128, 128)).save(
            file, pnginfo=said(int(file.stem), **{"Hires upscale": "2"})
        )


def grid(folder: Path) -> None:
    Image.new("RGB", (256, 128)).save(folder / "grid-0000.png")


def one_grid(folder: Path) -> None:
    Image.new("RGB", (256, 128)).save(folder / "00007.png")


def animated(folder: Path) -> None:
    frames = [picture(seed) for seed in range(3)]
    (folder / "00002.png").unlink()
    frames[0].save(folder / "00002.webp", save_all=True, append_images=frames[1:])


def mask(folder: Path) -> None:
    canvas = Image.new("RGB", (64, 64))
    canvas.paste("white", (8, 8, 40, 40))
    for side in (folder, folder.parent / "base"):
        canvas.save(side / "00003-mask.png")


def saved_early(folder: Path, name: str = "before-highres-fix") -> None:
    for side in (folder, folder.parent / "base"):
        picture(3).save(side / f"00003-{name}.png")


def renumbered(folder: Path) -> None:
    for number in reversed(range(COUNT)):
        file = folder / f"{number:05d}.png"
        Image.open(file).save(folder / f"{number + 1:05d}.png")
    (folder / "00000.png").unlink()


class TestPairs:
    @pytest.mark.parametrize(
        ("spoil", "refusal"),
        [
            (
                lambda folder: plain(folder, range(1, COUNT + 1)),
                "as if they were shifted by 1",
            ),
            (lambda folder: plain(folder, (1, 0, *range(2, COUNT))), "2 of 8 images"),
            (lambda folder: plain(folder, range(COUNT)[::-1]), "8 of 8 images"),
            (
                lambda folder: plain(folder, range(100, 100 + COUNT)),
                "made from other noise",
            ),
            (
                lambda folder: web_ui(folder, first=100),
                "another seed than .*100 against 0",
            ),
            (hires, r"128×128.*hires upscale 2 \(baseline none\)"),
            (grid, "grid-0000"),
            (one_grid, "256×128"),
            (animated, "3 frames"),
            (mask, "00003-mask.png: has black and white alone"),
            (saved_early, "saved before the image was finished"),
            (
                lambda folder: saved_early(folder, "ad-before"),
                "00003-ad-before.png: is",
            ),
            (renumbered, "no image named 0000"),
        ],
    )
    def test_that_do_not_belong_together_are_refused(
        self, tmp_path: Path, spoil: Change, refusal: str
    ) -> None:
        base, other = web_ui(tmp_path / "base"), web_ui(tmp_path / "other")
        spoil(other)
        with pytest.raises(UsageError, match=refusal):
            judged(base, other)

    def test_of_two_images_may_be_swapped_as_well(self, tmp_path: Path) -> None:
        base = plain(tmp_path / "base", (0, 1))
        with pytest.raises(UsageError, match="2 of 2 images"):
            judged(base, plain(tmp_path / "swapped", (1, 0)))
        assert judged(base, plain(tmp_path / "other", (0, 1))).candidates

    @pytest.mark.parametrize(
        "seeds", [[0] * COUNT, range(COUNT)], ids=["one motif", "several"]
    )
    def test_that_belong_together_are_not(
        self, tmp_path: Path, seeds: Sequence[int]
    ) -> None:
        base, other = plain(tmp_path / "base", seeds), plain(tmp_path / "other", seeds)
        for number, file in enumerate(sorted(other.iterdir())):
            noise = np.random.default_rng(number).normal(0, 25, (64, 64, 3))
            Image.fromarray(
                np.clip(np.asarray(Image.open(file)) + noise, 0, 255).astype(np.uint8)
            ).save(file)
        assert judged(base, other).candidates

    def test_broken_images_belong_nowhere_and_are_judged(self, tmp_path: Path) -> None:
        base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
        for file in other.iterdir():
            Image.new("RGB", (64, 64)).save(file)
        assert judged(base, other).candidates

    def test_of_numbers_that_go_on_are_found_by_their_seeds(
        self, tmp_path: Path
    ) -> None:
        for batch in (1, 4):
            base, other = (
                comfy(tmp_path / f"{batch}/base", 1, batch),
                comfy(tmp_path / f"{batch}/other", 9, batch),
            )
            images = judged(base, other).candidates[0].images
            assert [image.seed for image in images] == [
                number // batch for number in range(COUNT)
            ]

    def test_of_one_seed_are_in_the_order_of_their_numbers(
        self, tmp_path: Path
    ) -> None:
        """As names they are in another order: 10 comes before 8, and 15 before 16."""
        base, other = comfy(tmp_path / "base", 8, 8), comfy(tmp_path / "other", 12, 8)
        for folder in (base, other):
            for file in sorted(folder.iterdir()):
                number = int(file.stem.split("_")[1])
                file.rename(folder / f"image ({number}).png")
        assert judged(base, other).candidates[0].images[0].file == "image (10).png"

    def test_what_else_is_in_a_folder_is_no_image(self, tmp_path: Path) -> None:
        base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
        for name in (
            ".DS_Store",
            "Thumbs.db",
            "desktop.ini",
            "log.html",
            "00000.txt",
            "00000.json",
            "._00001.png",
        ):
            (other / name).write_text("{")
        plain(other / "thumbnails", suffix=".webp")
        assert len(judged(base, other).candidates[0].images) == COUNT


def listing(folder: Path, steps: int, form: str) -> Path:
    """Writes images, and a JSON document of their settings beside them."""
    plain(folder)
    files = sorted(folder.glob("*.png"))
    settings: dict[str, dict[str, Any]] = {}
    for number, file in enumerate(files):
        settings[file.name] = {
            "prompt": "a",
            "seed": number,
            "num_inference_steps": steps,
        }
    items = [{"file_name": name, **values} for name, values in settings.items()]
    content = {
        "list": items,
        "by file": settings,
        "of all": {"created": "today", "seed": 1, "num_inference_steps": steps},
        "else": {"created": "today"},
    }[form]
    (folder / "metadata.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("list", ["steps 20 (baseline 30)"]),
        ("by file", ["steps 20 (baseline 30)"]),
        ("of all", ["steps 20 (baseline 30)"]),
        ("else", []),
    ],
)
def test_a_document_that_lists_the_images_is_a_table(
    tmp_path: Path, form: str, said: list[str]
) -> None:
    base, other = (listing(tmp_path / str(steps), steps, form) for steps in (30, 20))
    assert judged(base, other).candidates[0].unlike == said


def test_images_in_further_folders_are_not_read_and_it_is_said(tmp_path: Path) -> None:
    base = plain(tmp_path / "base")
    other, _ = plain(base / "other"), plain(base / "hard")
    (base / "notes").mkdir()
    said = f"{base}: {COUNT} images in its folders (hard) are not read"
    assert [*unread_below([base, other])] == [said]
    assert [*unread_below([other])] == []


class TestCopies:
    def test_of_a_pair_count_once_and_are_named(self, tmp_path: Path) -> None:
        """The same picture under two names in both folders made the sample look larger than it was."""
        seeds = [*range(4), 0, 0, 1, 7]
        base, other = plain(tmp_path / "base", seeds), plain(tmp_path / "other", seeds)
        result = judged(base, other, plain(tmp_path / "again", seeds))
        for row in result.variants:
            assert [image.file for image in row.images] == [
                f"{number:05d}.png" for number in (0, 1, 2, 3, 7)
            ]
        assert result.config.workload.prompt_count == 5
        said = "3 of 8 images are copies of others in every folder, and each picture counts once: 00004.png of 00000.png"
        assert any(said in note for note in summary_of(result).notes)

    def test_that_a_format_has_changed_are_copies_too(self, tmp_path: Path) -> None:
        """A program that keeps a smaller copy beside each image; other images of its are as unlike as ever."""
        for folder in (tmp_path / "base", tmp_path / "other"):
            folder.mkdir()
            for seed in range(3):
                image = picture(seed).resize((256, 256))
                image.save(folder / f"{seed}.jpg", quality=90)
            image.save(folder / "2_small.jpg", quality=60)
        [candidate] = judged(tmp_path / "base", tmp_path / "other").candidates
        assert [(one.file, one.copies) for one in candidate.images] == [
            ("0.jpg", []),
            ("1.jpg", []),
            ("2.jpg", ["2_small.jpg"]),
        ]

    def test_of_one_side_alone_are_other_pairs(self, tmp_path: Path) -> None:
        base, other = plain(tmp_path / "base", [0] * COUNT), plain(tmp_path / "other")
        result = judged(base, other)
        assert len(result.candidates[0].images) == COUNT
        assert not any("copies" in note for note in summary_of(result).notes)

    def test_are_not_what_a_safety_checker_blocked(self, tmp_path: Path) -> None:
        base, other = plain(tmp_path / "base"), plain(tmp_path / "other")
        for folder in (base, other):
            for name in ("00002.png", "00005.png"):
                Image.new("RGB", (64, 64)).save(folder / name)
        assert len(judged(base, other).candidates[0].images) == COUNT
