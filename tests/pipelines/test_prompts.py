"""Prompts and negative prompts: from files of each kind, and what is said of those that cannot be read."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from transformers import CLIPTokenizer

import sdopt
from sdopt.config.composer import HydraComposer
from sdopt.errors import ConflictError, UsageError
from sdopt.pipelines.prompts import (
    cut_from,
    negative_prompts,
    remarks_on_length,
    remarks_on_prompts,
    resolve_prompts,
)
from sdopt.record.files import write_result
from sdopt.record.records import StudyResult
from sdopt.reference import MODEL
from sdopt.schema import Model, Workload
from sdopt.study.fingerprint import of_prompts
from sdopt.worker.draws import timed_draw
from tests.fixtures import Load
from tests.pipelines.test_models import small_xl  # noqa: F401
from tests.pipelines.test_tasks import model  # noqa: F401


def prompts(path: Path, column: str | None = None, count: int = 100) -> tuple[str, ...]:
    return resolve_prompts(
        Workload(prompts=str(path), prompt_column=column, prompt_count=count), Model()
    )


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "red apple\n\n  a cat, asleep \nein Löwe\n"),
        ("a.txt", "# mine\nred apple\n\n## other\n\ufeffa cat, asleep\nein Löwe\n"),
        ("a", "\ufeffred apple\r\na cat, asleep\r\nein Löwe"),
        ("a.csv", 'id,Prompt\n1,red apple\n2,"a cat, asleep"\n3,\n4,ein Löwe\n'),
        ("a.CSV", '\ufeffcaption\nred apple\n"a cat, asleep"\nein Löwe\n'),
        (
            "a.csv",
            "\ufeffid;prompt\r\n1;red apple\r\n2;a cat, asleep\r\n3;ein Löwe\r\n",
        ),
        ("a.csv", "prompt|id\nred apple|1\na cat, asleep|2\nein Löwe|3\n"),
        (
            "a.csv",
            'prompt,id,,\nred apple,1,,\n"a cat, asleep",2,,\nein Löwe,3,,\n,,,\n',
        ),
        ("a.csv", 'id, prompt\n1, red apple\n2, "a cat, asleep"\n,,\n3, ein Löwe\n'),
        ("a.csv", "prompt\tid\rred apple\t1\ra cat, asleep\t2\rein Löwe\t3\r"),
        ("a.tsv", "Text\tid\nred apple\t1\na cat, asleep\t2\nein Löwe\t3\n"),
        ("a.tsv", "prompt;id\nred apple;1\na cat, asleep;2\nein Löwe;3\n"),
        ("a.json", '[\n  "red apple",\n  "a cat, asleep",\n  "ein Löwe"\n]'),
        (
            "a.json",
            '[{"Prompt": "red apple"}, {"Prompt": "a cat, asleep"}, {"Prompt": " "}, {"Prompt": "ein Löwe"}]',
        ),
        (
            "a.json",
            '{"caption": ["red apple", "a cat, asleep", "ein Löwe"], "of": "me"}',
        ),
        (
            "a.json",
            '{"prompts": [{"prompt": "red apple"}, "a cat, asleep", "ein Löwe"]}',
        ),
        (
            "a.json",
            '{"prompt": "red apple"}\n{"prompt": "a cat, asleep"}\n{"prompt": "ein Löwe"}\n',
        ),
        (
            "a.jsonl",
            '{"prompt": "red apple"}\n{"prompt": "a cat, asleep", "id": 2}\n\n{"prompt": "ein L\\u00f6we"}\n',
        ),
        ("a.ndjson", '"red apple"\n"a cat, asleep"\n"ein Löwe"\n'),
    ],
)
def test_each_kind_of_file_and_what_other_programs_write(
    tmp_path: Path, name: str, text: str
) -> None:
    path = written(tmp_path, name, text)
    assert prompts(path) == ("red apple", "a cat, asleep", "ein Löwe")
    assert prompts(path, count=2) == ("red apple", "a cat, asleep")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt,negative_prompt\na,x\nb,\n"),
        ("a.tsv", "Prompt\tNegative Prompt\na\tx\nb\t\n"),
        ("a.json", '[{"prompt": "a", "negative-prompt": "x"}, {"prompt": "b"}]'),
        (
            "a.jsonl",
            '{"prompt": "a", "neg_prompt": "x"}\n{"prompt": "b", "neg_prompt": null}\n',
        ),
        (
            "a.json",
            '{"prompts": [{"prompt": "a"}, {"prompt": "b", "negative": ""}], "negative": "x", "seed": 1}',
        ),
        (
            "a.json",
            '{"prompts": [{"prompt": "a", "neg": "x"}, {"prompt": "b", "negative": ""}], "negative_prompt": "z"}',
        ),
    ],
)
def test_negative_prompts_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    path = str(written(tmp_path, name, text))
    assert prompts(Path(path)) == ("a", "b")
    assert negative_prompts(Workload(prompts=path), Model()) == ("x", "")
    assert negative_prompts(Workload(prompts=path, negative_prompt="y"), Model()) == (
        "x",
        "y",
    )
    assert negative_prompts(
        Workload(prompts=path, prompt_start=1, negative_prompt=""), Model()
    ) == ("",)
    # Without a negative prompt SDXL takes zeros, which is something else than an empty text.
    assert negative_prompts(Workload(prompts=path, prompt_start=1), Model()) == ()


def test_one_object_with_a_prompt_and_lists_of_something_else(tmp_path: Path) -> None:
    text = '{"tag": "one", "include": [{"class": "apple"}], "prompt": "a red apple"}\n'
    assert prompts(written(tmp_path, "a.jsonl", text)) == ("a red apple",)


def test_a_quoted_line_break_stays(tmp_path: Path) -> None:
    assert prompts(
        written(tmp_path, "a.tsv", 'id\tprompt\r\n1\t"a red\napple"\r\n2\tb\r\n')
    ) == ("a red\napple", "b")


def test_a_negative_prompt_without_effect(tmp_path: Path) -> None:
    for workload, said in (
        (
            Workload(negative_prompt="x", guidance_scale=1.0),
            "has no effect without guidance",
        ),
        (Workload(negative_prompt="x\x1b"), "holds the control character"),
        (
            Workload(
                prompts=str(written(tmp_path, "a.csv", "prompt,negative\na,y\n")),
                negative_prompt="x",
            ),
            "has no effect, since each prompt",
        ),
    ):
        with pytest.raises(UsageError, match=r"^workload\.negative_prompt: ") as caught:
            resolve_prompts(workload, Model())
        assert said in str(caught.value)
    path = str(written(tmp_path, "a.csv", "prompt,negative\na,y\n"))
    unguided = Workload(prompts=path, guidance_scale=1.0)
    assert negative_prompts(unguided, Model()) == ()
    assert any(
        "negative prompts have no effect" in remark
        for remark in remarks_on_prompts(unguided, Model())
    )


class TestRemarks:
    @staticmethod
    def of(path: Path) -> str:
        return "\n".join(remarks_on_prompts(Workload(prompts=str(path)), Model()))

    def test_of_what_is_not_used(self, tmp_path: Path) -> None:
        text = "id,prompt,seed,\n1,a,3,\n2,,4,\n3,a,5,\n"
        found = self.of(written(tmp_path, "a.csv", text))
        assert "not used: id, seed, (unnamed);" in found
        assert "rows without a prompt are left out: line 3" in found
        assert (
            "occur more than once, and differ in their noise only: line 2, line 4"
            in found
        )
        # What a list has was written, be it nothing; an empty line of a spreadsheet was not.
        said = self.of(written(tmp_path, "a.json", '["a", "", "b"]'))
        assert "rows without a prompt are left out: item 2" in said
        said = self.of(written(tmp_path, "a.txt", "# mine\na\n"))
        assert "lines that begin with # are comments: line 1" in said
        many = written(tmp_path, "b.txt", "\n".join(map(str, range(100))))
        assert "8 of its 100 prompts are used" in self.of(many)

    @pytest.mark.parametrize(
        ("prompt", "kind"),
        [
            ("a (red:1.4) apple", "weights in 1 (first in line 2: (red:1.4))"),
            ("hot::2 dog", "weights"),
            ("a cat:0.25 and a duck:0.75", "weights"),
            ("goats grazing -s100", "options"),
            ("(a cat)++", "weights"),
            ("a [blue] fish", "brackets"),
            ("a ((blue)) fish", "parentheses"),
            ("a fish <lora:style:0.8>", "networks and embeddings"),
            ("a fish, embedding:bad", "networks and embeddings"),
            ("a fish BREAK a cat", "keywords"),
            ("a {red|blue} fish", "alternatives and variables"),
            ("a __colour__ fish", "alternatives and variables"),
            ("- a fish", "list marks"),
            ("2. a fish", "list marks"),
            ("0001 a fish", "list marks"),
            ("; a fish", "comments and fences"),
            ("fish.png: a fish", "names of files"),
            ("more_prompts.txt", "names of files"),
            ("a fish \\", "lines that go on"),
            ('"a fish",', "quotes around the whole"),
            ("1\ta fish", "tabs"),
            ("a LÃ¶we", "letters that were damaged before"),
            ("a &quot;red&quot; cat", "escapes and entities"),
            ("a \u200bcat", "invisible characters"),
            ("NaN", "empty cells that became words"),
        ],
    )
    def test_of_what_is_read_as_plain_text(
        self, prompt: str, kind: str, tmp_path: Path
    ) -> None:
        assert kind in self.of(
            written(tmp_path, "a.txt", f"a plain one, C-3PO's\n{prompt}\n")
        )

    def test_of_nothing(self, tmp_path: Path) -> None:
        assert (
            self.of(
                written(
                    tmp_path,
                    "a.txt",
                    'a red apple, 50% ripe: "open"\nein Löwe -- asleep\n',
                )
            )
            == ""
        )
        assert remarks_on_prompts(Workload(), Model()) == []

    def test_of_what_the_text_encoder_cuts(self, tmp_path: Path) -> None:
        long = "a very small " + "and very round " * 12 + "red apple"
        path = written(tmp_path, "a.txt", f"a red apple\n{long}\n")
        [found] = remarks_on_length(Workload(prompts=str(path)), Model())
        assert "reads 24 tokens and cuts 1 of 2 texts: line 2 (" in found
        [found] = remarks_on_length(Workload(negative_prompt=long), Model())
        assert "workload.negative_prompt (" in found
        [found] = remarks_on_length(
            Workload(prompts=["a <cat-toy> in a <b>box"]), Model()
        )
        assert (
            "this model was taught no word <b>, <cat-toy>, and reads it as text"
            in found
        )
        assert remarks_on_length(Workload(), Model()) == []

    def test_of_what_no_text_encoder_of_a_loaded_pipeline_reads(self) -> None:
        tokenizer = CLIPTokenizer.from_pretrained(MODEL / "tokenizer")
        pipe: Any = SimpleNamespace(tokenizer=tokenizer)
        assert cut_from("a red apple", pipe, Model()) == ""
        cut = cut_from("a very round " * 12 + "apple", pipe, Model())
        assert cut == "cut after 24 of its 51 tokens"
        tokenizer.add_tokens(["<toy>", *(f"<toy>_{n}" for n in range(1, 30))])
        cut = cut_from("a <toy>", pipe, Model())
        assert cut == "cut after 24 of its 33 tokens", "a trained word of 30 vectors"

    def test_the_packaged_prompts_are_not_cut(self) -> None:
        assert (
            remarks_on_length(
                Workload(prompt_count=1000, negative_prompt="blurry"), Model()
            )
            == []
        )


@pytest.mark.parametrize(
    "source", [["a", None], ["a", 3], [{"a": "b"}], {"a": "b"}, None, ["a", "b\x07"]]
)
def test_a_list_of_what_is_no_prompt(source: object) -> None:
    said = r"number \d (is no text|holds the control character)|must be packaged"
    with pytest.raises(UsageError, match=rf"^workload\.prompts=.*({said})"):
        resolve_prompts(Workload(prompts=source), Model())


def test_quotes_within_a_field_stay(tmp_path: Path) -> None:
    text = 'prompt\tnote\na sign that says "open"\tx\n"a ""quoted"" one, ""twice"""\ty\n"B I G" in red\tz\n'
    expected = ('a sign that says "open"', 'a "quoted" one, "twice"', '"B I G" in red')
    assert prompts(written(tmp_path, "a.tsv", text)) == expected
    text = 'note,prompt\nx,a sign that says "open"\ny,"a ""quoted"" one, ""twice"""\nz,"""B I G"" in red"\n'
    assert prompts(written(tmp_path, "a.csv", text)) == expected


def test_a_column_is_chosen_by_name_or_guessed_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "text,Caption,title\nt,c,x\n")
    assert prompts(path) == ("c",)
    assert prompts(path, "text") == ("t",)
    assert prompts(path, "title") == ("x",)
    assert prompts(
        written(tmp_path, "b.csv", "prompt,negative_prompt\na,b\n"), "negative_prompt"
    ) == ("b",)
    with pytest.raises(
        UsageError,
        match=r"workload\.prompt_column=title: not in .*item 1 is a text, and has no keys",
    ):
        prompts(written(tmp_path, "b.json", '["a"]'), "title")
    with pytest.raises(
        UsageError,
        match=r"workload\.prompt_column=titel: not in .*columns are text, Caption, title",
    ):
        prompts(path, "titel")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.csv",
            "id,title\n1,x\n",
            "no column named prompt or caption or text; the columns are id, title; choose",
        ),
        (
            "a.json",
            json.dumps({f"{n}.png": {"p": "a cat"} for n in range(99)}),
            "10.png, 11.png and 87 more; choose",
        ),
        (
            "a.jsonl",
            '{"id": 1}\n',
            "no column named prompt or caption or text; the columns are id; ",
        ),
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": 3}\n',
            "line 2 has no text in its column 'prompt'",
        ),
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"id": 3}\n',
            "line 2 has no text in its column 'prompt'",
        ),
        ("a.jsonl", '[["a"]]\n', "item 1 is not a JSON object or a text"),
        ("a.json", '["a", 3]', "item 2 is not a JSON object or a text"),
        ("a.json", '[{"prompt": "a", "prompt": "b"}]', "two keys named prompt"),
        (
            "a.json",
            '{"prompts": ["a"], "text": "b"}',
            "the keys prompts, text; write a list of objects",
        ),
        (
            "a.txt",
            "['a', 'b']\n",
            "line 1 (['a', 'b']) begins a list; save it as .json",
        ),
        ("a.txt", '[\n  "a",\n]\n', "line 1 ([) begins a list; save it as .json"),
        (
            "a.txt",
            "version https://git-lfs.github.com/spec/v1\noid sha256:a\n",
            "is a pointer of Git LFS",
        ),
        (
            "a.txt",
            "a cat\n".encode("utf-16-le"),
            "is no plain text (it holds zero bytes); save it as UTF-8",
        ),
        ("a.txt", "/imagine prompt: a dog", "is a command of another program"),
        (
            "a.json",
            '{"a": ["x", "y"], "b": ["z"]}',
            "is an object with the keys a, b; write a list of objects",
        ),
        (
            "a.json",
            '{"prompts": ["a", "b"], "negative": ["x"]}',
            "the keys prompts, negative; write a list of objects",
        ),
        ("a.json", '["a",]', "cannot be read as json file"),
        ("a.json", "3", "line 1 is not a JSON object or a text"),
        (
            "a.ndjson",
            '{"prompt": "a"}\n{"prompt": "b"\n',
            "cannot be read as JSON (line 2: ",
        ),
        ("a.jsonl", "a red apple\n", "cannot be read as jsonl file"),
        (
            "a.csv",
            "id,prompt\n1,a\n2\n",
            "line 3 has fewer fields (1) than the header (2)",
        ),
        (
            "a.csv",
            'id,prompt\n1,"a\nb"\n2,c,d\n',
            "line 4 has more fields than the header (separated by commas)",
        ),
        (
            "a.csv",
            'prompt\n"a\nb\n',
            "cannot be read as a table (line 2: unexpected end of data)",
        ),
        ("a.csv", "prompt,Prompt\na,b\n", "has 2 columns named prompt"),
        ("a.csv", "id,prompt,id\n1,a,2\n", "has two columns named id"),
        ("a.csv", "a red apple\na cat\n", "the columns are a red apple; choose one"),
        ("a.csv", "# mine\nid,prompt\n1,a\n", "the columns are # mine; choose one"),
        ("a.csv", "sep=;\nprompt;id\na;1\n", "the columns are sep=;; choose one"),
        (
            "a.csv",
            'prompt\n"a\nNegative prompt: x"\n',
            "line 2 holds 'Negative prompt:'",
        ),
        (
            "a.txt",
            "a cat Negative prompt: x Steps: 20, Sampler: y\n",
            "line 1 holds 'Negative prompt:'",
        ),
        ("a.txt", "prompt = a\n", "line 1 (prompt = a) looks like a setting"),
        ("a.txt", "prompts:\n- a\n", "line 1 (prompts:) looks like a setting"),
        ("a.txt", "{\\rtf1 a}\n", "is RTF, HTML or XML"),
        (
            "a.tsv",
            'prompt\n"a red\napple"\n',
            "line 2 begins with a quote that ends in a later line",
        ),
        ("a.txt", '["a", "b"]\n', "is JSON; name it .json"),
        ("a.txt", '{"prompt": "a"}\n{"prompt": "b"}\n', "is JSON; name it .json"),
        (
            "a.txt",
            "prompt;seed\na;3\n",
            "line 1 looks like the header of a table (prompt;seed)",
        ),
        ("a.txt", "Caption\na cat\n", "line 1 looks like the header of a table (C"),
        ("a.txt", "a\n#tag\n", "line 2 (#tag) begins as a comment"),
        ("a.txt", "// a\nb\n", "line 1 (// a) begins as a comment"),
        (
            "a.txt",
            "a cat --n blurry --w 512\n",
            "line 1 (a cat --n blurry --w 512) holds an option",
        ),
        (
            "a.txt",
            '--prompt "a red apple"\n',
            'line 1 (--prompt "a red apple") holds an option',
        ),
        (
            "a.txt",
            "a\nNegative prompt: x\nb\n",
            "line 2 (Negative prompt: x) looks like a setting; give a .csv file",
        ),
        (
            "a.txt",
            "a\nSteps: 3, Seed: 2\n",
            "line 2 (Steps: 3, Seed: 2) looks like a setting",
        ),
        ("a.yaml", "- a\n- b\n", "is a .yaml file; convert it to .txt, .csv"),
        ("a.csv.gz", "a", "is a .gz file"),
        ("a.csv", "prompt\n", "holds no prompt"),
        ("a.tsv", "", "holds no prompt"),
        ("a.txt", " \n", "holds no prompt"),
        ("a.txt", "a\nb\x1b[31m\n", "line 2 holds the control character U+001B"),
        (
            "a.jsonl",
            '{"prompt": "\\ud800"}\n',
            "line 1 holds the control character U+D800",
        ),
        ("a.jsonl", "[" * 100_000, "nested too deeply"),
        ("a.txt", "a" * 1_000_000, "line 1 has 1000000 characters"),
        ("a.csv", "prompt\n" + "a" * 1_000_000, "field larger than field limit"),
        ("a.csv", b"\xff\xfe\x00\xd8", "is UTF-16"),
        ("a.txt", b"a\nL\xf6we\n", "is not UTF-8 (line 2 has the byte 0xf6)"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_files_that_hold_no_prompts(
    tmp_path: Path, name: str, text: str | bytes, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        prompts(written(tmp_path, name, text))
    [problem] = caught.value.problems
    assert problem.startswith(f"workload.prompts={tmp_path / name}: ")
    assert said in problem
    assert len(problem) < 400


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("/dev/zero", "not a file"),
        ("/tmp", r"cannot be read as text \(Is a directory"),
        ("/absent.jsonl", r"cannot be read as text \(No such file"),
    ],
)
def test_what_is_no_file_is_not_waited_for(source: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prompts(Path(source))


@pytest.mark.parametrize("source", ["packaged", ["a"], "prompts.txt"])
def test_a_column_of_what_has_none(source: str | list[str]) -> None:
    with pytest.raises(
        UsageError,
        match=r"workload\.prompt_column=prompt: .* has no columns; name a file",
    ):
        resolve_prompts(Workload(prompts=source, prompt_column="prompt"), Model())


PROMPTS, NEGATIVES = ["a red apple", "a blue fish"], ["green", ""]
KEY = "workload.negative_prompt"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "prompts.csv").write_text(
        "prompt,negative_prompt\na red apple,green\na blue fish,\n"
    )
    return f"workload.prompts={tmp_path / 'prompts.csv'}"


def calls_of(pipe: object) -> list[torch.Tensor]:
    """Keeps the text's states of each denoiser call."""
    seen: list[torch.Tensor] = []
    pipe.unet.register_forward_pre_hook(  # type: ignore[attr-defined]
        lambda _module, _args, given: seen.append(given["encoder_hidden_states"]),
        with_kwargs=True,
    )
    return seen


def test_images_are_those_of_plain_diffusers(
    session: Load,
    model: list[str],  # noqa: F811
    file: str,
    tmp_path: Path,
) -> None:
    work = [
        "workload.prompt_count=2",
        "workload.batch_size=2",
        "workload.guidance_scale=4",
    ]
    loaded = session(*model, *work, file)
    inputs = loaded._inputs[0]
    assert (inputs["prompt"], inputs["negative_prompt"]) == (PROMPTS, NEGATIVES)
    pipe = loaded._pipe
    size = {"height": 32, "width": 32}
    given = {
        "prompt": PROMPTS,
        "negative_prompt": NEGATIVES,
        "latents": inputs["latents"],
        "output_type": "np",
        **size,
    }
    wanted = pipe(**given, num_inference_steps=1, guidance_scale=4.0).images
    assert np.array_equal(np.asarray(loaded._call().images), wanted)
    without = pipe(
        **given | {"negative_prompt": None}, num_inference_steps=1, guidance_scale=4.0
    ).images
    assert not np.array_equal(without, wanted)
    draw = replace(timed_draw(loaded._variant), batch_size=1)
    records = [
        record
        for batch in range(2)
        for record in loaded.generate(batch, draw, tmp_path / "images").records
    ]
    assert [record.negative for record in records] == NEGATIVES
    embedded = session(*model, *work, file, "memory=precomputed_embeddings")
    seen, plain = calls_of(embedded._pipe), calls_of(pipe)
    embedded._call(), loaded._call()
    assert torch.allclose(seen[0], plain[0], atol=1e-4)


def test_one_for_all_prompts(composer: type[HydraComposer], file: str) -> None:
    job = composer(
        [f"{KEY}='blurry, grey'", "workload.prompts=[a,b]", "quality.prompt_count=1"]
    )
    found = job.variant("it")
    assert found.negatives == ("blurry, grey",) * 2
    assert timed_draw(found).negatives == found.negatives
    assert found.texts == ("a", "b", "blurry, grey")
    assert found.other_work(composer(["workload.prompts=[a,b]"]).variant("plain"))
    with pytest.raises(
        UsageError, match=r"workload\.negative_prompt: has no effect without guidance"
    ):
        job.variant("turbo", ["workload.guidance_scale=1"])
    assert composer([file]).variant("it").negatives == tuple(NEGATIVES)
    plain = composer([]).variant("it")
    assert plain.negatives == ()
    assert len({of_prompts(one) for one in (found, replace(found, negatives=()))}) == 2


@pytest.mark.filterwarnings("ignore:.*not the settings that were measured")
def test_of_a_measured_variant(result: StudyResult, tmp_path: Path) -> None:
    baseline = result.variant("baseline")
    baseline.overrides += [
        f"{KEY}='grey'",
        "memory=[precomputed_embeddings]",
        "workload.guidance_scale=3",
    ]
    write_result(result, tmp_path)
    with pytest.raises(
        ConflictError,
        match=r"memory=precomputed_embeddings: name the prompts .* prompts=\[…\]",
    ):
        sdopt.load(tmp_path, "baseline")
    pipe = sdopt.load(tmp_path, "baseline", prompts=PROMPTS)
    seen = calls_of(pipe)
    call = {"output_type": "latent", "num_inference_steps": 1}
    pipe(PROMPTS[0], **call)
    pipe(PROMPTS, **call)
    for states, count in zip(seen, (1, 2), strict=True):
        assert len(states) == 2 * count
        assert torch.equal(states[0], states[count - 1])
    with pytest.raises(UsageError, match="the prompt 'dull' was not encoded"):
        pipe(PROMPTS[0], negative_prompt="dull", **call)
    with pytest.raises(UsageError, match="a negative prompt for each prompt, or one"):
        pipe(PROMPTS, negative_prompt=["grey"], **call)
    plain = StableDiffusionPipeline.from_pretrained(
        MODEL, safety_checker=None, requires_safety_checker=False
    )
    own = calls_of(plain)
    plain(
        PROMPTS[0],
        negative_prompt="grey",
        guidance_scale=3.0,
        height=32,
        width=32,
        **call,
    )
    assert torch.allclose(own[0], seen[0], atol=1e-4)
