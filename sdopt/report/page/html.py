"""Writes a report as one HTML file that needs nothing beside it: no network, no font, no script from elsewhere."""

import base64
import hashlib
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sdopt.record.files import write_cached
from sdopt.report.blocks import Block, Chart, Page
from sdopt.report.charts.spec import VEGA_LITE, engine, whole
from sdopt.report.tones import GLYPH
from sdopt.scratch import cache_folder


def html_page(page: Page) -> bytes:
    """Returns the report as HTML; whatever it quotes is escaped."""
    plotted = any(map(_is_plotted, (page, *page.studies)))
    scripts = [_library()] if plotted else []
    scripts.append(_asset("page.js"))
    # Only these scripts may run; a script injected through unescaped text is blocked.
    hashes = " ".join(map(_source_hash, scripts))
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes} 'unsafe-eval'"
    text = _environment().get_template("page.html.j2").render(
        page=page,
        policy=policy,
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        plotted=plotted,
    )  # fmt: skip
    return text.encode()


def _is_plotted(page: Page) -> bool:
    """Returns whether a report has a plot."""
    blocks: list[Block] = []
    for section in page.sections:
        blocks += section.blocks
    return any(isinstance(block, Chart) for block in blocks)


def _source_hash(script: str) -> str:
    """Returns a script's source expression in a content security policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sdopt.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["glyph"] = GLYPH.__getitem__
    environment.filters["code"] = _code
    environment.filters["specs"] = lambda chart: [
        whole(spec) for _, spec in chart.views
    ]
    environment.filters["type"] = lambda block: type(block).__name__
    return environment


def _code(text: str) -> Markup:
    """Returns HTML of a text, with the parts between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    pieces = list(map(escape, parts))
    pieces[1::2] = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return Markup("").join(pieces)


def _asset(name: str) -> str:
    return (files("sdopt.report.page") / "templates" / name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as one script; cached, because bundling takes vl-convert two seconds."""
    made_by = f"{VEGA_LITE}-{version('vl-convert-python')}"
    file = cache_folder() / "sdopt" / f"vega-{made_by}.js"
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    # An HTML parser ends a script at this word, wherever it stands.
    bundle: str = engine().javascript_bundle(vl_version=VEGA_LITE)
    script = bundle.replace("</script", "<\\/script")
    write_cached(file, script.encode())
    return script
