"""The CPU engine's attention over blocks of sequences against SGLang's own, one sequence after the other.

    python -m tools.bench.engine_attention [--sequences 256]

The shapes are those of the demonstration's policy (6 heads on 3, 32 dimensions) in a rollout: 100 to 320 tokens per
sequence; one new token each, then 5 to 50 after a cached beginning. Both run in one process, alternately; the best of
nine counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from mua.compat.sglang_cpu import cpu_environment
from tools import kit

HEADS, KV_HEADS, HEAD = 6, 3, 32
_INSIDE = "MUA_BENCH_INSIDE"


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    options = parser.parse_args()
    if _INSIDE not in os.environ:  # SGLang's modules load for the CPU in such an environment only
        environment = cpu_environment() | {_INSIDE: "1"}
        sys.exit(subprocess.run([sys.executable, "-m", __spec__.name, *sys.argv[1:]], env=environment).returncode)
    measure(options.sequences)


def measure(sequences: int) -> None:
    """Print both times and their ratio."""
    import mua_cpu_grouped as grouped
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Upstream

    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = torch.randint(100, 320, (sequences,))
    new = torch.randint(5, 50, (sequences,))
    slots = sequences * 400
    k, v = torch.randn(2, slots, KV_HEADS, HEAD)
    where = torch.randperm(slots).view(sequences, 400).to(torch.int32)
    shared = (k, v, where, torch.randperm(sequences), lengths)
    settings = {"scaling": HEAD**-0.5, "enable_gqa": True}

    def ran(kernel: Callable[..., Tensor], rows: int, *more: object, causal: bool) -> Callable[[], Tensor]:
        query = torch.randn(rows, HEADS, HEAD)
        return lambda: kernel(None, query, torch.empty_like(query), *shared, *more, None, **settings, causal=causal)

    prompt = (int(new.sum()), lengths - new, new)
    _report("one new token each", ran(Upstream._run_sdpa_forward_decode, sequences, causal=False),
            ran(grouped.decode, sequences, causal=False))  # fmt: skip
    _report("5 to 50 new tokens", ran(Upstream._run_sdpa_forward_extend, *prompt, causal=True),
            ran(grouped.extend, *prompt, causal=True))  # fmt: skip


def _report(what: str, upstream: Callable[[], Tensor], grouped: Callable[[], Tensor]) -> None:
    best = [float("inf"), float("inf")]
    for _ in range(9):
        for at, kernel in enumerate((upstream, grouped)):
            start = perf_counter()
            kernel()
            best[at] = min(best[at], perf_counter() - start)
    print(f"{what}: SGLang's {1e3 * best[0]:.1f} ms, blocks {1e3 * best[1]:.1f} ms, {best[0] / best[1]:.1f} times")


if __name__ == "__main__":
    main()
