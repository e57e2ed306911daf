"""What can be chosen under ``algorithm`` in a configuration, a line each: ``mua algorithms``."""

from __future__ import annotations

LISTING: dict[str, dict[str, str]] = {
    "loss": {
        "grpo": "PPO's clipped ratio, asymmetric bounds, optional dual clip (GRPO, DAPO)",
        "gspo": "the same on the ratio of the whole sequence, gradients token by token (GSPO)",
        "cispo": "clipped ratio as a weight: no token loses its gradient (MiniMax-M1)",
        "minirl": "ratio as a weight, tokens out of bounds masked (MiniRL; with old_logprobs engine AgentRL's variant)",
        "sapo": "a soft gate in the place of the clip (SAPO)",
        "reinforce": "no ratio, no bound: for batches that get one step",
    },
    "advantage": {
        "grpo": "above the group's mean, divided by its standard deviation unless divide_by_std is off (Dr. GRPO)",
        "rloo": "above the mean of the other members (RLOO)",
        "reinforce_plus_plus": "above the group's mean, whitened over all tokens of the batch (REINFORCE++)",
        "pass_at_k": "by the reward of a random k of the group, in closed form",
        "gae": "each token above the value that a critic gave its context (PPO, GAE)",
        "none": "the score itself (REINFORCE)",
    },
    "score": {
        "sum": "the turn rewards added up",
        "terminal": "the last turn's reward",
        "mean": "the turn rewards' mean (what UserRL's code calls Sum)",
        "discounted": "the turn rewards discounted by turn (UserRL's R2G score)",
    },
    "credit": {
        "equal": "every token of a trajectory alike",
        "reward_to_go": "each turn by the discounted rewards from it on (UserRL's R2G)",
        "exponential": "each turn by 0.5 to 1, saturating with its reward (UserRL's EM)",
        "signed": "each turn by its own reward, negative where it was penalised",
    },
    "correction": {
        "none": "the engine's mismatch is only reported",
        "truncate": "importance weight of trainer over engine, truncated (TIS); by token, sequence or its mean",
        "mask": "importance weight inside a band, 0 outside (ICEPOP by token, masked importance sampling by sequence)",
        "band": "tokens out of a band that narrows with their age leave the batch, denominators included (AgentRL)",
    },
    "aggregation": {
        "token_mean": "every trained token of the batch alike",
        "sequence_mean": "every trajectory alike",
        "sequence_sum": "tokens of a trajectory added up, mean over trajectories",
        "constant": "sequence_sum divided by a constant (Dr. GRPO)",
    },
    "kl_estimator": {
        "k1": "log-ratio: unbiased; belongs into the reward",
        "k2": "half its square: the gradient of the reverse KL in expectation",
        "k3": "exp(-x) - 1 + x: unbiased and never negative",
    },
}
"""Key of the section ``algorithm`` -> value -> one line."""
