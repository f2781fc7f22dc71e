"""`--json` is one object of a documented form, and nothing else on standard output."""

import json
import shutil
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from runners import only_json, printed
from sdopt.record.files import read_result, write_result
from sdopt.record.scores import Score
from sdopt.report.answer_json import Answer, baseline_digest
from sdopt.report.summary import summary_of
from sdopt.report.tables import worst_prompts
from tests.command import SMALL, SMOKE, Finished, sdopt
from tests.fakes import fake_workers
from tests.records import reconfigure

FORM = TypeAdapter(Answer)


def test_shows_what_the_terminal_says(finished: Finished, tmp_path: Path) -> None:
    result = finished.result
    before = baseline_digest(result)
    reconfigure(result.variant(result.baseline), "workload", steps=99)
    assert baseline_digest(result) != before == baseline_digest(finished.result)
    shown = sdopt(tmp_path, "show", str(finished.folder), "--json")
    [study] = json.loads(shown.out)["studies"]
    answer = FORM.validate_python(study)
    summary = summary_of(finished.result)
    assert answer.answer == summary.sentence
    assert [row.name for row in answer.candidates] == [
        row.name for row in summary.candidates
    ]
    for mine, row in zip(answer.candidates, summary.candidates, strict=True):
        assert (mine.speed, mine.images, mine.gate) == tuple(
            None if value is None else str(value)
            for value in (row.speed, row.images, row.decision)
        )
        if row.speedup is not None:
            assert mine.speedup is not None
            assert mine.speedup.estimate == row.speedup.interval.estimate


@pytest.mark.parametrize(
    "command",
    [
        ("run", "precision=no"),
        ("gate", "nowhere"),
        ("show", "nowhere"),
        ("judge", "here", "there"),
    ],
)
def test_an_error_is_an_object_too(tmp_path: Path, command: tuple[str, ...]) -> None:
    failed = sdopt(tmp_path, *command, "--json")
    found = json.loads(failed.out)
    assert failed.code == found["exit_code"] == 2
    assert found["problems"]
    assert found["problems"][0] in failed.err


def test_what_nobody_foresaw_is_no_success(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="no room"), only_json(wanted=True):
        raise OSError("no room")
    assert json.loads(capfd.readouterr().out) == {
        "exit_code": 3,
        "problems": ["no room"],
    }


def test_a_gate_answers_with_the_verdicts_that_it_gives_now(
    finished: Finished, sweep_folder: Path, tmp_path: Path
) -> None:
    swept = sdopt(
        tmp_path, "gate", str(sweep_folder), "gate=default", "--output", "all", "--json"
    )
    answer = json.loads(swept.out)
    written = [
        tmp_path / "all" / study["folder"].rpartition("/")[2] / "verdicts.json"
        for study in answer["studies"]
    ]
    assert answer["verdicts"] == [
        json.loads(file.read_text()) if file.is_file() else None for file in written
    ]
    assert (
        answer["studies"][1]["candidates"][0]["gate"]
        == answer["verdicts"][1]["variants"][0]["gate"]
        is not None
    )
    own = tmp_path / "own"
    shutil.copytree(finished.folder, own)
    (tmp_path / "conf" / "gate").mkdir(parents=True)
    (tmp_path / "conf" / "gate" / "mine.yaml").write_text(
        "defaults: [default]\nname: mine\n"
    )
    mine = json.loads(
        sdopt(
            tmp_path, "gate", "own", "gate=mine", "--config-dir", "conf", "--json"
        ).out
    )
    assert mine["verdicts"]["gate"] == "mine"
    earlier = read_result(own)
    earlier.id = "another"
    (tmp_path / "then").mkdir()
    write_result(earlier, tmp_path / "then")
    since = json.loads(
        sdopt(
            tmp_path, "gate", "own", "gate=default", "--against", "then", "--json"
        ).out
    )
    assert since["studies"][0]["answer"] == since["verdicts"]["answer"]
    assert "than in the earlier result" in since["verdicts"]["answer"]
    other = json.loads(
        sdopt(
            tmp_path, "gate", "own", "--against", str(sweep_folder / "0"), "--json"
        ).out
    )
    assert other["exit_code"] == 2
    assert other["verdicts"] is None
    assert "not comparable" in other["problems"][0]


def test_the_schema_and_the_page_are_printed(tmp_path: Path) -> None:
    schema = json.loads(sdopt(tmp_path, "skill", "--schema").out)
    assert schema == printed().model_json_schema()
    assert {"answer", "best", "candidates", "baseline"} <= {
        *schema["$defs"]["Answer"]["required"]
    }
    page = sdopt(tmp_path, "skill").out
    fields = {*schema["$defs"]["Candidate"]["properties"]}
    assert {"recommended", "gate", "speed", "images", "status", "speedup"} <= fields
    assert all(
        f"`{name}`" in page
        for name in ("recommended", "gate", "speed", "images", "status", "speedup")
    )


def test_every_command_prints_that_form(tmp_path: Path) -> None:
    few = (
        "search.races=0",
        "search.screen=[protocol.rounds:1]",
        "protocol.rounds=1",
        "protocol.warmup=0",
    )
    given = ("search.groups=[layout]", "gate=none", *SMALL, *few, "--json")
    with fake_workers():
        ran = sdopt(
            tmp_path,
            "run",
            "layout=channels_last",
            *SMOKE,
            "hydra.run.dir=outputs/one",
            "--json",
        )
        searched = sdopt(tmp_path, "search", *given)
    planned = sdopt(tmp_path, "search", *given, "dry_run=true")
    gated = sdopt(
        tmp_path,
        "gate",
        "outputs/one",
        "gate=default",
        "--output",
        "verdicts",
        "--json",
    )
    by_file = sdopt(
        tmp_path,
        "gate",
        "outputs/one/result.json",
        "gate=default",
        "--output",
        "again",
        "--json",
    )
    for done in (ran, searched, planned, gated, by_file):
        assert (
            printed()
            .model_validate_json(done.out, strict=True)
            .model_dump()["exit_code"]
            == done.code
        )
        assert set(json.loads(done.out)) <= {
            "exit_code",
            "studies",
            "problems",
            "verdicts",
            "search",
        }
    assert json.loads(searched.out)["search"]["entries"]
    assert json.loads(gated.out)["verdicts"]
    assert "verdicts:" in gated.err
    assert json.loads(by_file.out)["studies"] == json.loads(gated.out)["studies"] != []


def test_the_prompts_that_lost_most_are_named_by_metric(finished: Finished) -> None:
    result = finished.result
    name = result.candidates[0].name
    compared = result.first_comparison(name)
    assert compared is not None
    prompts = list(
        {
            image.prompt_index: image.prompt for image in result.variant(name).images
        }.values()
    )
    losses: list[float | None] = [0.0, 0.5, None, 0.1][: len(prompts)]
    compared.quality = {
        "colour_error": Score(0.2, losses),
        "psnr_db": Score(30.0, [None, 20.0, 40.0, 30.0][: len(prompts)]),
    }
    result.variant(name).quality = {}
    found = [(one.metric, one.prompt, one.value) for one in worst_prompts(result, name)]
    assert [each for each in found if each[0] == "colour_error"] == [
        ("colour_error", prompts[n], losses[n]) for n in (1, 3) if n < len(prompts)
    ]
    assert next(each for each in found if each[0] == "psnr_db")[1:] == (
        prompts[1],
        20.0,
    )
