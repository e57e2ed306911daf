"""Checks that the parts agree with each other."""

from __future__ import annotations

from mua.config.schema import ExperimentConfig
from mua.errors import EngineError
from mua.rollout.service import RolloutService
from mua.trainer.launch import ensure_processes, leads
from mua.trainer.learner import Learner


def check_sync(config: ExperimentConfig) -> None:
    """Sync the trainer's weights into the engines and prove tensor by tensor that they arrived.

    Raises :class:`EngineError` naming the tensors that differ.
    """
    ensure_processes(config.megatron)
    learner = Learner(config, total_steps=config.trainer.steps)
    if not leads():
        learner.follow()
        return
    with learner, RolloutService(config, hosts=learner.engine_hosts()) as rollouts:
        synced = rollouts.update_weights(learner.weights(), version=1)
        different = rollouts.verify_weights(learner.weights())
    if different:
        shown = ", ".join(different[:8]) + (f" and {len(different) - 8} more" if len(different) > 8 else "")
        raise EngineError(
            f"the engine's weights differ from the trainer's in {len(different)} tensors: {shown}", passing=False
        )
    print(
        f"sync: {synced.tensors} tensors, {synced.bytes} bytes in {synced.buckets} buckets and {synced.seconds:.2f} s; "
        "every tensor in every engine equals the trainer's"
    )
