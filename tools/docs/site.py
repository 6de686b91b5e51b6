"""mkdocs hooks: the README becomes the front page; links out of ``docs/`` become plain text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

CHECKOUT = Path(__file__).resolve().parents[2]
ORDER = ("index.md", "how-to", "reference", "architecture.md", "decisions")
_SHIM = "https://unpkg.com/iframe-worker/shim"  # without it no search in a folder
_FOREIGN = re.compile(r"""<(?:script|img|iframe)[^>]+src="?https?://[^"> ]+""")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    text = (CHECKOUT / "README.md").read_text("utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = Path(page.file.src_uri).parent

    def rewrite(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, sharp, anchor = target.partition("#")
        if path and (CHECKOUT / "docs" / folder / path).resolve() == CHECKOUT / "README.md":
            front = "../" * len(folder.parts) + "index.md"
            return f"{mark}[{text}]({front}{sharp}{anchor})"
        inside = re.match(r"^[a-z]+:", target) or not path or _is_page(folder / path)
        return match[0] if inside else text

    return _LINK.sub(rewrite, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load scripts from this site; PluginError for files of other sites: pages work offline."""
    output = output.replace(_SHIM, get_relative_url("iframe-worker.js", page.url))
    if match := _FOREIGN.search(output):
        raise PluginError(f"{page.url} loads from another site: {match[0]}")
    return output


def _is_page(path: Path) -> bool:
    target = (CHECKOUT / "docs" / path).resolve()
    in_docs = target.is_relative_to(CHECKOUT / "docs") and target.is_file()
    return in_docs or path.as_posix() == "index.md"


def on_nav(nav: Any, **_: Any) -> Any:
    nav.items.sort(key=lambda item: ORDER.index(_name(item)))
    return nav


def _name(item: Any) -> str:
    if item.is_section:
        first = next(child for child in item.children if child.is_page)
        return str(Path(first.file.src_uri).parts[0])
    return str(item.file.src_uri)
