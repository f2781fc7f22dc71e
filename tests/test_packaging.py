"""The wheel: what it carries, and that it runs where there is no checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sdopt.record.files import read_result
from tests.command import ROOT, SMOKE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
    ]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel in it, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--quiet",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    return target


def test_carries_the_package_with_its_configurations_runners_and_model(
    wheel: Path,
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"sdopt/conf/{path.relative_to(ROOT / 'conf')}" in names
    for path in (ROOT / "runners").glob("*.py"):
        assert f"sdopt/runners/{path.name}" in names
    assert "sdopt/reference/emoji/unet/diffusion_pytorch_model.safetensors" in names
    assert "sdopt/reference/emoji/model_index.json" in names
    assert "sdopt/reference/prompts.json" in names
    assert {
        f"sdopt/report/page/templates/page.{kind}" for kind in ("html.j2", "css", "js")
    } <= names
    assert any(name.endswith("NOTICE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"sdopt"}
    assert not [
        name
        for name in names
        if "tests" in name or "__pycache__" in name or "outputs" in name
    ]
    assert wheel.stat().st_size < 40e6, "the packaged models are 39 MB at the most"


def test_measures_a_study_outside_of_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    def run(*command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        command = (sys.executable, *command)
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    where = "import sdopt, sdopt.config.paths; print(sdopt.__file__, sdopt.config.paths.CONF)"
    assert run("-c", where).split() == [
        f"{installed}/sdopt/__init__.py",
        f"{installed}/sdopt/conf",
    ]
    assert "usage: sdopt" in run(str(installed / "bin" / "sdopt"), "--help")
    run("-m", "sdopt", "run", *SMOKE, "precision=bf16")
    [path] = tmp_path.rglob("result.json")
    result = read_result(path)
    assert [str(row.status) for row in result.variants] == ["ok", "ok", "ok"]
    assert result.environment.start_method == "forkserver"
    assert result.environment.sdopt_commit is None
