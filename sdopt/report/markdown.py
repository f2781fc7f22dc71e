"""Writes blocks as Markdown, with the pictures of the run's folder in place of plots."""

import re
from collections.abc import Iterator, Sequence

from sdopt.report.blocks import Block, Chart, Code, Facts, Fold, Gallery, Notes, Page, Prose, Table


def markdown_page(page: Page) -> bytes:
    """Returns a report as Markdown; whatever it quotes is escaped."""
    return ("\n".join(_lines(page, 1)).rstrip() + "\n").encode()


def _lines(page: Page, level: int) -> Iterator[str]:
    yield f"{'#' * level} {escaped(page.title)}\n"
    yield " · ".join(f"{name}: {escaped(value)}" for name, value in page.summary) + "\n"
    for section in page.sections:
        if text := written(section.blocks):
            yield f"{'#' * (level + 1)} {section.title}\n"
            yield text
    for study in page.studies:
        yield from _lines(study, level + 1)


def written(blocks: Sequence[Block]) -> str:
    """Returns blocks as Markdown; whatever they quote is escaped."""
    return "\n".join(text for block in blocks for text in _block(block))


def _block(block: Block) -> Iterator[str]:  # noqa: C901 (a case for each kind of block)
    match block:
        case Prose(text, strong):
            yield f"**{_cell(text)}**\n" if strong else f"{escaped(text)}\n"
        case Notes(lines):
            if lines:
                yield "\n".join(f"- {escaped(line)}" for line in lines) + "\n"
        case Code(title, lines, language):
            yield f"{escaped(title)}:\n\n{code_block(lines, language)}"
        case Table():
            yield markdown(block.headings, [[str(cell) for cell in row] for row in block.cells], [])
        case Facts(pairs):
            yield "\n".join(f"- {escaped(name)}: {escaped(value)}" for name, value in pairs) + "\n"
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


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Returns a Markdown table with notes below it; cells and notes are escaped."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {escaped(note)}" for note in notes)]).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|").replace("\n", " ")


def code_block(lines: Sequence[str], language: str = "") -> str:
    """Returns lines of code between fences that none of them can end."""
    fence = "`" * max([3, *(1 + len(run) for line in lines for run in re.findall("`+", line))])
    return f"{fence}{language}\n" + "\n".join(lines) + f"\n{fence}\n"


def escaped(text: str) -> str:
    """Returns a text escaped for Markdown, except for code between backticks."""
    parts = text.replace("\n", " ").split("`")
    if len(parts) % 2 == 0:
        return _plain(text.replace("\n", " "))
    return "".join(f"`{part}`" if number % 2 else _plain(part) for number, part in enumerate(parts))


def _plain(text: str) -> str:
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(mark, entity)
    # Within a word an underscore is no markup.
    return re.sub(r"[\\`*\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
