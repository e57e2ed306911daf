"""Supervised fine-tuning on recorded conversations, through the same token buffer, packing and backend as RL.

What is read, and how, is in :mod:`mua.trainer.conversations`.
"""

from __future__ import annotations

import math

import numpy as np

from mua.algorithms.batch import sft_batch
from mua.algorithms.losses import CrossEntropyLoss
from mua.config.schema import ExperimentConfig
from mua.observe.timeline import trainer_metrics
from mua.tokens.chat_family import load_family_of
from mua.trainer.control_tokens import control_token_metrics, report_untrained
from mua.trainer.conversations import Conversations, batch_members, load_sets
from mua.trainer.learner import Learner
from mua.trainer.preempt import Preemption
from mua.trainer.ranks import init_distributed, is_rank0
from mua.trainer.run_folder import Run
from mua.utils.errors import Preempted


def fine_tune(config: ExperimentConfig, preemption: Preemption = Preemption()) -> None:
    """Fine-tune the policy of ``config`` and leave its Hugging Face folder in ``<output>/hf``.

    Raises :class:`Preempted` on every rank when ``preemption`` is requested before the last step is done; the same
    call continues the run.
    """
    assert config.sft is not None, "the command line checks that the section is there"
    init_distributed(config)
    # Alone, what is wrong with the data is found before the model is built. Other ranks would wait for it in silence.
    sets = load_sets(config, load_family_of(config.model)) if config.megatron.world_size == 1 else None
    learner = Learner(config, total_steps=config.trainer.steps)
    if not is_rank0():
        learner.worker_loop()
        preemption.check()
        return
    family = load_family_of(config.model)
    report_untrained(config.model, family)
    conversations, held_out = sets or load_sets(config, family)
    batch_size = config.sft.batch_size
    with learner, Run(config, learner) as run:

        def validate() -> dict[str, float]:
            with run.timeline.phase("validate"):
                return validation_metrics(learner, held_out, batch_size, preemption)

        with run.saved_on_leaving():
            if run.unlogged is not None:
                run.log(run.step - 1, run.unlogged | validate())
            tokens = [sum(len(segment) for segment in segments) for segments in conversations]
            by_length, shown = sorted(range(len(tokens)), key=tokens.__getitem__), dict[str, float]()
            with run.progress.stage("fine-tune", total=config.trainer.steps - run.step) as progress:
                for step in range(run.step, config.trainer.steps):
                    preemption.check()
                    short = step < config.sft.short_first_steps
                    pool = by_length[: max(1, len(by_length) // 4)] if short else by_length
                    chosen = batch_members(pool, batch_size, step, config.seed)
                    with run.timeline.phase("train"):
                        batch = sft_batch([segment for i in chosen for segment in conversations[i]])
                        metrics = learner.train_step(batch, CrossEntropyLoss(), keep=True)
                    kept = zip(batch, learner.kept_logprobs or (), strict=True)
                    metrics |= control_token_metrics("train", family, ((s.ids, own, s.trained) for s, own in kept))
                    if run.due(config.sft.validate_every, step):
                        try:
                            metrics |= validate()
                        except Preempted:
                            run.save(step, unlogged=metrics)
                            raise
                    run.log(step, metrics | trainer_metrics(run.timeline.take(), ()))
                    if run.due(config.trainer.save_every, step):
                        run.save(step)
                    shown |= {name: metrics[name] for name in ("train/loss", "eval/loss") if name in metrics}
                    progress.advance(note=", ".join(f"{name} {value:.3f}" for name, value in shown.items()))
        run.export(config.trainer.steps)


def validation_metrics(
    learner: Learner, held_out: Conversations, batch_size: int, preemption: Preemption | None = None
) -> dict[str, float]:
    """Mean cross-entropy in nats per trained token over all of ``held_out``, its exponential, and the tokens.

    A mean over tokens, not over batches: it does not depend on ``batch_size``, which only bounds what is in memory,
    nor on how sequences are packed. No gradient is computed. Nothing where nothing is held out.
    """
    nats, tokens = 0.0, 0
    for start in range(0, len(held_out), batch_size):
        if preemption is not None:
            preemption.check()
        part = held_out[start : start + batch_size]
        sequences = sft_batch([segment for segments in part for segment in segments]).sequences
        for sequence, values in zip(sequences, learner.log_probabilities(sequences, 1.0), strict=True):
            nats -= float(values[sequence.trained].sum(dtype=np.float64))
            tokens += int(sequence.trained.sum())
    if not tokens:
        return {}
    loss = nats / tokens
    perplexity = math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else math.inf
    return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/tokens": float(tokens)}
