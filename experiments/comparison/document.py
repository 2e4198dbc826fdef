"""A document of plain blocks, written as Markdown or as one HTML file."""

import base64
import dataclasses
import html
import re
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Heading:
    """The title of a section; the document's own title is not one of its blocks."""

    text: str


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Bullets:
    """A list of plain texts."""

    items: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Code:
    """Lines to be shown as they are."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose first column names its rows."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Image:
    """A PNG file beside the document: a short name for those who do not see it, and a caption."""

    file: str
    alt: str
    caption: str


Block = Heading | Paragraph | Bullets | Code | Table | Image

CSS = """
:root { color-scheme: light dark; --line: #c8c8c8; --soft: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --line: #555; --soft: #262626; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: 1rem 0; }
caption { text-align: left; padding: 0.3rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.8rem; text-align: right; }
th:first-child { text-align: left; padding-left: 0; } thead th { border-bottom-width: 2px; }
figure { margin: 1.5rem 0; } figcaption, caption { font-size: 0.9rem; }
img { max-width: 100%; height: auto; background: white; border: 1px solid var(--line); }
pre { background: var(--soft); padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
""".strip()


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """Writes a document as GitHub's Markdown, with links to its images.

    Args:
        title: its title.
        blocks: its content.

    Returns:
        The text.
    """
    parts = [f"# {_markdown_text(title)}", *map(_markdown, blocks)]
    return "\n\n".join(parts) + "\n"


def to_html(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Writes a document as one HTML file that needs nothing else.

    Args:
        title: its title.
        blocks: its content.
        folder: where its images are; they become part of the text.

    Returns:
        The text.
    """
    body = "\n".join(_html(block, folder) for block in blocks)
    name = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>\n{CSS}\n</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{name}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_markdown_text(text)}"
        case Paragraph(text):
            return _markdown_text(text)
        case Bullets(items):
            return "\n".join(f"- {_markdown_text(item)}" for item in items)
        case Code(text):
            longest = max(map(len, re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{fence}\n{text}\n{fence}"
        case Table(caption, header, rows):
            lines = [_markdown_row(header), "|" + "---|" + "--:|" * (len(header) - 1)]
            lines += map(_markdown_row, rows)
            return _markdown_text(caption) + "\n\n" + "\n".join(lines)
        case Image(file, alt, caption):
            return f"![{_markdown_text(alt)}]({file})\n\n{_markdown_text(f'{alt}. {caption}')}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_markdown_text, cells)) + " |"


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*<|\[\]])", r"\\\1", text.replace("\n", " "))


def _html(block: Block, folder: Path) -> str:
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{html.escape(i)}</li>" for i in items) + "\n</ul>"
        case Code(text):
            return f"<pre><code>{html.escape(text)}</code></pre>"
        case Table(caption, header, rows):
            head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
            body = "\n".join(map(_html_row, rows))
            return (
                f'<div class="wide">\n<table>\n<caption>{html.escape(caption)}</caption>\n'
                f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
            )
        case Image(file, alt, caption):
            content = base64.b64encode((folder / file).read_bytes()).decode()
            return (
                f'<figure>\n<img alt="{html.escape(alt)}" src="data:image/png;base64,{content}">\n'
                f"<figcaption>{html.escape(f'{alt}. {caption}')}</figcaption>\n</figure>"
            )


def _html_row(cells: Sequence[str]) -> str:
    first, *others = map(html.escape, cells)
    return f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{i}</td>" for i in others) + "</tr>"
