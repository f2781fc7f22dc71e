"""Writes blocks as Markdown, with the pictures of the run's folder in place of plots."""

import re
from collections.abc import Iterator, Sequence

from sdopt.report.blocks import (
    Block,
    Chart,
    Code,
    Facts,
    Fold,
    Gallery,
    Notes,
    Page,
    Prose,
    Table,
)


def markdown_page(page: Page) -> bytes:
    """Returns a report as Markdown; whatever it quotes is escaped."""
    return ("\n".join(_lines(page, 1)).rstrip() + "\n").encode()


def _lines(page: Page, level: int) -> Iterator[str]:
    facts = [f"{name}: {escaped(value)}" for name, value in page.summary]
    yield f"{'#' * level} {escaped(page.title)}\n"
    yield " · ".join(facts) + "\n"
    for section in page.sections:
        text = written(section.blocks)
        if text:
            yield f"{'#' * (level + 1)} {section.title}\n"
            yield text
    for study in page.studies:
        yield from _lines(study, level + 1)


def written(blocks: Sequence[Block]) -> str:
    """Returns blocks as Markdown; whatever they quote is escaped."""
    texts: list[str] = []
    for block in blocks:
        texts += _block(block)
    return "\n".join(texts)


def _block(block: Block) -> Iterator[str]:  # noqa: C901 (a case for each kind of block)
    match block:
        case Prose(text, strong):
            yield f"**{_cell(text)}**\n" if strong else f"{escaped(text)}\n"
        case Notes(lines):
            if lines:
                yield _listed(list(map(escaped, lines)))
        case Code(title, lines, language):
            yield f"{escaped(title)}:\n\n{code_block(lines, language)}"
        case Table():
            rows = [list(map(str, row)) for row in block.cells]
            yield markdown(block.headings, rows)
        case Facts(pairs):
            yield _listed(
                [f"{escaped(name)}: {escaped(value)}" for name, value in pairs]
            )
        case Fold(title, blocks):
            yield f"<details><summary>{escaped(title)}</summary>\n"
            yield written(blocks)
            yield "</details>\n"
        case Chart(file=file, caption=caption) if file:
            yield f"![{escaped(caption)}]({file})\n"
        case Chart(views=views):
            # Content without a picture is written as text.
            yield f"{escaped(views[0][1]['description'])}.\n"
        case Gallery(file=file):
            yield f"![Images side by side, a column per variant]({file})\n"


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table; cells are escaped."""
    lines = [_row(headings), "|" + "---|" * len(headings)]
    for row in rows:
        lines.append(_row(list(map(_cell, row))))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    text = _entities(text)
    return text.replace("|", "\\|").replace("\n", " ")


def _entities(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code_block(lines: Sequence[str], language: str = "") -> str:
    """Returns lines of code between fences that none of them can end."""
    runs = re.findall("`+", "\n".join(lines))
    longest = max(map(len, runs), default=0)
    fence = "`" * max(3, longest + 1)
    code = "\n".join(lines)
    return f"{fence}{language}\n{code}\n{fence}\n"


def escaped(text: str) -> str:
    """Returns a text escaped for Markdown, except for code between backticks."""
    text = text.replace("\n", " ")
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return _plain(text)
    texts = []
    for number, part in enumerate(parts):
        is_code = number % 2 == 1
        texts.append(f"`{part}`" if is_code else _plain(part))
    return "".join(texts)


def _plain(text: str) -> str:
    # Within a word an underscore is no markup.
    return re.sub(r"[\\`*\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", _entities(text))
