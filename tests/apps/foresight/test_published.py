"""Published figures are read by words, and what cannot be read is refused with a reason."""

from pathlib import Path

import numpy as np
import pytest

from runners.plan import main
from sdopt.apps.foresight.fitting import case_of
from sdopt.apps.foresight.latency import Costs
from sdopt.apps.foresight.published import COLUMNS, Figure, Names, read_figures
from sdopt.apps.foresight.software import SCORES, Software
from sdopt.errors import UsageError


def truth(tmp_path: Path, *rows: dict[str, object]) -> Path:
    usual = {"source": "me:x", "gpu": "RTX 3060", "model": "SD 1.5", "width": 512, "height": 512, "steps": 20,
             "batch": 1, "precision": "fp16", "backend": "diffusers 0.30, torch 2.4", "metric": "latency_s",
             "value": 3.0, "unit": "s", "note": ""}  # fmt: skip
    lines = [
        ",".join(COLUMNS),
        *(",".join(f'"{(usual | row)[name]}"' for name in COLUMNS) for row in rows),
    ]
    file = tmp_path / "truth.csv"
    file.write_text("\n".join(lines))
    return file


def one(tmp_path: Path, **row: object) -> Figure:
    [found], _ = read_figures(truth(tmp_path, row))
    return found


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100_80"),
        ("A100", "a100_40"),
        ("NVIDIA L4-PCIe-24GB", "l4"),
        ("H100 PCIe 80GB", "h100_pcie"),
        ("A100 PCIe 80GB", "a100_80_pcie"),
        ("V100 32GB", "v100_32"),
        ("A10G (g5.xlarge)", "a10g"),
        ("RTX PRO 6000 Blackwell", "rtx_pro_6000"),
        ("RTX 4070 Ti SUPER", "rtx4070_ti_super"),
        ("RTX 3080-10GB", "rtx3080"),
        ("AMD Radeon RX 7900 XTX", "rx7900_xtx"),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", "rtx3070_laptop"),
        ("NVIDIA H100 PCIe MIG 1g.10gb", None),
        ("AMD Radeon Graphics", None),
        ("Intel(R) Arc(TM) A770 Graphics", None),
        ("Banana 9000", None),
    ],
)
def test_a_card_is_found_by_its_names(written: str, card: str | None) -> None:
    assert Names().card(written) == card


def test_times_have_units(tmp_path: Path) -> None:
    assert one(tmp_path, value=3000, unit="ms").seconds == pytest.approx(3)
    assert one(
        tmp_path, metric="steps_per_s", value=10, unit="it/s"
    ).seconds == pytest.approx(0.1)
    assert one(
        tmp_path, metric="steps_times_batch_per_s", value=8, batch=4, unit="it/s"
    ).seconds == pytest.approx(10)
    assert one(
        tmp_path, metric="images_per_s_per_accelerator", value=2, unit="img/s"
    ).seconds == pytest.approx(0.5)
    assert one(
        tmp_path, metric="memory_reserved_gb", value=2.147483648, unit="GB (1e9)"
    ).gib == pytest.approx(2)


@pytest.mark.parametrize(
    "row",
    [
        {"gpu": "Banana 9000"},
        {"model": "HunyuanDiT"},
        {"value": "n/a"},
        {"value": -1},
        {"value": "nan"},
        {"steps": ""},
        {"width": "wide"},
        {"unit": "fortnights"},
        {"metric": "happiness"},
        {"precision": "int3"},
        {"backend": "Core ML"},
        {"backend": "my own code"},
    ],
)
def test_what_is_unknown_is_refused_with_a_reason(
    tmp_path: Path, row: dict[str, object]
) -> None:
    figures, refusals = read_figures(truth(tmp_path, row))
    assert not figures
    assert len(refusals) == 1


@pytest.mark.parametrize(
    ("row", "full"),
    [
        ({"model": "SDXL"}, True),
        ({"model": "SDXL", "precision": "bf16"}, False),
        ({"model": "SDXL", "backend": "diffusers, torch 2.4, tiny VAE"}, False),
        ({"model": "SDXL", "backend": "a1111, sdp, torch 2.1"}, False),
        ({"model": "SD 1.5"}, False),
    ],
)
def test_a_library_decodes_sdxl_of_float16_in_float32(
    tmp_path: Path, row: dict[str, object], full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration says `force_upcast`: on a T4, most of a call of four steps goes into it."""
    monkeypatch.setattr("sdopt.apps.foresight.trace.pass_costs", lambda *_: Costs())
    assert case_of(one(tmp_path, **row)).decodes_in_float32 == full


def test_software_is_sorted_by_words() -> None:
    web = Software.read("a1111, doggettx, torch 1.13", "fp16 autocast")
    assert isinstance(web, Software)
    assert (web.application, web.split, web.attention, web.torch) == (
        "web",
        True,
        SCORES,
        (1, 13),
    )
    engine = Software.read("TensorRT 10.2.0, CUDA 12.4", "fp8 UNet")
    assert isinstance(engine, Software)
    assert engine.launcher == "engine"
    compiled = Software.read("torch 2.0 compile reduce-overhead", "fp16")
    assert isinstance(compiled, Software)
    assert compiled.launcher == "graphs"


class TestCheck:
    def test_a_file_with_anything_in_it_is_checked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = truth(tmp_path, {}, {"gpu": "Banana 9000"}, {"gpu": "RTX 5090", "value": 1.2}, {"value": "?"},
                     {"metric": "memory_reserved_gb", "value": 3.2, "unit": "GB"})  # fmt: skip
        assert main(["--check", str(file)]) == 0
        shown = capsys.readouterr().out
        assert "known" in shown
        assert "extrapolated" in shown
        assert "no data sheet" in shown
        assert "memory, reserved" in shown

    def test_a_device_is_predicted_without_its_own_figures(
        self, tmp_path: Path
    ) -> None:
        from sdopt.apps.foresight.check import check
        from sdopt.apps.foresight.latency import coefficients

        def predicted(value: float, by: str) -> float:
            found = check(
                *read_figures(truth(tmp_path, {"value": value})), coefficients(), by
            )
            return float(found.rows[0]["predicted"])

        assert predicted(3.0, "chip") == pytest.approx(predicted(30.0, "chip"))
        assert np.isfinite(predicted(3.0, "generation"))
        assert predicted(3.0, "generation") != predicted(3.0, "chip")

    def test_bad_files_end_with_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "bad.csv").write_text("gpu,value\nT4,1\n")
        assert main(["--check", str(tmp_path / "bad.csv")]) == UsageError.exit_code
        assert main(["--check", str(tmp_path / "missing.csv")]) == UsageError.exit_code
        assert main(["--check", str(truth(tmp_path))]) == UsageError.exit_code
        assert len(capsys.readouterr().err.strip().splitlines()) == 3
