"""Charts as Vega-Lite specifications: how they look, and how one is drawn as a PNG.

A chart holds no colour of the page around it: text and lines have the colours `INK`, `MUTED` and `LINE`, which the
report's style sheet replaces where the reader's screen is dark.
"""

from typing import Any

from sdopt.limits import require_address_space
from sdopt.report.summary import Summary
from sdopt.report.tones import INK, LINE, MUTED

VEGA_LITE = "6.4"
"""The version that specifications are written for."""

Spec = dict[str, Any]
"""What pages embed and pictures are drawn from."""

_V8_BYTES = 80 * 2**30
"""V8 reserves 64 GiB of address space, however little it uses."""

_TITLES: Spec = {"labelColor": INK, "titleColor": MUTED, "titleFontWeight": "normal",
                 "titleFontSize": 12, "labelFontSize": 12}  # fmt: skip

_CONFIG: Spec = {
    "font": "system-ui, 'Liberation Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {**_TITLES, "gridColor": LINE, "domain": False, "tickColor": LINE},
    # Beside columns of figures, a title is longer than its axis.
    "axisX": {"titleAnchor": "start"},
    "legend": {
        **_TITLES,
        "orient": "top",
        "labelLimit": 300,
        "symbolOpacity": 1,
        "layout": {"top": {"direction": "vertical", "margin": 4}},
    },
    "text": {"color": INK, "fontSize": 13},
    "header": {"labelColor": INK, "titleColor": MUTED},
}


def whole(spec: Spec, width: int | None = None) -> Spec:
    """Returns a complete specification, as wide as its container or as the given number of pixels."""
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE.partition('.')[0]}.json",
        "width": "container" if width is None else width,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None if width is None else "white",
        "config": _CONFIG,
        **spec,
    }


def picture(spec: Spec, width: int = 900) -> bytes:
    """Draws a specification as a PNG. Raises UnavailableError as `engine` does."""
    content: bytes = engine().vegalite_to_png(
        whole(spec, width), vl_version=VEGA_LITE, scale=1.5
    )
    return content


def study_picture(summary: Summary, spec: Spec | None) -> bytes | None:
    """Draws a plot of a study as a PNG that stands alone, as a tracker shows it; None without one."""
    if spec is None:
        return None
    where = f"{summary.result.name} on {summary.result.environment.device['name']}"
    return picture(
        {
            **spec,
            "title": {"text": where, "anchor": "start", "fontSize": 14, "offset": 8},
        }
    )


def engine() -> Any:
    """Returns vl-convert. Raises UnavailableError if its V8 would end this process for lack of address space."""
    require_address_space("plots", _V8_BYTES)
    import vl_convert  # large: a machine that only measures may do without

    return vl_convert
