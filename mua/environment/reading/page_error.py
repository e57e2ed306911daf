"""What keeps a page from being read. Its text is for the policy, in one line."""

from __future__ import annotations


class PageError(Exception):
    """The page cannot be had, or the call is refused: by what the policy asked for, or by what the web answered."""
