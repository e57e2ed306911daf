"""Weights that another process reads by a handle: shared memory on a CPU, CUDA IPC on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tools.gpu_checks.child import Found, Place
from tools.gpu_checks.policies import learner, random_policy, wait
from tools.gpu_checks.receiver import checksum

SECONDS = 60.0


def ipc(place: Place) -> Found:
    """The learner's weights, bucket by bucket, by the product's handles, read as SGLang reads them; every checksum."""
    from megatron_bridge.plan import plan_model
    from megatron_bridge.reshard import Resharder
    from mua.compat.shared_weights import shared_buffer, shared_handle

    found = Found()
    random_policy(place.work / "policy", place, scale=place.pick(4, 1), layers=place.pick(6, 2))
    receiver, sent, taken, tensors = _receiver(place), 0, 0.0, 0
    try:
        with learner(place.work / "policy", place.pick("bfloat16", "float32")) as built:
            plan = plan_model(built.policy.chunks)
            resharder = Resharder(plan, {0: (0,)}, place.pick(1 << 29, 1 << 20), by_turns=False)
            for index, layout in enumerate(resharder.buckets):
                flat = resharder.assemble(index, lambda _, size: shared_buffer(size, plan.device))[0]
                wait(place)
                expected = {slot.spec.name: checksum(slot.view(flat)) for slot in layout.tensors}
                answer = _ask(receiver, shared_handle(layout, flat))
                different = [name for name, value in expected.items() if answer["checksums"].get(name) != value]
                found.expect(not different, f"other bytes arrived of {', '.join(different[:4])}")
                sent, taken = sent + layout.payload_bytes, taken + answer["seconds"]
                tensors += len(expected)
    finally:
        _end(receiver)
    found.add("tensors", tensors)
    found.add("bytes", sent / 1e6, "MB")
    found.add("opened and copied", sent / max(taken, 1e-9) / 1e9, "GB/s")
    return found


def _receiver(place: Place) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tools.gpu_checks.receiver", place.device]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(receiver: subprocess.Popen[str], handle: str) -> dict[str, Any]:
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    receiver.stdin.write(handle + "\n")
    receiver.stdin.flush()
    answer: dict[str, Any] = json.loads(receiver.stdout.readline() or '{"error": "the receiving process ended"}')
    if "error" in answer:
        raise RuntimeError(f"the receiving process says: {answer['error']}")
    return answer


def _end(receiver: subprocess.Popen[str]) -> None:
    if receiver.stdin is not None:
        receiver.stdin.close()
    try:
        receiver.wait(SECONDS)
    except subprocess.TimeoutExpired:
        receiver.kill()
