"""What MkDocs does with links of the pages that lead out of docs/, to code and recipes.

On a forge they open the file. In the site they become the file's name (or a link to the forge, where ``repo_url`` is
set in mkdocs.yml); one that names no file is an error under ``--strict``.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.site")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\.?/[^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page with links out of docs/ rewritten; fenced code stays as it is."""
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else rewritten(part, page, config) for part in parts)


def rewritten(text: str, page: Any, config: Any) -> str:
    docs = Path(config["docs_dir"])
    root = docs.parent

    def replace(match: re.Match[str]) -> str:
        label, target, _ = match.groups()
        path = Path(os.path.normpath(docs / Path(page.file.src_uri).parent / target))
        if path.is_relative_to(docs):
            return match.group(0)
        if not path.exists() or not path.is_relative_to(root):
            log.warning("Doc file '%s' contains a link '%s', but there is no such file.", page.file.src_uri, target)
            return label
        forge = config.get("repo_url")
        return f"[{label}]({forge.rstrip('/')}/blob/main/{path.relative_to(root)})" if forge else label

    return LINK.sub(replace, text)
