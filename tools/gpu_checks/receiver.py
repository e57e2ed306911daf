"""The process that reads weights by handles, as SGLang's receiver does. It imports torch alone, and on a GPU SGLang."""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pybase64
import torch

from tools.gpu_checks.child import absent


def checksum(tensor: torch.Tensor) -> int:
    """Of every byte and its place."""
    data = tensor.contiguous().view(-1).view(torch.uint8).to(torch.int64)
    return int((data * (torch.arange(len(data), device=data.device) % 65521 + 1)).sum())


def _receive(handle: str, cuda: bool) -> dict[str, Any]:
    """As SGLang's receiver does it: unpickle, and take each tensor as a view of the flat memory."""
    began = time.perf_counter()
    content = ForkingPickler.loads(pybase64.b64decode(handle))
    flat = content["flattened_tensor"]
    own = flat.clone()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if not content["metadata"]:
        return {"seconds": seconds, "checksums": {"": checksum(own)}}
    found = {of.name: checksum(own[of.start_idx : of.end_idx]) for of in content["metadata"]}
    return {"seconds": seconds, "checksums": found}


def receive_all(device: str) -> None:
    """The receiving process: a handle in each line of standard input, an answer in each of standard output."""
    cuda = device == "cuda"
    if cuda and not absent("sglang"):
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    for line in sys.stdin:
        try:
            answer = _receive(line.strip(), cuda)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    receive_all(sys.argv[1])
