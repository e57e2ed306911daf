"""The text of a PDF, by pypdf; in a process of its own, since a PDF may be made to take time and memory without end."""

from __future__ import annotations

import io
import logging

MOST_PAGES = 500
"""Pages of one PDF that are read; of a longer one the first."""


def pdf_text(body: bytes, longest: int) -> tuple[str, str, bool]:
    """Title, text, and whether pages were left out: those beyond :data:`MOST_PAGES`, or ``longest`` characters.

    Pages are apart by a blank line. Of an encrypted PDF the user's password must be empty. Raises whatever pypdf
    raises.
    """
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # a line for each thing that is broken
    reader = pypdf.PdfReader(io.BytesIO(body), strict=False)
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("the PDF has a password")
    texts, characters = list[str](), 0
    for number, page in enumerate(reader.pages):
        if number >= MOST_PAGES or characters > longest:
            return _title(reader), "\n\n".join(texts), True
        texts.append(page.extract_text())
        characters += len(texts[-1]) + 2
    return _title(reader), "\n\n".join(texts), False


def _title(reader: object) -> str:
    title = getattr(getattr(reader, "metadata", None), "title", None)
    return title if isinstance(title, str) else ""
