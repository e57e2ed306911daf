"""State that comes back as it was: from a checkpoint, and from host memory."""

from __future__ import annotations

import subprocess
import sys

import torch

from mua.trainer.learner import Learner
from tools.gpu_checks.child import Found, Place
from tools.gpu_checks.policies import batch, bits, exported, learner, likelihood, random_policy, sequences

LENGTHS = (100, 1, 33, 64)


def checkpoint(place: Place) -> Found:
    """Steps, a checkpoint, a step; then the checkpoint, and the step again, in a learner of its own.

    What is restored must have the same bits. The step after it must, too, if the device repeats a step at all: that is
    tried by making it twice from the same checkpoint.
    """
    found, dtype = Found(), place.pick("bfloat16", "float32")
    random_policy(place.work / "policy", place, scale=place.pick(4, 1))
    given, after = batch(sequences(LENGTHS)), batch(sequences(LENGTHS, seed=2))
    with learner(place.work / "policy", dtype) as built:
        for _ in range(2):
            built.train_step(given, likelihood)
        built.save(place.work / "saved", {"step": 2})
        saved = _state(built, given)
        built.train_step(after, likelihood)
        went_on = _state(built, given)
    again = []
    for _ in range(2):
        with learner(place.work / "policy", dtype) as built:
            restored = built.load(place.work / "saved")
            found.expect(restored == {"step": 2}, f"the checkpoint's own state came back as {restored}")
            same = _state(built, given) == saved
            found.expect(same, "weights or log-probabilities of the restored policy have other bits")
            built.train_step(after, likelihood)
            again.append(_state(built, given))
    repeats = again[0] == again[1]
    found.add("the device repeats a step bit for bit", repeats)
    found.add("the resumed run went on bit for bit", again[0] == went_on)
    found.expect(not repeats or again[0] == went_on, "the step after the checkpoint is another one than without it")
    if not repeats:
        found.message = "kernels of this device do not repeat a step, so the step after the checkpoint proves nothing"
    return found


def _state(built: Learner, given: object) -> tuple[str, str]:
    return bits(exported(built)), bits(built.log_probabilities(list(given), 1.0))  # type: ignore[call-overload]


def offload(place: Place) -> Found:
    """What another process sees free before and after the trainer gives its memory back, and that nothing is lost."""
    found, dtype = Found(), place.pick("bfloat16", "float32")
    random_policy(place.work / "policy", place, scale=place.pick(8, 1), layers=place.pick(6, 2))
    given = sequences(LENGTHS)
    with learner(place.work / "policy", dtype) as built:
        built.train_step(batch(given), likelihood)
        before = _state(built, given)
        held, free = _held(place), _free_elsewhere(place)
        built.offload()
        if place.cuda:
            given_back, left = _free_elsewhere(place) - free, _held(place)
            found.add("trainer held", held / 2**30, "GiB")
            found.add("another process has more", given_back / 2**30, "GiB")
            found.add("trainer still holds", left / 2**30, "GiB")
            found.expect(given_back > 0.9 * (held - left), "another process does not see what the trainer gave back")
            found.expect(left < 0.1 * held, f"the trainer still holds {left / 2**30:.2f} of {held / 2**30:.2f} GiB")
        else:
            found.message = "on a CPU nothing is freed: only that nothing is lost"
        built.onload()
        found.expect(_state(built, given) == before, "weights or log-probabilities came back with other bits")
        built.train_step(batch(given), likelihood)
    return found


def _held(place: Place) -> int:
    return torch.cuda.memory_allocated() if place.cuda else 0


def _free_elsewhere(place: Place) -> int:
    """Bytes of the first device that a process of its own finds free, its context taken."""
    if not place.cuda:
        return 0
    torch.cuda.synchronize()
    command = [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info(0)[0])"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
