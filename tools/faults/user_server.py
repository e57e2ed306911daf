"""A user's language model in a process of its own: ``python -m tools.faults.user_server PORT``.

Answers OpenAI's chat requests with sentences that the request's seed and length choose, so that it says the same again.
"""

from __future__ import annotations

import asyncio
import sys
from random import Random

from aiohttp import web

from mua.environment.user import STOP_SIGNAL

_SENTENCES = (
    "Hello, I have a question about my order.",
    "Where is my parcel now?",
    "I would like to cancel the order, please.",
    "My name is Ada Brown.",
    "Could you please look again?",
    "That is not what I asked for.",
    "The number is 4711, I think.",
    "Can you send it to another address?",
)


async def _answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    random = Random(f"{body.get('seed')}/{len(body['messages'])}")
    await asyncio.sleep(random.uniform(0.02, 0.2))
    said = sum(message["role"] == "assistant" for message in body["messages"])
    text = STOP_SIGNAL if said and random.random() < 0.15 else random.choice(_SENTENCES)
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return web.json_response(
        {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
    )


def main() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=lambda _: None)


if __name__ == "__main__":
    main()
