"""Every cause of a bad run: what it means, what shows it, from which value on and why, and what to try.

A cause looks at :class:`Evidence` and gives a :class:`Symptom` or nothing. :data:`CAUSES` is in
causal order: what stands earlier brings about what stands later, so that of two that begin together the earlier one is
named. docs/diagnosis.md is written from it (``python -m tools.diagnosis_page``).

Thresholds are of two sorts: what numerics, statistics or a configuration rule out (a trained token that nobody sampled,
an evaluation task that was trained on, a gap of float32 numbers), and what is usual in published runs, with a wide
margin; each has its reason beside it. What a weak policy does at first and unlearns is no disease: causes of that sort
must still hold at the end (:func:`still`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from scipy.stats import binom

from mua.observe.diagnosis.evidence import (
    Evidence,
    Floats,
    Mask,
    SeenEpisode,
    beginning,
    dated,
    ending,
    lasting,
    mean,
    smoothed,
)


@dataclass(frozen=True, slots=True)
class Symptom:
    """What a cause found."""

    step: int
    """At which it began."""
    text: str
    """The evidence, in a sentence with numbers."""
    numbers: dict[str, float] = field(default_factory=dict)
    trajectory: str | None = None
    """Id of one to look at."""
    remedy: str | None = None
    """What to try, where it is not what the cause says in general."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One way in which a run goes wrong."""

    name: str
    title: str
    meaning: str
    evidence: str
    """What is looked at, from which value on, and why there."""
    remedy: str
    find: Callable[[Evidence], Symptom | None]
    from_metrics: bool = True
    """Whether metrics alone can show it, so that training watches for it."""


# ---- thresholds, each with its reason

GAP_FLOAT32, KL_FLOAT32 = 0.02, 1e-3
"""Mean distance of log-probabilities, and k3 estimate of KL, between engine and trainer in float32: a thousand times
what the order of float32 sums explains (about 1e-5)."""
GAP_LOW, KL_LOW = 0.1, 0.02
"""In bfloat16 or lower precision: published runs have 0.01 to 0.04 and 1e-4 to 5e-3; those that collapsed from it had
passed these."""
STALE_KL = 0.05
"""k3 estimate of KL between the version that sampled and the one that is trained: several times the 0.01 to 0.02 at
which PPO's implementations end their passes over a batch."""
STALE_LAG = 4.0
"""Versions, where nothing in the loss corrects for age; published asynchronous runs without correction stay at 1 to
2."""
STALE_CUT = 0.3
"""Share of tokens that the correction removes or cuts: then the batch is no longer what was sampled."""
UPDATE_KL, UPDATE_KL_ONCE = 0.1, 1.0
"""k3 estimate of KL over the updates of one batch: five times the usual bound for stopping early."""
CLIPPED = 0.35
"""Share of clipped tokens; PPO and GRPO usually have 0 to 0.2."""
CLIPPED_SEQUENCES = 0.6
"""The same of gspo, which clips whole sequences, usually 0.1 to 0.3."""
GRADIENT_RISE = 10.0
"""Times the median gradient norm of the run's beginning."""
REFERENCE_KL = 1.0
"""Nats of each token between policy and reference; usual are 0.01 to 0.3."""
LEAP = 0.5
"""Share by which mean entropy changes from one step to the next; between two batches of one policy it differs by some
hundredths, and learning moves it by as much."""
SWINGS, SWING = 5, 0.25
"""Of so many steps in a row half change entropy by this share, up and down: a steady fall is another matter."""
LEAP_NATS = 0.3
"""And so many nats at least: near 0 shares mean little."""
USER_FAULTS, USER_RETRIES = 0.1, 0.25
"""Share of episodes that users or judges ended, and faults of users in each episode, those that were retried too."""
LEAKS = 0.05
"""Share of episodes in which the user gives something away."""
LEAK_WORDS = 12
"""So many words in a row of the persona are a quotation, values that the user is there to tell apart: as many as
``user.leak_words`` is by default. A wish is told in words of the instruction: eight of them in a row are usual."""
TOOL_ERRORS, TOOL_ERRORS_RISE = 0.4, 0.3
"""Share of tool calls that fail, or by how much it has risen; learning policies start with 0.1 to 0.3 and lose it."""
LONGER = 2.0
"""Times the sampled tokens of the beginning."""
CUT, OUT_OF_TURNS = 0.3, 0.6
"""Share of episodes that end because a turn or the context was too long, and share that end for want of turns."""
REFUSING, REFUSING_RISE = 0.5, 0.3
"""Share of episodes in which the policy declines, and by how much it has risen: no domain's right refusals are as
many."""
COLLAPSED, COLLAPSED_NATS = 0.2, 0.3
"""Entropy in shares of the beginning's, and in nats: both."""
SOLVED, GAIN = 0.9, 0.1
"""Success from which there is nothing left to explore, and a gain of success that pays for longer texts or less
entropy."""
ALIKE, ALIKE_PAIRS = 0.75, 0.5
"""Share of the shorter text's word triples that the other has too, which makes two answers one, and share of pairs of
answers to different tasks that are."""
VARIED, SAME_SAID = 0.6, 0.25
"""Share of a group's members that differ in what they say: so many at first, so few that nothing is explored."""
AGREE = 0.95
"""Share of groups without a difference of reward, with 99 % certainty; hard tasks alone, solved once in twenty, have
0.66 in groups of 8, and 0.9 where they differ much in difficulty."""
APART = 5.0
"""Standard errors that a kind's fall and another's rise have together: among 30 kinds that vary by chance alone, 4.4
are usual."""
UNLIKELY = 0.001
"""Probability of so many groups that agree, were all as before; small, because every step is looked at."""
STILL_RATE = 1e-6
"""Sum of the learning rates of all steps: Adam moves a weight by about the rate in a step, and weights are some "
"hundredths."""
STILL_NATS = 1e-3
"""Largest change of a log-probability over five versions or more; what float32 and bfloat16 do by themselves is 1e-5 to
0.01, and a policy that learns anything changes some token by more."""
INFORMED = 100
"""Groups with a difference of reward after which a policy that learns has gained something."""


# ---- what several causes ask


def still(values: Floats, least: float) -> bool:
    """Whether a share is at least ``least`` at the end and has not fallen to less than 0.8 of its beginning."""
    end = mean(ending(values))
    return end >= least and end >= 0.8 * mean(beginning(values))


def began(seen: Evidence, place: int) -> int:
    """The step in this place of the series."""
    return int(seen.steps[place])


def above(values: Floats, bound: float | Floats) -> Mask:
    """Where a value is there and at least ``bound``."""
    with np.errstate(invalid="ignore"):
        return np.asarray(values >= bound)


def example(seen: Evidence, step: int, fits: Callable[[SeenEpisode], bool] = lambda _: True) -> str | None:
    """The first episode from ``step`` on that ``fits``."""
    return next((e.id for e in seen.episodes or () if e.step >= step and fits(e)), None)


def shares(seen: Evidence, counts: Callable[[SeenEpisode], bool], scored: bool = True) -> Floats:
    """Of each step the share of (scored) episodes that count; NaN without any."""
    if not seen.episodes:
        return np.full(len(seen.steps), np.nan)
    by_step = seen.by_step()
    found = []
    for step in seen.steps.tolist():
        members = [e for e in by_step.get(step, ()) if e.scored or not scored]
        found.append(sum(map(counts, members)) / len(members) if members else math.nan)
    return np.array(found)


def gain(seen: Evidence, place: int) -> float:
    """By how much success at the end is above that before ``place``, or at the beginning; 0 where nobody knows."""
    success = seen.of("success")
    before = success[max(0, place - 5) : place]
    if np.isfinite(before).sum() < 2:
        before = beginning(success)
    found = mean(ending(success)) - mean(before)
    return found if math.isfinite(found) else 0.0


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# ---- the causes


def wrong_tokens(seen: Evidence) -> Symptom | None:
    for sample in seen.tokens or ():
        if sample.wrong:
            return Symptom(
                sample.step,
                f"{sample.wrong} of {sample.trained} trained tokens of a segment were not sampled by the policy (most "
                f"are {sample.wrong_of})",
                {"wrong_tokens": sample.wrong, "trained_tokens": sample.trained},
                sample.trajectory,
            )
    sampled = seen.of("sampled_tokens") * seen.of("episodes") * (1 - np.nan_to_num(seen.of("unscored")))
    trained = seen.of("trained_tokens") * float(seen.setting("algorithm.minibatches", 1))
    place = lasting(above(trained, 1.02 * sampled + 1), 2)
    if place is None:
        return None
    return Symptom(
        began(seen, place),
        f"{trained[place]:.0f} tokens were trained in a step whose episodes hold {sampled[place]:.0f} sampled ones",
        {"trained_tokens": float(trained[place]), "sampled_tokens": float(sampled[place])},
    )


def evaluation_meets_training(seen: Evidence) -> Symptom | None:
    if not seen.met:
        return None
    name, (step, tasks) = min(seen.met.items(), key=lambda item: item[1][0])
    shown = ", ".join(tasks[:3])
    return Symptom(step, f"{len(tasks)} tasks of {name} are tasks of training: {shown}", {"tasks": len(tasks)})


def leaking_user(seen: Evidence) -> Symptom | None:
    if seen.episodes is not None:
        members = [e for e in seen.episodes if e.scored]
        told = [e for e in members if e.leak]
        if told:
            first = told[0]
            since = [e for e in members if e.step >= first.step]
            share = len(told) / len(since)
            if len(told) >= 2 and share >= LEAKS:
                return Symptom(
                    first.step,
                    f"in {percent(share)} of the episodes since then the user gives away what it should not: "
                    f"{first.leak}",
                    {"share": share, "episodes": len(told)},
                    first.id,
                )
    leaks = seen.of("leaks")
    place = lasting(above(smoothed(leaks / np.maximum(1.0, np.nan_to_num(seen.of("episodes"), nan=1.0)), 5), LEAKS), 2)
    if place is None or leaks.sum() < 2:
        return None
    return Symptom(
        began(seen, place),
        f"{leaks.sum():.0f} utterances of users quoted their instructions",
        {"utterances": float(leaks.sum())},
    )


_WHO = re.compile(r"\b(?:user|judge)(?:_seconds)?\b")


def failing_user(seen: Evidence) -> Symptom | None:
    faults = seen.of("user_faults") / np.maximum(1.0, np.nan_to_num(seen.of("episodes"), nan=1.0))
    if (
        np.nansum(seen.of("ended_user")) + np.nansum(seen.of("ended_judge")) > 0
    ):  # then retries were for the same reason
        faults = np.fmax(faults, seen.of("attempts") - 1)
    known = dict(
        zip(
            seen.steps.tolist(),
            zip(seen.of("ended_user") + np.nan_to_num(seen.of("ended_judge")), faults, strict=True),
            strict=True,
        )
    )
    for step, members in seen.by_step().items():  # of a step that stopped the run there are no metrics
        if step not in known:
            known[step] = sum(e.outcome in ("user_error", "judge_error") for e in members) / len(members), math.nan
    late = shares(seen, lambda e: e.outcome == "timeout" and bool(_WHO.search(e.error or "")), scored=False)
    for step, more in zip(seen.steps.tolist(), np.nan_to_num(late), strict=True):
        known[step] = known[step][0] + more, known[step][1]
    steps = sorted(known)
    ended, retries = (np.array([known[step][which] for step in steps]) for which in (0, 1))
    for values, bound in ((ended, USER_FAULTS), (retries, USER_RETRIES)):
        over = above(smoothed(values, 5), bound)
        place = lasting(over, 2)
        if place is None and len(values) and np.isfinite(values[-1]) and values[-1] >= 0.5:
            place = len(values) - 1  # a step that stopped the run
        if place is None:
            continue
        while place > 0 and values[place - 1] > 0:
            place -= 1
        bad = [e for e in seen.episodes or () if e.step >= steps[place] and not e.scored]
        kind = Counter(e.outcome for e in bad).most_common(1)[0][0] if bad else "user_error or judge_error"
        error = next((f": {e.error}" for e in bad if e.error), "")
        what = "episodes ended" if bound == USER_FAULTS else "episodes had to be tried again"
        share = mean(values[place:])
        return Symptom(
            steps[place], f"{percent(share)} of the {what} as {kind}{error[:200]}", {"share": share},
            bad[0].id if bad else None,
        )  # fmt: skip
    return None


def tool_errors(seen: Evidence) -> Symptom | None:
    crashed = smoothed(seen.of("ended_environment"), 5)
    if (place := lasting(above(crashed, USER_FAULTS), 2)) is not None:
        step = began(seen, place)
        return Symptom(
            step, f"{percent(mean(seen.of('ended_environment')[place:]))} of the episodes ended as environment_error",
            {"share": mean(seen.of("ended_environment")[place:])}, example(seen, step, lambda e: not e.scored),
        )  # fmt: skip
    rate, calls = _error_rate(seen)
    recent = np.where(smoothed(calls) >= 0.25, smoothed(rate), np.nan)
    base = mean(beginning(rate))
    bound = (
        TOOL_ERRORS if not base <= TOOL_ERRORS - TOOL_ERRORS_RISE else max(base + TOOL_ERRORS_RISE, TOOL_ERRORS_RISE)
    )
    place = lasting(above(recent, bound))
    if place is None or not still(rate, bound) or len(rate) < 5:
        return None
    place = dated(rate, place, base if base < bound else 0.0, mean(rate[place:]))
    step = began(seen, place)
    names = Counter(e.error for e in seen.episodes or () if e.step >= step and e.call_errors and e.error)
    told = f", most often {names.most_common(1)[0][0][:120]!r}" if names else ""
    return Symptom(
        step,
        f"{percent(mean(rate[place:]))} of tool calls fail from then on ({percent(base)} at the beginning){told}",
        {"share": mean(rate[place:]), "before": base},
        example(seen, step, lambda e: e.call_errors > 0),
    )


def _error_rate(seen: Evidence) -> tuple[Floats, Floats]:
    """Failed calls by calls, and calls in each episode, step by step."""
    if seen.episodes is None:
        calls = seen.of("tool_calls")
        return np.divide(seen.of("tool_errors"), calls, out=np.full(len(calls), np.nan), where=calls > 0), calls
    by_step = seen.by_step()
    rate, calls = np.full(len(seen.steps), np.nan), np.full(len(seen.steps), np.nan)
    for place, step in enumerate(seen.steps.tolist()):
        members = by_step.get(step, [])
        made = sum(e.calls for e in members)
        if members:
            calls[place] = made / len(members)
        if made:
            rate[place] = sum(e.call_errors for e in members) / made
    return rate, calls


def engine_mismatch(seen: Evidence) -> Symptom | None:
    exact = seen.setting("model.dtype") == "float32" and seen.setting("engine.dtype") in (None, "float32")
    gap_bound, kl_bound = (GAP_FLOAT32, KL_FLOAT32) if exact else (GAP_LOW, KL_LOW)
    gap, kl = _fresh(seen)
    place = lasting(above(gap, gap_bound) | above(kl, kl_bound), 2)
    if place is None:
        return None
    step = began(seen, place)
    widest = max((s for s in seen.tokens or () if s.step >= step and s.fresh_gap == s.fresh_gap),
                 key=lambda s: s.fresh_gap, default=None)  # fmt: skip
    return Symptom(
        step,
        "for tokens of the version that is trained, log-probabilities of engine and trainer are "
        f"{mean(gap[place:]):.3g} apart on average (k3 {mean(kl[place:]):.3g}), and numerics explain {gap_bound:g}",
        {"difference": mean(gap[place:]), "kl_k3": mean(kl[place:])},
        widest.trajectory if widest else example(seen, step),
    )


def _fresh(seen: Evidence) -> tuple[Floats, Floats]:
    """Gap and k3 of tokens of the newest version: measured apart, or in steps without older ones, or from the store."""
    gap, kl = seen.of("fresh_gap").copy(), seen.of("fresh_kl").copy()
    updates = seen.setting("algorithm.epochs", 1) * seen.setting("algorithm.minibatches", 1)
    moving = seen.setting("algorithm.old_logprobs") == "engine" and updates > 1  # then the policy's own drift is in it
    fresh = ~(np.nan_to_num(seen.of("lag_max")) > 0)
    if not moving:
        gap = np.where(np.isfinite(gap) | ~fresh, gap, seen.of("gap"))
        kl = np.where(np.isfinite(kl) | ~fresh, kl, seen.of("gap_kl"))
    measured = _of_tokens(seen, "fresh_gap"), _of_tokens(seen, "fresh_kl")
    return np.where(np.isfinite(gap), gap, measured[0]), np.where(np.isfinite(kl), kl, measured[1])


def _of_tokens(seen: Evidence, name: str) -> Floats:
    if not seen.tokens:
        return np.full(len(seen.steps), np.nan)
    found: defaultdict[int, list[float]] = defaultdict(list)
    for sample in seen.tokens:
        value = getattr(sample, name)
        if math.isfinite(value):
            found[sample.step].append(value)
    return np.array([mean(np.array(found.get(step, [math.nan]))) for step in seen.steps.tolist()])


def stale_data(seen: Evidence) -> Symptom | None:
    lag = seen.of("lag")
    if not (np.nan_to_num(lag) > 0).any():
        return None
    kl = np.where(np.isfinite(seen.of("stale_kl")), seen.of("stale_kl"), _of_tokens(seen, "stale_kl"))
    unknown = ~np.isfinite(kl) & (np.nan_to_num(lag) >= 0.5) & ~above(_fresh(seen)[1], KL_LOW)
    kl = np.where(unknown, seen.of("gap_kl"), kl)
    cut = np.fmax(seen.of("correction_removed"), seen.of("correction_cut"))
    bound = seen.setting("trainer.max_staleness", 0) + seen.setting("algorithm.refill.carry_versions", 0)
    blind = bool(seen.setting("algorithm.allow_off_policy", False)) or (
        seen.setting("algorithm.correction", "none") == "none"
        and (seen.setting("algorithm.old_logprobs") == "recompute" or seen.setting("algorithm.loss") == "reinforce")
    )
    holds = above(smoothed(kl), STALE_KL) | (above(lag, 0.5) & above(smoothed(cut), STALE_CUT))
    if blind:
        holds |= above(smoothed(lag), STALE_LAG)
    if seen.config:
        holds |= above(seen.of("lag_max"), bound + 1) & above(lag, max(1.0, bound))
    place = lasting(holds, 2)
    if place is None:
        return None
    step = began(seen, place)
    drift = f", whose log-probabilities have moved (k3 {mean(kl[place:]):.3g})" if np.isfinite(kl[place:]).any() else ""
    oldest = max((s for s in seen.tokens or () if s.step >= step), key=lambda s: s.lag, default=None)
    return Symptom(
        step,
        f"tokens are {mean(lag[place:]):.1f} versions old on average, {np.nanmax(seen.of('lag_max')[place:]):.0f} at "
        f"most{drift}" + (", and nothing in the loss knows of it" if blind else ""),
        {"version_lag": mean(lag[place:]), "kl_k3": mean(kl[place:])},
        oldest.trajectory if oldest else example(seen, step),
    )


def _unsteady(entropy: Floats) -> Iterator[tuple[int, str]]:
    """Where entropy leaps from one step to the next, and where it swings up and down."""
    if len(entropy) <= 2:
        return
    # Medians of three on both sides: a single odd batch, whose texts are others, is no leap of the policy.
    medians = np.median(sliding_window_view(np.pad(entropy, (2, 1), "edge"), 3), axis=1)
    before, after = medians[:-3], medians[3:]
    moved, swings = np.abs(after - before), np.abs(np.diff(entropy))
    with np.errstate(divide="ignore", invalid="ignore"):  # an entropy of 0
        moved_shares = moved / np.maximum(before, after)
        swing_shares = swings / np.maximum(entropy[:-1], entropy[1:])
    leaps = np.flatnonzero(
        above(moved_shares, LEAP)
        & above(moved, LEAP_NATS)
        & above(swing_shares[:-1], LEAP)
        & above(swings[:-1], LEAP_NATS)
    )
    if len(leaps):
        at = int(leaps[0])
        yield at, f"entropy goes from {before[at]:.3g} to {after[at]:.3g} in a step"
    if len(swings) < SWINGS:
        return
    usual_share, usual_swing = (
        np.median(sliding_window_view(values, SWINGS), axis=1) for values in (swing_shares, swings)
    )
    signs = np.sign(np.diff(entropy))
    turns = sliding_window_view(signs[1:] * signs[:-1] < 0, SWINGS - 1).sum(axis=1)
    wild = np.flatnonzero(above(usual_share, SWING) & above(usual_swing, LEAP_NATS) & (turns >= 2))
    if len(wild):
        begins = int(wild[0]) + int(np.flatnonzero(above(swing_shares[wild[0] :], SWING))[0])
        yield begins, f"entropy swings by {percent(SWING)} and more from step to step"


def large_steps(seen: Evidence) -> Symptom | None:
    loss = seen.setting("algorithm.loss", "grpo")
    clipped = seen.of("clipped_low") + seen.of("clipped_high")
    norm, rate, entropy = seen.of("grad_norm"), seen.of("learning_rate"), seen.of("entropy")
    found: list[tuple[int, str, dict[str, float]]] = []

    def note(place: int | None, text: Callable[[int], str], **numbers: Floats) -> None:
        if place is not None:
            found.append((place, text(place), {name: float(values[place]) for name, values in numbers.items()}))

    kl = seen.of("update_kl")
    once = np.flatnonzero(above(kl, UPDATE_KL_ONCE))
    note(int(once[0]) if len(once) else lasting(above(kl, UPDATE_KL), 2),
         lambda at: f"the updates of a batch move the policy by a KL of {kl[at]:.3g}", kl_k3=kl)  # fmt: skip
    if loss != "sapo":  # whose bounds are temperatures
        note(lasting(above(clipped, CLIPPED_SEQUENCES if loss == "gspo" else CLIPPED)),
             lambda at: f"{percent(clipped[at])} of the tokens are clipped", clip_fraction=clipped)  # fmt: skip
    skipped = seen.of("skipped")
    note(lasting(above(skipped, 1e-9), 2), lambda at: "the gradient norm is not finite, and updates are left out",
         skipped=skipped)  # fmt: skip
    used = np.where(norm > 0, norm, np.nan)
    usual = float(np.nanmedian(beginning(used))) if np.isfinite(used).any() else math.nan
    bound = max(GRADIENT_RISE * usual, float(seen.setting("optimizer.clip_grad", 1.0)))
    place = lasting(above(used, bound))
    note(place, lambda at: f"the gradient norm is {norm[at]:.3g}, and was {usual:.3g} at the beginning", grad_norm=norm)
    reference = seen.of("reference_kl")
    place = lasting(above(reference, REFERENCE_KL), 2)
    note(
        place, lambda at: f"the policy is {reference[at]:.3g} nats per token from the reference", reference_kl=reference
    )
    for place, text in _unsteady(entropy):
        found.append((place, text, {"entropy": float(entropy[place])}))
    if not found:
        return None
    place, text, numbers = min(found, key=lambda one: one[0])
    if np.isfinite(rate[place]):
        text += f" (learning rate {rate[place]:.3g})"
    return Symptom(began(seen, place), text, numbers, example(seen, began(seen, place)))


def length_explosion(seen: Evidence) -> Symptom | None:
    tokens = seen.of("sampled_tokens")
    first = beginning(tokens)
    # What explodes at once is in the beginning too, but not in the first step.
    base = float(min(first[0], np.median(first))) if len(first) else math.nan
    recent = smoothed(tokens)
    place = lasting(above(recent, max(LONGER * base, base + 20)))
    if place is None or mean(ending(tokens)) < LONGER * base:
        return None
    place = dated(tokens, place, base, 1.6 * base)
    cut = seen.of("ended_length")
    more_cut = mean(ending(cut)) - mean(beginning(cut))
    if gain(seen, place) >= GAIN and not more_cut >= 0.2:
        return None
    step, end = began(seen, place), mean(ending(tokens))
    longest = max((e for e in seen.episodes or () if e.step >= step), key=lambda e: e.sampled_tokens, default=None)
    return Symptom(
        step,
        f"an episode's sampled tokens grew from {base:.0f} to {end:.0f}, and success from "
        f"{mean(beginning(seen.of('success'))):.2f} to {mean(ending(seen.of('success'))):.2f}",
        {"before": base, "after": end},
        longest.id if longest else None,
    )


def truncation(seen: Evidence) -> Symptom | None:
    ended = np.fmax(seen.of("ended_length"), seen.of("cut_by_time"))
    if seen.episodes is not None:
        ended = np.fmax(ended, shares(seen, lambda e: e.outcome == "length" or e.cut_turns > 0))
    for values, bound, what in (
        (ended, CUT, "are cut because a turn or the context is too long"),
        (seen.of("ended_turns"), OUT_OF_TURNS, "end because their turns are used up"),
    ):
        place = lasting(above(smoothed(values), bound))
        if place is None or len(values) < 5 or not still(values, bound):
            continue
        start = mean(beginning(values))
        place = dated(values, place, start if start < bound else 0.0, mean(values[place:]))
        step, share = began(seen, place), mean(values[place:])
        outcome = "length" if bound == CUT else "max_turns"
        keys = "rollout.max_turn_tokens, rollout.max_tokens and model.max_length" if bound == CUT else (
            "rollout.max_turns, or set rollout.final_turn"
        )  # fmt: skip
        return Symptom(
            step, f"{percent(share)} of the episodes {what}", {"share": share},
            example(seen, step, lambda e, o=outcome: e.outcome == o or (o == "length" and e.cut_turns > 0)),  # type: ignore[misc]
            f"raise {keys}; algorithm.filters with kind overlong leaves such failures out",
        )  # fmt: skip
    return None


_DECLINES = re.compile(
    r"\b(?:can(?:'|’)?t|can ?not|unable to|not able to|won(?:'|’)t|will not|(?:is|are|am)n?(?:'|’)?t? ?not (?:possible|"
    r"allowed|permitted|eligible)|refuse|decline)\b|transfer_to_human", re.IGNORECASE,
)  # fmt: skip


def refusing(seen: Evidence) -> Symptom | None:
    scored = [e for e in seen.episodes or () if e.scored]
    found = _declining(
        seen, scored, lambda e: bool(_DECLINES.search(e.told)) or "transfer_to_human" in e.said, "declines"
    )
    if found is None and sum(e.calls > 0 for e in scored) >= 0.1 * len(scored):
        found = _declining(seen, scored, lambda e: not e.calls and bool(e.told), "does nothing but talk")
    return found


def _declining(
    seen: Evidence, scored: list[SeenEpisode], declines: Callable[[SeenEpisode], bool], what: str
) -> Symptom | None:
    """Whether it became common, and is worth more than its contrary: within groups that have both, where there are."""
    values = shares(seen, declines)
    base, end = mean(beginning(values)), mean(ending(values))
    if not end >= max(REFUSING, base + REFUSING_RISE):
        return None
    place = lasting(above(smoothed(values), (base + end) / 2))
    if place is None:
        return None
    place = dated(values, place, base, base + 0.5 * (end - base))
    groups: defaultdict[int, list[SeenEpisode]] = defaultdict(list)
    for e in scored:
        groups[e.ordinal].append(e)
    differences = []
    for members in groups.values():
        those = [e.reward for e in members if declines(e)]
        others = [e.reward for e in members if not declines(e)]
        if those and others:
            differences.append(np.mean(those) - np.mean(others))
    step = began(seen, place)
    paid = [e.reward for e in scored if e.step >= step and declines(e)]
    rest = [e.reward for e in scored if not declines(e)]
    better = float(np.mean(differences)) if len(differences) >= 3 else float(np.mean(paid) - np.mean(rest or [0.0]))
    if better <= 0:
        return None
    return Symptom(
        step,
        f"the policy {what} in {percent(end)} of the episodes at the end ({percent(base)} at the beginning), and that "
        f"is "
        f"worth {better:.2f} more than the contrary",
        {"share": end, "before": base, "worth": better},
        example(seen, step, lambda e: e.scored and declines(e) and e.reward > 0),
    )


def kind_for_kind(seen: Evidence) -> Symptom | None:
    """Success of each kind over windows of steps and as a trend. The unit is the group, whose members share a task."""
    kinds, total = _by_kind(seen), len(seen.steps)
    if len(kinds) < 2 or total < 4:
        return None
    best: tuple[float, str, str, int, tuple[float, ...]] | None = None
    last = max(2, total // 4)
    windows = [(start, last) for start in sorted({0, total // 4, total // 2, max(0, total - 2 * last)})]
    for start, width in [*windows, (0, total // 2), (0, 0)]:
        changes = {}
        for kind, (places, values) in kinds.items():
            found = _step(places, values, total, start, width) if width else _trend(places, values, total)
            if found is not None:
                changes[kind] = found
        if len(changes) < 2:
            continue
        fallen = min(changes, key=lambda kind: changes[kind][2])
        risen = max(changes, key=lambda kind: changes[kind][2])
        (f0, f1, fz), (r0, r1, rz) = changes[fallen], changes[risen]
        apart = fz <= -2.0 and rz >= 2.0 and rz - fz >= APART
        if apart and f0 - f1 >= 0.2 and r1 - r0 >= 0.15 and (best is None or fz < best[0]):
            best = fz, fallen, risen, start, (f0, f1, r0, r1)
    if best is None:
        return None
    _, fallen, risen, start, (f0, f1, r0, r1) = best
    places, values = kinds[fallen]
    rate = np.array([mean(values[places == place]) for place in range(total)])
    falling = np.asarray(smoothed(rate) <= f0 - 0.5 * (f0 - f1))
    falling[: start + 1] = False
    place = lasting(falling, 2) or total - last
    step = began(seen, place)
    return Symptom(
        step,
        f"success in {risen} rose from {r0:.2f} to {r1:.2f} while in {fallen} it fell from {f0:.2f} to {f1:.2f}",
        {"risen_before": r0, "risen_after": r1, "fallen_before": f0, "fallen_after": f1},
        example(seen, step, lambda e: e.scored and not e.success and fallen in (e.kind, e.domain)),
        f"weigh the kinds apart: algorithm.curriculum.kind failing_kinds, a smaller share of {risen} in "
        "environment.mix, algorithm.whiten environment; look at what the reward pays for in both",
    )


Places = npt.NDArray[np.int64]
Change = tuple[float, float, float]
"""Success before and after, and how many standard errors they are apart."""
FEW_GROUPS = 4
"""Of a kind on each side: fewer say nothing."""


def _noise(values: Floats, rest: Floats, freedom: int) -> float:
    """Variance of a group's success: what is seen, and no less than that of four tosses of its mean."""
    level = float(values.mean())
    return max(float(rest @ rest) / max(1, freedom), level * (1 - level) / 4, 1e-3)


def _step(places: Places, values: Floats, total: int, start: int, width: int) -> Change | None:
    """From the ``width`` steps from ``start`` on to the last ones."""
    before = values[(places >= start) & (places < start + width)]
    after = values[places >= total - width]
    if start + 2 * width > total or min(len(before), len(after)) < FEW_GROUPS:
        return None
    rest = np.concatenate([before - before.mean(), after - after.mean()])
    noise = _noise(np.concatenate([before, after]), rest, len(rest) - 2)
    change = float(after.mean() - before.mean())
    return float(before.mean()), float(after.mean()), change / math.sqrt(noise * (1 / len(before) + 1 / len(after)))


def _trend(places: Places, values: Floats, total: int) -> Change | None:
    """Along a straight line through all groups."""
    at = places - places.mean()
    spread = float(at @ at)
    if len(values) < 2 * FEW_GROUPS or spread == 0:
        return None
    level, slope = float(values.mean()), float(at @ values) / spread
    noise = _noise(values, values - level - slope * at, len(values) - 2)
    first, final = (min(1.0, max(0.0, level + slope * (end - places.mean()))) for end in (0.0, total - 1.0))
    return first, final, slope / math.sqrt(noise / spread)


def _by_kind(seen: Evidence) -> dict[str, tuple[Places, Floats]]:
    """By kind and domain, of each group the place of its step and its success; without a store of each step."""
    place_of = {step: place for place, step in enumerate(seen.steps.tolist())}
    groups: defaultdict[tuple[str, int, int], list[bool]] = defaultdict(list)
    several = len({e.domain for e in seen.episodes or ()}) > 1
    for e in seen.episodes or ():
        if e.scored and e.step in place_of:
            for kind in {e.kind, e.domain if several else "-"} - {"-"}:
                groups[kind, place_of[e.step], e.ordinal].append(e.success)
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for (kind, place, _), won in groups.items():
        found[kind].append((place, sum(won) / len(won)))
    if not seen.episodes:
        for name, by_step in seen.domains.items():
            found[name] = [(place, value) for place, value in enumerate(by_step.tolist()) if math.isfinite(value)]
    return {
        kind: (np.array([place for place, _ in pairs]), np.array([value for _, value in pairs]))
        for kind, pairs in found.items()
        if pairs
    }


def variety(seen: Evidence) -> Floats:
    """Of each step the mean share of different texts among the members of a group; NaN without a store."""
    if not seen.episodes:
        return np.full(len(seen.steps), np.nan)
    found = []
    by_step = seen.by_step()
    for step in seen.steps.tolist():
        groups: defaultdict[int, list[str]] = defaultdict(list)
        for e in by_step.get(step, ()):
            if e.scored:
                groups[e.ordinal].append(e.said)
        parts = [(len(set(said)) - 1) / (len(said) - 1) for said in groups.values() if len(said) > 1]
        found.append(float(np.mean(parts)) if parts else math.nan)
    return np.array(found)


def entropy_collapse(seen: Evidence) -> Symptom | None:
    entropy, success = seen.of("entropy"), seen.of("success")
    if mean(ending(success)) >= SOLVED:
        return None
    recent, base = smoothed(entropy), mean(beginning(entropy)[:2])
    alike = variety(seen)
    place = lasting(above(-recent, -COLLAPSED * base) & above(-recent, -COLLAPSED_NATS))
    if place is not None:
        stuck = mean(ending(seen.of("same_rewards"))) >= 0.8 or mean(ending(alike)) <= 0.25
        # From where it began to fall to this half of itself: success that rises meanwhile pays for it.
        higher = np.flatnonzero(above(recent[:place], 2 * recent[place]))
        fell = int(higher[-1]) if len(higher) else 0
        risen = mean(ending(success)) - mean(success[max(0, fell - 4) : fell + 1])
        if risen >= GAIN and not stuck:
            return None
        place = min(place, fell + 1)
        text = f"entropy fell from {base:.3g} to {mean(ending(entropy)):.3g} nats per token"
        numbers = {"before": base, "after": mean(ending(entropy))}
    else:
        varied = mean(beginning(alike))
        place = _narrowed(seen, alike, varied) if varied >= VARIED else None
        if place is None:
            return None
        text = (
            f"the members of a group say the same: {percent(mean(alike[place:]))} of them differ, at the beginning "
            f"{percent(varied)}"
        )
        numbers = {"before": varied, "after": mean(alike[place:])}
    step = began(seen, place)
    end = f", while success is {mean(ending(success)):.2f}" if np.isfinite(success).any() else ""
    return Symptom(step, text + end, numbers, example(seen, step))


def _narrowed(seen: Evidence, alike: Floats, varied: float) -> int | None:
    """Where the members of a group began to say the same: hardly any of them differ, to the end; or groups agree in
    their rewards from there on, and half of the variety is gone, so that tasks are not why they agree."""
    found, agreed = [], _agreement(seen)
    place = lasting(above(-smoothed(alike), -SAME_SAID))
    if place is not None and mean(ending(alike)) <= SAME_SAID:
        found.append(dated(alike, place, varied, mean(ending(alike))))
    if agreed is not None and agreed[0] > 0 and mean(alike[agreed[0] :]) <= varied / 2:
        found.append(agreed[0])
    return min(found, default=None)


_WORD = re.compile(r"[^\W_]+")


def _triples(text: str) -> frozenset[tuple[str, ...]]:
    words = _WORD.findall(text.casefold())
    return frozenset(zip(words, words[1:], words[2:], strict=False)) or frozenset({tuple(words)})


def template_collapse(seen: Evidence) -> Symptom | None:
    if not seen.episodes:
        return None
    by_step = seen.by_step()
    sets = {e.id: _triples(e.said) for e in seen.episodes if e.scored}
    across = np.full(len(seen.steps), np.nan)
    steps = seen.steps.tolist()
    chosen = np.random.default_rng(0)
    for at, step in enumerate(steps):
        # A step of one group has one task: its neighbours before it count too.
        members = [e for e in by_step.get(step, ()) if e.scored]
        for before in reversed(steps[max(0, at - 2) : at]):
            if len({e.task for e in members}) >= 3:
                break
            members += [e for e in by_step.get(before, ()) if e.scored]
        tasks: defaultdict[str, list[SeenEpisode]] = defaultdict(list)
        for e in members:
            tasks[e.task].append(e)
        if len(tasks) < 3:
            continue
        names, same = list(tasks), []
        for _ in range(60):
            a, b = chosen.choice(len(names), 2, replace=False)
            left, right = (tasks[names[i]][int(chosen.integers(len(tasks[names[i]])))] for i in (a, b))
            one, two = sets[left.id], sets[right.id]
            same.append(len(one & two) >= ALIKE * min(len(one), len(two)))
        across[at] = float(np.mean(same))
    place = lasting(above(across, ALIKE_PAIRS))
    end, base = mean(ending(across)), mean(beginning(across))
    if place is None or not end >= ALIKE_PAIRS:
        return None
    if mean(ending(seen.of("success"))) >= SOLVED and base >= 0.2:
        return None  # one answer is right for every task
    step = began(seen, place)
    return Symptom(
        step,
        f"{percent(end)} of the pairs of answers to different tasks are the same ({percent(base)} at the beginning)",
        {"share": end, "before": base},
        example(seen, step, lambda e: e.scored),
    )


def agreeing_groups(seen: Evidence) -> Symptom | None:
    agreed, right = _agreement(seen), mean(ending(seen.of("all_right")))
    if agreed is None:
        return None
    place, share = agreed
    step = began(seen, place)
    what = "all right" if right >= 0.5 else "all wrong" if mean(ending(seen.of("all_wrong"))) >= 0.5 else "all alike"
    easier = {
        "all right": "harder tasks (environment.difficulties, algorithm.curriculum.kind success_rate)",
        "all wrong": "easier tasks first (environment.difficulties), environment.reward partial, or supervised "
        "training before (mua sft)",
    }.get(what, "a reward that tells better from worse (environment.reward partial)")
    return Symptom(
        step,
        f"in {percent(share)} of the groups all members have the same reward ({what}), so that nothing is learned "
        "from them",
        {"share": share},
        example(seen, step, lambda e: e.scored),
        f"{easier}, a larger algorithm.group_size, a higher rollout.temperature, or algorithm.refill",
    )


def _agreement(seen: Evidence) -> tuple[int, float] | None:
    """From which place on groups have no differences in reward, to the end, and what share of them; None where they
    have, need none, or have been learned."""
    advantage = seen.setting("algorithm.advantage", "grpo")
    others_decide = (
        seen.setting("algorithm.distillation") is not None or seen.setting("algorithm.loss") == "cross_entropy"
    )
    if advantage in ("gae", "none") or others_decide or seen.setting("algorithm.group_size", 8) < 2:
        return None
    same, count = seen.of("same_rewards"), np.nan_to_num(seen.of("groups"))
    refills = seen.setting("algorithm.refill.most_extra_groups", 0) + seen.setting("algorithm.refill.oversample", 0)
    if refills:  # groups that agree are replaced; those that were not found are missing
        missing = seen.of("missing_groups")
        count = np.full(len(same), float(seen.setting("algorithm.groups_per_step", 32)))
        same = missing / count
    agree = np.nan_to_num(same) * count
    success = seen.of("success")
    learned = mean(ending(success)) >= 0.8 and mean(ending(success)) - mean(beginning(success)) >= GAIN
    if mean(ending(seen.of("all_right"))) >= 0.5 and learned:
        return None
    place = _agreeing_from(agree, count, 24 if seen.live else 12)
    return None if place is None else (place, mean(same[place:]))


def _agreeing_from(agree: Floats, count: Floats, least: int) -> int | None:
    """The first place from which so many groups agree to the end that chance is no explanation; None: nowhere.

    Of ``least`` groups or more: that all agree from the beginning on; that they do so far more often than before; or
    that a difference is too rare to learn from, whatever was before.
    """
    total, same = np.cumsum(count[::-1])[::-1], np.cumsum(agree[::-1])[::-1]
    for place in range(len(count)):
        n, k = float(total[place]), float(same[place])
        if n < least or len(count) - place < 3:
            return None
        if k / n < 0.95:
            continue
        before, agreed = total[0] - n, same[0] - k
        usual = (agreed + 1) / (before + 2)
        if place == 0 and n - k < 0.5:
            return place
        if before >= 8 and binom.sf(k - 1, n, usual) < UNLIKELY:
            return place
        # Lower end of Wilson's interval.
        z, share = 2.33, k / n
        centre = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        if centre - half >= AGREE:
            return place
    return None


def no_learning(seen: Evidence) -> Symptom | None:
    steps = len(seen.steps)
    if seen.setting("algorithm.shuffle_rewards", False) and steps:
        return Symptom(began(seen, 0), "rewards are dealt at random (algorithm.shuffle_rewards)",
                       remedy="set algorithm.shuffle_rewards to false")  # fmt: skip
    rate, norm, trained = seen.of("learning_rate"), seen.of("grad_norm"), seen.of("trained_tokens")
    if steps >= 3:
        if np.isfinite(rate).sum() >= 3 and np.nansum(rate) < STILL_RATE:
            return Symptom(began(seen, 0), f"the learning rate is {np.nanmax(rate):.3g}: weights hardly move",
                           {"learning_rate": float(np.nanmax(rate))})  # fmt: skip
        if np.isfinite(norm).sum() >= 3 and np.nanmax(norm) == 0:
            return Symptom(began(seen, 0), "every gradient is 0", {"grad_norm": 0.0})
        if np.isfinite(trained).sum() >= 3 and np.nanmax(trained) == 0 and np.isfinite(seen.of("same_rewards")).any():
            return Symptom(began(seen, 0), "no step trained a token", {"trained_tokens": 0.0})
        if seen.moved is not None and seen.moved < STILL_NATS and engine_mismatch(seen) is None:
            return Symptom(
                began(seen, 0),
                "the same tokens after the same text have the same log-probabilities at the beginning and at the end: "
                "the policy that samples does not change",
                {"moved": seen.moved},
            )
    reward = seen.of("reward")
    informed = np.nansum((1 - seen.of("same_rewards")) * seen.of("groups")) if seen.metrics else 0.0
    known = np.isfinite(reward)
    if known.sum() < 20 or informed < INFORMED or seen.live:
        return None
    # A straight line through the rewards: by how much it rises over the run, and how certain that is.
    at, values = np.arange(steps)[known].astype(np.float64), reward[known]
    slope, level = np.polyfit(at, values, 1)
    rest = values - (slope * at + level)
    error = math.sqrt(float(rest @ rest) / (len(at) - 2) / float(((at - at.mean()) ** 2).sum()))
    length = at[-1] - at[0]
    rise, unsure = slope * length, error * length
    highest = max(1.0, float(np.nanmax(reward)))
    room = highest - float(values[: max(2, len(values) // 5)].mean())
    level = abs(float(values.mean()))
    if rise > unsure or rise + 1.64 * unsure > min(0.15 * room, 0.3 * level) or room < 0.1:
        return None
    held_out = [v[np.isfinite(v)] for v in seen.evaluations.values() if np.isfinite(v).sum() >= 2]
    if any(v[-1] - v[0] >= 0.05 for v in held_out):
        return None
    return Symptom(
        began(seen, steps - 1),
        f"after {steps} steps and {informed:.0f} groups with a difference, reward has changed by {rise:+.3f} "
        f"(± {1.64 * unsure:.3f})",
        {"rise": rise, "unsure": 1.64 * unsure},
        example(seen, began(seen, max(0, steps - 3))),
    )


CAUSES = (
    Cause(
        "wrong_tokens", "the mask trains the wrong tokens",
        "The loss reads tokens that the policy did not sample: the user's words, tools' results, the template.",
        "In the store: trained tokens (weight other than 0) whose author is not the policy, or that no version "
        "sampled; "
        "one is enough. Of metrics alone: more trained tokens than were sampled.",
        "a chat family or agent of your own marks tokens wrongly: mua doctor, docs/add-a-family.md; mua show prints "
        "the "
        "mask",
        wrong_tokens,
    ),
    Cause(
        "evaluation_meets_training", "evaluation meets training's tasks",
        "What is measured as held out was trained on, so that its success says nothing about new tasks.",
        "Tasks of an evaluation that are tasks of training, by domain and id, or with the same data under another id; "
        "one is enough.",
        "evaluation.split validation; make the domain's splits disjoint",
        evaluation_meets_training, from_metrics=False,
    ),
    Cause(
        "leaking_user", "the user leaks",
        "The user tells the policy its instructions, the goal or the answer; the policy learns to wait for that.",
        f"Utterances that quote the persona ({LEAK_WORDS} words or more), name one of the policy's tools, or state a "
        f"value of the gold moves that neither the user can know nor anybody said before; in {percent(LEAKS)} of the "
        "episodes. The check of language models as users counts too.",
        "user.check refuse, a lower user.leak_words, another user.prompt or model; of a user of your own, its code",
        leaking_user,
    ),
    Cause(
        "failing_user", "users or judges fail",
        "Episodes end without a verdict, so that steps train on what is left, which is no fair sample.",
        f"{percent(USER_FAULTS)} of the episodes of five steps ended as user_error or judge_error, or {USER_RETRIES:g} "
        "faults of users an episode were retried.",
        "user.llm and judge.llm: base_url, model, request_seconds, concurrency, fallbacks; mua doctor asks them",
        failing_user,
    ),
    Cause(
        "tool_errors", "tool errors",
        "Tools refuse or fail, by themselves or because the policy calls them wrongly and does not unlearn it.",
        f"{percent(TOOL_ERRORS)} of the calls fail and it does not get less, or {100 * TOOL_ERRORS_RISE:.0f} points "
        f"more "
        f"than at the beginning; or {percent(USER_FAULTS)} of the episodes end as environment_error.",
        "mua env play shows the tools; environment.call_seconds, mua env mcp for tool servers; a policy that cannot "
        "write calls needs mua sft first, or algorithm.shaping.malformed_turn",
        tool_errors,
    ),
    Cause(
        "engine_mismatch", "engine and trainer disagree",
        "The engine samples from another distribution than the trainer computes for the same weights, so that every "
        "ratio is wrong: other weights, another dtype, kernel or template.",
        f"Mean difference of log-probabilities of tokens of the newest version: {GAP_FLOAT32:g} in float32 (k3 "
        f"{KL_FLOAT32:g}), {GAP_LOW:g} otherwise (k3 {KL_LOW:g}). float32 sums explain 1e-5, bfloat16 0.01 to 0.04.",
        "mua doctor sync compares all weights; engine.dtype as model.dtype, model.fp32_lm_head, "
        "megatron.routing_replay for "
        "mixtures of experts; algorithm.correction truncate or mask bounds the harm",
        engine_mismatch,
    ),
    Cause(
        "stale_data", "stale data",
        "Steps train on what much older policies sampled.",
        f"Log-probabilities of older tokens have moved (k3 {STALE_KL:g}), or the correction cuts {percent(STALE_CUT)} "
        f"of the "
        f"tokens, or tokens are {STALE_LAG:g} versions old and nothing in the loss corrects for it, or they are older "
        "than the configuration allows.",
        "a lower trainer.max_staleness or algorithm.refill.carry_versions; algorithm.correction truncate or band; a "
        "lower "
        "optimizer.learning_rate",
        stale_data,
    ),
    Cause(
        "large_steps", "too large steps",
        "Updates move the policy further than the data they are made of can tell.",
        f"KL over the updates of a batch {UPDATE_KL:g} (once {UPDATE_KL_ONCE:g}), {percent(CLIPPED)} of the tokens "
        f"clipped (gspo {percent(CLIPPED_SEQUENCES)}), gradient norm {GRADIENT_RISE:g} times the beginning's or not "
        f"finite, {REFERENCE_KL:g} nats from the reference, or entropy that changes by {percent(LEAP)} and "
        f"{LEAP_NATS:g} nats "
        "in one step.",
        "a lower optimizer.learning_rate, optimizer.warmup_steps, optimizer.clip_grad; fewer algorithm.epochs and "
        "algorithm.minibatches; algorithm.kl_coefficient",
        large_steps,
    ),
    Cause(
        "length_explosion", "length explosion",
        "The policy writes more and more without solving more.",
        f"Sampled tokens of an episode are {LONGER:g} times the beginning's, and success has not gained {GAIN:g}, or "
        f"more "
        "episodes are cut.",
        "algorithm.shaping.overlong_tokens and overlong_buffer, algorithm.shaping.turn_efficiency, "
        "algorithm.aggregation "
        "token_mean or constant, a lower rollout.max_turn_tokens",
        length_explosion,
    ),
    Cause(
        "truncation", "truncation",
        "Episodes are cut before the policy can end them, and count as failures.",
        f"{percent(CUT)} of the episodes are cut by length or time, or {percent(OUT_OF_TURNS)} by turns, and it does "
        f"not "
        "get less.",
        "raise rollout.max_turn_tokens, rollout.max_tokens, model.max_length or rollout.max_turns",
        truncation,
    ),
    Cause(
        "refusing", "reward by refusing",
        "The policy declines what it is asked for, because that is paid or because trying is punished.",
        f"It declines, hands over or does nothing in {percent(REFUSING)} of the episodes, {100 * REFUSING_RISE:.0f} "
        f"points more "
        "than at the beginning, and that is worth more than not declining.",
        "a reward that pays for what is done (environment.reward partial pays for inaction: all_or_nothing does not), "
        "more "
        "tasks that are to be granted, algorithm.curriculum.kind failing_kinds",
        refusing, from_metrics=False,
    ),
    Cause(
        "kind_for_kind", "success in one kind bought with another",
        "Mean success hides that one kind of task is unlearned while another is learned.",
        "Success of a kind (or domain) falls by 0.2 and that of another rises by 0.15, both beyond chance.",
        "algorithm.curriculum.kind failing_kinds, shares in environment.mix, algorithm.whiten environment",
        kind_for_kind,
    ),
    Cause(
        "template_collapse", "template collapse",
        "Different prompts get one answer: the policy no longer reads what it is asked.",
        f"{percent(ALIKE_PAIRS)} of the pairs of answers to different tasks share {percent(ALIKE)} of their word "
        f"triples.",
        "a reward that depends on the task; algorithm.filters with kind range, algorithm.kl_coefficient, more "
        "different "
        "tasks in a step (algorithm.groups_per_step)",
        template_collapse, from_metrics=False,
    ),
    Cause(
        "entropy_collapse", "entropy collapse",
        "The policy has become certain before the tasks are solved, and explores no more.",
        f"Entropy is at {percent(COLLAPSED)} of the beginning's and below {COLLAPSED_NATS:g} nats, or the members of "
        f"a group "
        f"say the same; success is below {SOLVED:g} and has not gained {GAIN:g}. Entropy that falls while success "
        f"rises is "
        "learning.",
        "algorithm.clip_high above clip_low (DAPO: 0.28), algorithm.entropy_coefficient, algorithm.kl_coefficient, a "
        "higher rollout.temperature, a lower optimizer.learning_rate",
        entropy_collapse,
    ),
    Cause(
        "agreeing_groups", "groups that agree",
        "All members of a group get the same reward, so that there is no advantage and no gradient.",
        f"All groups from the beginning on, or far more than before, or {percent(AGREE)} with 99 % certainty; to the "
        f"end of the run. A run that has learned its "
        "tasks is not meant.",
        "tasks that are sometimes solved; algorithm.group_size, rollout.temperature, algorithm.refill",
        agreeing_groups,
    ),
    Cause(
        "no_learning", "no learning at all",
        "Steps are made and nothing gets better.",
        "The learning rate or every gradient is 0, or log-probabilities of the same tokens do not change; or, from 20 "
        "steps "
        f"and {INFORMED} groups with a difference on, reward does not rise and could not have risen by much.",
        "optimizer.learning_rate, algorithm.groups_per_step, a reward that can be earned; tasks of other difficulties "
        "(environment.difficulties), mua sft before",
        no_learning,
    ),
)  # fmt: skip
"""In causal order."""
