"""BM25 over the corpus: built once a process, shared by all episodes, read only."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from threading import Lock

from environments.gyms.search.documents import corpus
from environments.kit.ranking import Document, Ranking, ranking

_BUILDING = Lock()


def shared_index() -> Ranking[Document]:
    """The corpus's index, built on first use."""
    with _BUILDING:
        return _built()


async def ready_index() -> Ranking[Document]:
    """The same, without holding up the event loop while it is built."""
    return shared_index() if _built.cache_info().currsize else await asyncio.to_thread(shared_index)


@lru_cache(maxsize=1)
def _built() -> Ranking[Document]:
    return ranking(corpus())
