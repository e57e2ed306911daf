"""Peak memory of log-probabilities, entropy and their gradients: in chunks against full logits.

    python -m tools.bench.logprobs [--tokens 512 1024 2048] [--hidden 512]

Both ways get the same hidden states and the same weight of 151,936 rows, give the same loss, and run in fresh
processes, one after the other. Reported is what a way needs on top of the inputs and their gradients, which both must
have: on a CPU from the high-water mark of the process's resident memory, on CUDA from torch's allocator. ``full`` is
what one writes down first: logits, ``log_softmax``, ``gather``, and the entropy from the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from tools import kit

VOCABULARY = 151_936
WAYS = ("full", "chunked")


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one, arguments.tokens[0], arguments.hidden, arguments.dtype)))
        return
    print(f"{arguments.dtype}, hidden {arguments.hidden}, {kit.machine()}\n")
    columns = "tokens | logits in float32, MB | full, MB | chunked, MB | share | full, CPU s | chunked, CPU s"
    print(kit.head(*columns.split(" | ")))
    for tokens in arguments.tokens:
        size = [f"--tokens={tokens}", f"--hidden={arguments.hidden}", f"--dtype={arguments.dtype}"]
        full, chunked = (kit.afresh(__spec__.name, f"--one={way}", *size) for way in WAYS)
        tolerance = 1e-4 if arguments.dtype == "float32" else 1e-2
        assert abs(full["loss"] - chunked["loss"]) < tolerance * abs(full["loss"]), (full, chunked)
        peaks = (full["megabytes"], chunked["megabytes"])
        cells = (
            f"{tokens:,}", f"{tokens * VOCABULARY * 4 / 1e6:,.0f}", f"{peaks[0]:,.0f}", f"{peaks[1]:,.0f}",
            f"{peaks[1] / peaks[0]:.1%}", f"{full['seconds']:.1f}", f"{chunked['seconds']:.1f}",
        )  # fmt: skip
        print(kit.row(*cells), flush=True)


def measured(way: str, tokens: int, hidden: int, dtype: str) -> dict[str, float]:
    """Loss, megabytes on top of inputs and gradients, and CPU seconds of one forward and backward pass."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    kind: Any = getattr(torch, dtype)
    states = torch.randn(tokens, hidden, device=where, dtype=kind, requires_grad=True)
    weight = torch.randn(VOCABULARY, hidden, device=where, dtype=kind).div_(hidden**0.5).requires_grad_()
    ids = torch.randint(VOCABULARY, (tokens,), device=where)
    gradients = states.nbytes + weight.nbytes
    compute = _chunked if way == "chunked" else _full
    few, small = (tensor[:64].detach().requires_grad_() for tensor in (states, weight))
    compute(few, small, ids[:64] % 64).sum().backward()  # loads what is loaded once
    before, started = peak(where) + gradients, time.process_time()
    loss = compute(states, weight, ids).sum()
    loss.backward()
    seconds, more = time.process_time() - started, peak(where) - before
    dist.destroy_process_group()
    return {"loss": float(loss.detach()), "megabytes": more / 1e6, "seconds": seconds}


def peak(where: Any) -> int:
    """Most bytes so far. On CUDA, memory that is in use now when this is first called."""
    import torch

    if where.type == "cuda":
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _chunked(states: Any, weight: Any, ids: Any) -> Any:
    import torch
    import torch.distributed as dist

    from mua.megatron.logprobs import log_probabilities

    predictors = torch.arange(len(ids), device=ids.device)
    world: Any = dist.group.WORLD
    values, entropy = log_probabilities(
        states, weight, ids, 1.0, predictors=predictors, vocab_size=len(weight), group=world
    )
    return values + 0.01 * entropy


def _full(states: Any, weight: Any, ids: Any) -> Any:
    log_p = (states @ weight.T).float().log_softmax(-1)
    return log_p.gather(1, ids[:, None])[:, 0] - 0.01 * (log_p.exp() * log_p).sum(-1)


if __name__ == "__main__":
    main()
