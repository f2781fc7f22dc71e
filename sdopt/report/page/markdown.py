"""Writes a report as Markdown: the same sections, with the pictures of the run's folder in place of plots."""

from collections.abc import Iterator

from sdopt.report.markdown import code_block, escaped, markdown
from sdopt.report.page.blocks import Block, Chart, Code, Facts, Fold, Gallery, Notes, Page, Prose, Section, Table


def markdown_page(page: Page) -> bytes:
    """Returns the report as Markdown; whatever it quotes is escaped."""
    return ("\n".join(_lines(page, 1)).rstrip() + "\n").encode()


def _lines(page: Page, level: int) -> Iterator[str]:
    yield f"{'#' * level} {escaped(page.title)}\n"
    yield " · ".join(f"{name}: {escaped(value)}" for name, value in page.summary) + "\n"
    for section in page.sections:
        yield from _section(section, level + 1)
    for study in page.studies:
        yield from _lines(study, level + 1)


def _section(section: Section, level: int) -> Iterator[str]:
    if section.folded:
        yield from _block(Fold(section.title, section.blocks))
        return
    written = [text for block in section.blocks for text in _block(block)]
    if written:
        yield f"{'#' * level} {section.title}\n"
        yield from written


def _block(block: Block) -> Iterator[str]:  # noqa: C901 (a case for each kind of block)
    match block:
        case Prose(text, strong):
            yield f"**{escaped(text)}**\n" if strong else f"{escaped(text)}\n"
        case Notes(lines):
            if lines:
                yield "\n".join(f"- {escaped(line)}" for line in lines) + "\n"
        case Code(title, lines):
            yield f"{escaped(title)}:\n\n{code_block(lines)}"
        case Table(headings, rows):
            yield markdown(headings, rows, [])
        case Facts(pairs):
            yield "\n".join(f"- {escaped(name)}: {escaped(value)}" for name, value in pairs) + "\n"
        case Fold(title, blocks):
            yield f"<details><summary>{escaped(title)}</summary>\n"
            for inner in blocks:
                yield from _block(inner)
            yield "</details>\n"
        case Chart(file=file, caption=caption) if file:
            yield f"![{escaped(caption)}]({file})\n"
        case Chart(views=views):
            # Content without a picture is written as text.
            yield f"{escaped(views[0][1]['description'])}.\n"
        case Gallery(file=file):
            yield f"![Images side by side, a column per variant]({file})\n"
