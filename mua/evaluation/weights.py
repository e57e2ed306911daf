"""The policy that is judged, as a folder that engines can serve."""

from __future__ import annotations

from mua.config.schema import ExperimentConfig
from mua.evaluation.identity import digest

MANIFEST = "manifest.json"
"""By which a checkpoint is told from a model folder (:mod:`mua.megatron.checkpoint_manifest`)."""


def servable(config: ExperimentConfig) -> ExperimentConfig:
    """``config`` whose ``model.path``, where it is a checkpoint, is that checkpoint's weights as Hugging Face has them.

    They are written once, under ``<output>/policies``, by the digest of what the checkpoint holds. A link to a
    checkpoint (``checkpoints/best``) is followed. Raises :class:`mua.errors.ModelError` for a damaged one.
    """
    if config.evaluation.policy.kind == "endpoint":
        return config
    checkpoint = config.model.path.resolve()
    if not (checkpoint / MANIFEST).is_file():
        return config
    from megatron_bridge.hf_folder import DEFAULT_SHARD_BYTES  # these load Megatron-Core
    from mua.megatron import checkpoint_manifest, offline
    from mua.trainer.conversion import megatron_to_hf

    out = config.output / "policies" / f"{checkpoint.name}-{digest(checkpoint_manifest.read_manifest(checkpoint))}"
    if not offline.is_converted(checkpoint, out):
        out.parent.mkdir(parents=True, exist_ok=True)
        megatron_to_hf(checkpoint, out, None, None, DEFAULT_SHARD_BYTES)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": out})})
