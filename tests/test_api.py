"""sdopt from Python: a small surface, light to import, and a run as a library call."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sdopt
from tests.command import ROOT, SMALL, SMOKE


def python(cwd: Path, code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestSurface:
    def test_importing_it_imports_nothing_heavy(self, tmp_path: Path) -> None:
        heavy = python(
            tmp_path,
            "import sys, sdopt; dir(sdopt); "
            "print([m for m in ('torch', 'diffusers', 'mlflow', 'hydra', 'pandas', 'numpy') if m in sys.modules])",
        )
        assert heavy.strip() == "[]"

    def test_every_public_name_is_there(self) -> None:
        assert dir(sdopt) == sorted(sdopt.__all__)
        for name in sdopt.__all__:
            assert getattr(sdopt, name) is not None

    def test_another_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="nope"):
            sdopt.nope  # noqa: B018


class TestRun:
    def test_the_block_of_the_readme_runs_in_a_plain_script(self, tmp_path: Path) -> None:
        [block] = re.findall(r"```python\n(import sdopt\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        assert len([line for line in block.splitlines() if line.strip()]) <= 12
        # The same study in small: one step, and the images of one prompt.
        small = [*SMALL, "protocol.stage_calls=0"]
        more = "".join(f', "{override}"' for override in small)
        script = tmp_path / "plain.py"
        script.write_text(block.replace('"protocol=smoke"', f'"protocol=smoke"{more}'))
        assert script.read_text() != block
        done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "channels last" in done.stdout
        assert done.stdout.count("quickstart: emoji") == 1, "a worker ran the script again"

    @pytest.mark.parametrize(
        ("overrides", "error", "said"),
        [
            (["precison=bf16"], sdopt.UsageError, "did you mean precision"),
            (["attention=cudnn"], sdopt.ConflictError, "needs a CUDA device"),
        ],
    )
    def test_what_cannot_run_is_raised(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        overrides: list[str],
        error: type[Exception],
        said: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(error, match=said):
            sdopt.run(*SMOKE, *overrides)
        assert capsys.readouterr().err == ""
