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
        "cross_entropy": "imitation of what filters and minimal_advantage let through; advantages are not read",
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
        "signed": "each turn by its own reward, negative where it was penalized",
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
    "filters": {
        "range": "groups whose rewards hardly differ are dropped (DAPO)",
        "balance": "successes and failures of a group in balance (AgentRL)",
        "minimum_turns": "successes that came too soon are dropped as guesses (AgentRL)",
        "overlong": "failures that only ran into a limit are dropped",
    },
    "shaping": {
        "turn_efficiency": "score by rank of turns: short successes and long failures earn more (AgentRL)",
        "overlong_tokens": "sampled tokens at which a trajectory has lost 1 of its score (DAPO)",
        "overlong_buffer": "tokens before that over which the penalty rises",
        "malformed_turn": "taken from the reward of an empty turn, or one with an unacceptable tool call",
        "repeated_turn": "taken from the reward of a turn that makes a call or says a text again",
        "cap_faulty_turns": "no malformed or repeated turn is encouraged: its advantage is at most 0 (AgentRL)",
    },
    "refill": {
        "max_extra_groups": "unusable groups that others replace in one step (DAPO's dynamic sampling)",
        "oversample": "more groups start than a step trains on; it takes the first usable ones that finish",
        "carry_versions": "versions that an oversampled group may be overtaken by before it starts again",
        "max_cancellations": "how often oversampling may put a group off before a step waits for it",
    },
    "curriculum.kind": {
        "off": "epochs, each a fresh permutation",
        "success_rate": "tasks solved half of the time come most often, by running success rate",
        "failing_kinds": "kinds of task that fail most come most often, by running success rate",
    },
}
"""Key of the section ``algorithm`` -> value, or key of a section in it -> one line."""
