"""Images of a finished study that another program has replaced: no figure is computed, shown or given out of them."""

import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdopt.apps.exchange.own import origins_in
from sdopt.errors import UsageError
from sdopt.gate.drift import _distances
from sdopt.quality.evaluation import Evaluator, Settings
from sdopt.quality.inputs import Pictures
from sdopt.record.images import remarks_on_images
from sdopt.record.records import StudyResult
from sdopt.report.contact_sheet import comparison_sheet
from sdopt.report.page.gallery import gallery_of
from sdopt.report.summary import summary_of
from sdopt.tracking.contents import variant_run
from tests.command import Finished, refused, sdopt

ROW = "bfloat16"


@pytest.fixture
def replaced(finished: Finished, tmp_path: Path) -> tuple[StudyResult, Path]:
    """A copy of the study, in which one image of an option is another one of the same size."""
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    result = finished.result
    Image.new("RGB", (32, 32), "red").save(_first(result, folder))
    return result, folder


def _first(result: StudyResult, folder: Path) -> Path:
    return folder / result.variant(ROW).images[0].path


def test_each_image_is_recorded_with_its_digest(result: StudyResult) -> None:
    images = [record for row in result.variants for record in row.images]
    images += [record for records in result.redrawn.values() for record in records]
    assert images
    assert all(record.digest for record in images)


def test_those_of_an_untouched_study_are_no_news(finished: Finished) -> None:
    assert remarks_on_images(finished.result, finished.folder) == []


def test_images_that_are_gone_are_no_news(
    replaced: tuple[StudyResult, Path],
) -> None:
    result, folder = replaced
    shutil.rmtree(folder / "images")
    assert remarks_on_images(result, folder) == []


def test_a_link_to_the_same_image_is_no_news(
    finished: Finished, tmp_path: Path
) -> None:
    """DVC puts the images elsewhere, and links to them where they were."""
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    file = _first(finished.result, folder)
    file.rename(tmp_path / "elsewhere.png")
    file.symlink_to(tmp_path / "elsewhere.png")
    assert remarks_on_images(finished.result, folder) == []
    assert sdopt(tmp_path, "show", "run").code == 0


def test_nothing_is_computed_of_them(replaced: tuple[StudyResult, Path]) -> None:
    result, folder = replaced
    pictures = Pictures(folder, result.variant(ROW).images)
    with pytest.raises(UsageError, match="was replaced or changed"):
        Evaluator(Settings(())).trips(pictures, None)
    row = result.variant(ROW)
    with pytest.raises(UsageError, match="was replaced or changed"):
        _distances(row, row, (folder, folder))


def test_records_of_older_versions_have_no_digest_and_are_read(
    replaced: tuple[StudyResult, Path],
) -> None:
    result, folder = replaced
    row = result.variant(ROW)
    row.images = [replace(record, digest="") for record in row.images]
    assert len(Pictures(folder, row.images).images) == len(row.images)


def test_they_are_shown_nowhere(replaced: tuple[StudyResult, Path]) -> None:
    result, folder = replaced
    gallery = gallery_of(result, folder, 10**6)
    assert gallery is not None
    assert "1 images of the folder are not shown" in gallery.caption
    shown = [image.variant for prompt in gallery.prompts for image in prompt.variants]
    assert shown.count(ROW) == len(result.variant(ROW).images) - 1
    sheet = comparison_sheet(summary_of(result), folder)
    assert sheet is not None
    pixels = np.asarray(Image.open(BytesIO(sheet)))
    assert not (pixels == (255, 0, 0)).all(axis=2).any()
    logged = variant_run(summary_of(result), result.variant(ROW), folder, images=True)
    files = [file for _, _, file in logged.pictures]
    assert _first(result, folder) not in files
    assert files


def test_they_are_not_taken_for_images_of_the_record(
    replaced: tuple[StudyResult, Path],
) -> None:
    result, folder = replaced
    file = _first(result, folder)
    assert len(origins_in(file.parent)) == len(result.variant(ROW).images) - 1
    assert file.name not in origins_in(file.parent)


def test_commands_say_so_and_hand_out_none(
    replaced: tuple[StudyResult, Path], tmp_path: Path
) -> None:
    _, folder = replaced
    said_by: list[tuple[str, ...]] = [
        ("show", "run"),
        ("report", "run", "tracking=none"),
        ("gate", "run", "--output", "verdicts", "gate.undecided_passes=true"),
        ("run", "resume=run"),
    ]
    for words in said_by:
        said = sdopt(tmp_path, *words).err
        assert "run: 1 image (images/" in said, words
        assert "was replaced or changed" in said
    refused_by: list[tuple[str, ...]] = [
        ("score", "run", "--export", "out"),
        ("gate", "run", "--against", str(folder)),
    ]
    for words in refused_by:
        assert "was replaced or changed" in refused(tmp_path, *words).err
    assert not (tmp_path / "out").exists()


def test_scores_of_a_folder_with_them_are_not_taken(
    replaced: tuple[StudyResult, Path], tmp_path: Path
) -> None:
    result, folder = replaced
    lines = ["variant,prompt,seed,reward"]
    for row in result.variants:
        for record in row.images:
            lines.append(f'{row.name},"{record.prompt}",{record.seed},1.0')
    (tmp_path / "scores.csv").write_text("\n".join(lines))
    done = refused(tmp_path, "score", "run", "--import", "scores.csv")
    assert "was replaced or changed" in done.err
    before = (folder / "result.json").read_bytes()
    assert b"score_reward" not in before
