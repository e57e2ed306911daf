"""Every cause of a bad run: a function that looks at :class:`Evidence` and gives a :class:`Symptom` or nothing.

``causes.yaml`` holds what is data: the causes' texts in causal order, and the thresholds with the reason of each.
Causal order: what stands earlier brings about what stands later, so that of two that begin together the earlier one is
named. docs/diagnosis.md is written from it (``python -m tools.diagnosis_page``).

Thresholds are of two sorts: what numerics, statistics or a configuration rule out (a trained token that nobody sampled,
an evaluation task that was trained on, a gap of float32 numbers), and what is usual in published runs, with a wide
margin. What a weak policy does at first and unlearns is no disease: causes of that sort must still hold at the end
(:func:`still`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from scipy.stats import binom, linregress

from mua.observe.diagnosis.evidence import (
    DATA,
    Evidence,
    Floats,
    Mask,
    SeenEpisode,
    TokenSample,
    beginning,
    dated,
    ending,
    lasting,
    mean,
    smoothed,
)

THRESHOLDS = SimpleNamespace(**DATA["thresholds"])
_DECLINES = re.compile(
    r"\b(?:can(?:'|’)?t|can ?not|unable to|not able to|won(?:'|’)t|will not|(?:is|are|am)n?(?:'|’)?t? ?not (?:possible|"
    r"allowed|permitted|eligible)|refuse|decline)\b|transfer_to_human", re.IGNORECASE,
)  # fmt: skip
_WHO = re.compile(r"\b(?:user|judge)(?:_seconds)?\b")
_WORD = re.compile(r"[^\W_]+")


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
    find: Callable[[Evidence], Symptom | None]
    title: str
    meaning: str
    evidence: str
    """What is looked at, from which value on, and why there."""
    remedy: str
    from_metrics: bool = True
    """Whether metrics alone can show it, so that training watches for it."""
    at_once: bool = False
    """No matter of the policy, and told from the second step on."""


# ---- what several causes ask


def above(values: Floats, bound: float | Floats) -> Mask:
    """Where a value is there and at least ``bound``."""
    with np.errstate(invalid="ignore"):
        return np.asarray(values >= bound)


def still(values: Floats, least: float) -> bool:
    """Whether a share is at least ``least`` at the end and has not fallen to less than 0.8 of its beginning."""
    end = mean(ending(values))
    return end >= least and end >= 0.8 * mean(beginning(values))


def stays_high(values: Floats, bound: float, recent: Floats | None = None) -> int | None:
    """Where a share began to be high if its average passes ``bound`` and it is still high at the end."""
    place = lasting(above(smoothed(values) if recent is None else recent, bound))
    if place is None or len(values) < 5 or not still(values, bound):
        return None
    base = mean(beginning(values))
    return dated(values, place, base if base < bound else 0.0, mean(values[place:]))


def symptom(
    seen: Evidence, place: int, text: str, numbers: dict[str, float], trajectory: str | None = None,
    remedy: str | None = None,
) -> Symptom:  # fmt: skip
    """What began at this place of the series."""
    return Symptom(int(seen.steps[place]), text, numbers, trajectory, remedy)


def example(seen: Evidence, place: int, fits: Callable[[SeenEpisode], bool] = lambda _: True) -> str | None:
    """The first episode from this place on that ``fits``."""
    return next((e.id for e in seen.episodes or () if e.step >= seen.steps[place] and fits(e)), None)


def widest(seen: Evidence, place: int, key: Callable[[TokenSample], float]) -> str | None:
    """The trajectory of the token sample from this place on with the largest ``key``, or any episode."""
    samples = [s for s in seen.tokens or () if s.step >= seen.steps[place] and math.isfinite(key(s))]
    return max(samples, key=key).trajectory if samples else example(seen, place)


def per_step(seen: Evidence, value: Callable[[Sequence[SeenEpisode]], float]) -> Floats:
    """``value`` of the episodes of each step."""
    by_step = seen.by_step()
    return np.array([value(by_step.get(step, [])) for step in seen.steps.tolist()], np.float64)


def of_tokens(seen: Evidence, value: Callable[[TokenSample], float]) -> Floats:
    """The mean of a number of token samples, step by step."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for sample in seen.tokens or ():
        found[sample.step].append(value(sample))
    return np.array([mean(np.array(found[step])) for step in seen.steps.tolist()], np.float64)


def ratio(part: float, whole: float) -> float:
    """NaN of nothing."""
    return part / whole if whole else math.nan


def shares(seen: Evidence, counts: Callable[[SeenEpisode], bool], scored: bool = True) -> Floats:
    """Of each step the share of (scored) episodes that count; NaN without any."""

    def share(members: Sequence[SeenEpisode]) -> float:
        members = [e for e in members if e.scored or not scored]
        return ratio(sum(map(counts, members)), len(members))

    return per_step(seen, share)


def grouped(episodes: Sequence[SeenEpisode]) -> Iterator[list[SeenEpisode]]:
    """The scored members of each group."""
    found: defaultdict[int, list[SeenEpisode]] = defaultdict(list)
    for e in episodes:
        if e.scored:
            found[e.ordinal].append(e)
    yield from found.values()


def gain(seen: Evidence, place: int) -> float:
    """By how much success at the end is above that before ``place``, or at the beginning; 0 where nobody knows."""
    success = seen.of("success")
    before = success[max(0, place - 5) : place]
    if np.isfinite(before).sum() < 2:
        before = beginning(success)
    found = mean(ending(success)) - mean(before)
    return found if math.isfinite(found) else 0.0


# ---- the causes, by the names of causes.yaml


def wrong_tokens(seen: Evidence) -> Symptom | None:
    if (sample := next((sample for sample in seen.tokens or () if sample.wrong), None)) is not None:
        return Symptom(
            sample.step,
            f"{sample.wrong} of {sample.trained} trained tokens of a segment were not sampled by the policy (most are "
            f"{sample.wrong_of})",
            {"wrong_tokens": sample.wrong, "trained_tokens": sample.trained},
            sample.trajectory,
        )
    sampled = seen.of("sampled_tokens") * seen.of("episodes") * (1 - np.nan_to_num(seen.of("unscored")))
    trained = seen.of("trained_tokens") * float(seen.setting("algorithm.minibatches", 1))
    if (place := lasting(above(trained, 1.02 * sampled + 1), 2)) is None:
        return None
    return symptom(
        seen, place,
        f"{trained[place]:.0f} tokens were trained in a step whose episodes hold {sampled[place]:.0f} sampled ones",
        {"trained_tokens": float(trained[place]), "sampled_tokens": float(sampled[place])},
    )  # fmt: skip


def evaluation_meets_training(seen: Evidence) -> Symptom | None:
    if not seen.met:
        return None
    name, (step, tasks) = min(seen.met.items(), key=lambda item: item[1][0])
    shown = ", ".join(tasks[:3])
    return Symptom(step, f"{len(tasks)} tasks of {name} are tasks of training: {shown}", {"tasks": len(tasks)})


def leaking_user(seen: Evidence) -> Symptom | None:
    members = [e for e in seen.episodes or () if e.scored]
    told = [e for e in members if e.leak]
    share = ratio(len(told), sum(e.step >= told[0].step for e in members)) if told else 0.0
    if len(told) >= 2 and share >= THRESHOLDS.leaks:
        return Symptom(
            told[0].step,
            f"in {share:.0%} of the episodes since then the user gives away what it should not: {told[0].leak}",
            {"share": share, "episodes": len(told)},
            told[0].id,
        )
    leaks = seen.of("leaks")
    each = leaks / np.maximum(1.0, np.nan_to_num(seen.of("episodes"), nan=1.0))
    place = lasting(above(smoothed(each, 5), THRESHOLDS.leaks), 2)
    if place is None or leaks.sum() < 2:
        return None
    text = f"{leaks.sum():.0f} utterances of users quoted their instructions"
    return symptom(seen, place, text, {"utterances": float(leaks.sum())})


def failing_user(seen: Evidence) -> Symptom | None:
    ended = seen.of("ended_user") + np.nan_to_num(seen.of("ended_judge"))
    faults = seen.of("user_faults") / np.maximum(1.0, np.nan_to_num(seen.of("episodes"), nan=1.0))
    if (
        np.nansum(seen.of("ended_user")) + np.nansum(seen.of("ended_judge")) > 0
    ):  # then retries were for the same reason
        faults = np.fmax(faults, seen.of("attempts") - 1)
    late = shares(seen, lambda e: e.outcome == "timeout" and bool(_WHO.search(e.error or "")), scored=False)
    by_step = dict(zip(seen.steps.tolist(), zip(ended + np.nan_to_num(late), faults, strict=True), strict=True))
    for step, members in seen.by_step().items():  # of a step that stopped the run there are no metrics
        lost = sum(e.outcome in ("user_error", "judge_error") for e in members)
        by_step.setdefault(step, (lost / len(members), math.nan))
    steps = sorted(by_step)
    for which, bound, what in (
        (0, THRESHOLDS.user_faults, "episodes ended"),
        (1, THRESHOLDS.user_retries, "episodes had to be tried again"),
    ):
        values = np.array([by_step[step][which] for step in steps])
        place = lasting(above(smoothed(values, 5), bound), 2)
        if place is None and len(values) and values[-1] >= 0.5:
            place = len(values) - 1  # a step that stopped the run
        if place is None:
            continue
        while place > 0 and values[place - 1] > 0:
            place -= 1
        bad = [e for e in seen.episodes or () if e.step >= steps[place] and not e.scored]
        kind = Counter(e.outcome for e in bad).most_common(1)[0][0] if bad else "user_error or judge_error"
        error = next((f": {e.error}" for e in bad if e.error), "")
        share = mean(values[place:])
        text = f"{share:.0%} of the {what} as {kind}{error[:200]}"
        return Symptom(steps[place], text, {"share": share}, bad[0].id if bad else None)
    return None


def tool_errors(seen: Evidence) -> Symptom | None:
    crashed = seen.of("ended_environment")
    if (place := lasting(above(smoothed(crashed, 5), THRESHOLDS.user_faults), 2)) is not None:
        share = mean(crashed[place:])
        text = f"{share:.0%} of the episodes ended as environment_error"
        return symptom(seen, place, text, {"share": share}, example(seen, place, lambda e: not e.scored))
    if seen.episodes is None:
        calls = seen.of("tool_calls")
        rate = np.divide(seen.of("tool_errors"), calls, out=np.full(len(calls), np.nan), where=calls > 0)
    else:
        rate = per_step(seen, lambda members: ratio(sum(e.call_errors for e in members), sum(e.calls for e in members)))
        calls = per_step(seen, lambda members: ratio(sum(e.calls for e in members), len(members)))
    base, most, rise = mean(beginning(rate)), THRESHOLDS.tool_errors, THRESHOLDS.tool_errors_rise
    bound = max(base + rise, rise) if base <= most - rise else most
    recent = np.where(smoothed(calls) >= 0.25, smoothed(rate), np.nan)
    if (place := stays_high(rate, bound, recent)) is None:
        return None
    step, share = seen.steps[place], mean(rate[place:])
    names = Counter(e.error for e in seen.episodes or () if e.step >= step and e.call_errors and e.error)
    told = f", most often {names.most_common(1)[0][0][:120]!r}" if names else ""
    text = f"{share:.0%} of tool calls fail from then on ({base:.0%} at the beginning){told}"
    return symptom(
        seen, place, text, {"share": share, "before": base}, example(seen, place, lambda e: e.call_errors > 0)
    )


def engine_mismatch(seen: Evidence) -> Symptom | None:
    exact = seen.setting("model.dtype") == "float32" and seen.setting("engine.dtype") in (None, "float32")
    kind = "float32" if exact else "low"
    bound = getattr(THRESHOLDS, f"gap_{kind}")
    gap, kl = _fresh(seen)
    place = lasting(above(gap, bound) | above(kl, getattr(THRESHOLDS, f"kl_{kind}")), 2)
    if place is None:
        return None
    return symptom(
        seen, place,
        "for tokens of the version that is trained, log-probabilities of engine and trainer are "
        f"{mean(gap[place:]):.3g} apart on average (k3 {mean(kl[place:]):.3g}), and numerics explain {bound:g}",
        {"difference": mean(gap[place:]), "kl_k3": mean(kl[place:])},
        widest(seen, place, lambda sample: sample.fresh_gap),
    )  # fmt: skip


def _fresh(seen: Evidence) -> tuple[Floats, Floats]:
    """Gap and k3 of tokens of the newest version: measured apart, or in steps without older ones, or from the store."""
    gap, kl = seen.of("fresh_gap"), seen.of("fresh_kl")
    updates = seen.setting("algorithm.epochs", 1) * seen.setting("algorithm.minibatches", 1)
    moving = seen.setting("algorithm.old_logprobs") == "engine" and updates > 1  # then the policy's own drift is in it
    if not moving:
        older = np.nan_to_num(seen.of("lag_max")) > 0
        gap = np.where(np.isfinite(gap) | older, gap, seen.of("gap"))
        kl = np.where(np.isfinite(kl) | older, kl, seen.of("gap_kl"))
    return (
        np.where(np.isfinite(gap), gap, of_tokens(seen, lambda sample: sample.fresh_gap)),
        np.where(np.isfinite(kl), kl, of_tokens(seen, lambda sample: sample.fresh_kl)),
    )


def stale_data(seen: Evidence) -> Symptom | None:
    lag = seen.of("lag")
    if not (np.nan_to_num(lag) > 0).any():
        return None
    kl = seen.of("stale_kl")
    kl = np.where(np.isfinite(kl), kl, of_tokens(seen, lambda sample: sample.stale_kl))
    unknown = ~np.isfinite(kl) & (np.nan_to_num(lag) >= 0.5) & ~above(_fresh(seen)[1], THRESHOLDS.kl_low)
    kl = np.where(unknown, seen.of("gap_kl"), kl)
    cut = np.fmax(seen.of("correction_removed"), seen.of("correction_cut"))
    bound = seen.setting("trainer.max_staleness", 0) + seen.setting("algorithm.refill.carry_versions", 0)
    blind = bool(seen.setting("algorithm.allow_off_policy", False)) or (
        seen.setting("algorithm.correction", "none") == "none"
        and (seen.setting("algorithm.old_logprobs") == "recompute" or seen.setting("algorithm.loss") == "reinforce")
    )
    holds = above(smoothed(kl), THRESHOLDS.stale_kl) | (above(lag, 0.5) & above(smoothed(cut), THRESHOLDS.stale_cut))
    if blind:
        holds |= above(smoothed(lag), THRESHOLDS.stale_lag)
    if seen.config:
        holds |= above(seen.of("lag_max"), bound + 1) & above(lag, max(1.0, bound))
    if (place := lasting(holds, 2)) is None:
        return None
    drift = f", whose log-probabilities have moved (k3 {mean(kl[place:]):.3g})" if np.isfinite(kl[place:]).any() else ""
    text = (
        f"tokens are {mean(lag[place:]):.1f} versions old on average, {np.nanmax(seen.of('lag_max')[place:]):.0f} at "
        f"most{drift}" + (", and nothing in the loss knows of it" if blind else "")
    )
    numbers = {"version_lag": mean(lag[place:]), "kl_k3": mean(kl[place:])}
    return symptom(seen, place, text, numbers, widest(seen, place, lambda sample: sample.lag))


def large_steps(seen: Evidence) -> Symptom | None:
    loss, t = seen.setting("algorithm.loss", "grpo"), THRESHOLDS
    kl, reference, skipped, norm = (seen.of(name) for name in ("update_kl", "reference_kl", "skipped", "grad_norm"))
    clipped = seen.of("clipped_low") + seen.of("clipped_high")
    used = np.where(norm > 0, norm, np.nan)
    usual = float(np.nanmedian(beginning(used))) if np.isfinite(used).any() else math.nan
    once = np.flatnonzero(above(kl, t.update_kl_once))
    allowed = t.clipped_sequences if loss == "gspo" else t.clipped if loss != "sapo" else math.inf
    norm_bound = max(t.gradient_rise * usual, float(seen.setting("optimizer.clip_grad", 1.0)))
    looked: list[tuple[int | None, str, Floats, str]] = [
        (int(once[0]) if len(once) else lasting(above(kl, t.update_kl), 2), "kl_k3", kl,
         "the updates of a batch move the policy by a KL of {:.3g}"),
        # sapo's bounds are temperatures
        (lasting(above(clipped, allowed)), "clip_fraction", clipped, "{:.0%} of the tokens are clipped"),
        (lasting(above(skipped, 1e-9), 2), "skipped", skipped,
         "the gradient norm is not finite, and updates are left out"),
        (lasting(above(used, norm_bound)), "grad_norm", norm,
         f"the gradient norm is {{:.3g}}, and was {usual:.3g} at the beginning"),
        (lasting(above(reference, t.reference_kl), 2), "reference_kl", reference,
         "the policy is {:.3g} nats per token from the reference"),
    ]  # fmt: skip
    entropy = seen.of("entropy")
    looked += [(place, "entropy", entropy, text) for place, text in _unsteady(entropy)]
    found = [(place, name, values, text) for place, name, values, text in looked if place is not None]
    if not found:
        return None
    place, name, values, text = min(found, key=lambda one: one[0])
    text, rate = text.format(values[place]), seen.of("learning_rate")[place]
    if np.isfinite(rate):
        text += f" (learning rate {rate:.3g})"
    return symptom(seen, place, text, {name: float(values[place])}, example(seen, place))


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
    leap, nats, many = THRESHOLDS.leap, THRESHOLDS.leap_nats, THRESHOLDS.swings
    of_medians = above(moved_shares, leap) & above(moved, nats)
    leaps = np.flatnonzero(of_medians & above(swing_shares[:-1], leap) & above(swings[:-1], nats))
    if len(leaps):
        at = int(leaps[0])
        yield at, f"entropy goes from {before[at]:.3g} to {after[at]:.3g} in a step"
    if len(swings) < many:
        return
    usual_share, usual_swing = (np.median(sliding_window_view(one, many), axis=1) for one in (swing_shares, swings))
    signs = np.sign(np.diff(entropy))
    turns = sliding_window_view(signs[1:] * signs[:-1] < 0, many - 1).sum(axis=1)
    wild = np.flatnonzero(above(usual_share, THRESHOLDS.swing) & above(usual_swing, nats) & (turns >= 2))
    if len(wild):
        begins = int(wild[0]) + int(np.flatnonzero(above(swing_shares[wild[0] :], THRESHOLDS.swing))[0])
        yield begins, f"entropy swings by {THRESHOLDS.swing:.0%} and more from step to step"


def length_explosion(seen: Evidence) -> Symptom | None:
    tokens, success, cut = seen.of("sampled_tokens"), seen.of("success"), seen.of("ended_length")
    first, end = beginning(tokens), mean(ending(tokens))
    # What explodes at once is in the beginning too, but not in the first step.
    base = float(min(first[0], np.median(first))) if len(first) else math.nan
    place = lasting(above(smoothed(tokens), max(THRESHOLDS.longer * base, base + 20)))
    if place is None or end < THRESHOLDS.longer * base:
        return None
    place = dated(tokens, place, base, 1.6 * base)
    if gain(seen, place) >= THRESHOLDS.gain and not mean(ending(cut)) - mean(beginning(cut)) >= 0.2:
        return None
    after = [e for e in seen.episodes or () if e.step >= seen.steps[place]]
    longest = max(after, key=lambda e: e.sampled_tokens).id if after else None
    return symptom(
        seen, place,
        f"an episode's sampled tokens grew from {base:.0f} to {end:.0f}, and success from "
        f"{mean(beginning(success)):.2f} to {mean(ending(success)):.2f}",
        {"before": base, "after": end}, longest,
    )  # fmt: skip


def truncation(seen: Evidence) -> Symptom | None:
    cut = np.fmax(seen.of("ended_length"), seen.of("cut_by_time"))
    cut = np.fmax(cut, shares(seen, lambda e: e.outcome == "length" or e.cut_turns > 0))
    if (place := stays_high(cut, THRESHOLDS.cut)) is not None:
        text, keys = "are cut because a turn or the context is too long", (
            "rollout.max_turn_tokens, rollout.max_tokens and model.max_length"
        )  # fmt: skip
        share, shown = mean(cut[place:]), example(seen, place, lambda e: e.outcome == "length" or e.cut_turns > 0)
    elif (place := stays_high(seen.of("ended_turns"), THRESHOLDS.out_of_turns)) is not None:
        text, keys = "end because their turns are used up", "rollout.max_turns, or set rollout.final_turn"
        share, shown = (
            mean(seen.of("ended_turns")[place:]), example(seen, place, lambda e: e.outcome == "max_turns"),
        )  # fmt: skip
    else:
        return None
    remedy = f"raise {keys}; algorithm.filters with kind overlong leaves such failures out"
    return symptom(seen, place, f"{share:.0%} of the episodes {text}", {"share": share}, shown, remedy)


def refusing(seen: Evidence) -> Symptom | None:
    scored = [e for e in seen.episodes or () if e.scored]
    kinds: list[tuple[str, Callable[[SeenEpisode], bool]]] = [
        ("declines", lambda e: bool(_DECLINES.search(e.told)) or "transfer_to_human" in e.said)
    ]
    if sum(e.calls > 0 for e in scored) >= 0.1 * len(scored):
        kinds.append(("does nothing but talk", lambda e: not e.calls and bool(e.told)))
    found = (_declining(seen, scored, what, declines) for what, declines in kinds)
    return next((one for one in found if one is not None), None)


def _declining(
    seen: Evidence, scored: list[SeenEpisode], what: str, declines: Callable[[SeenEpisode], bool]
) -> Symptom | None:
    """Whether it became common, and is worth more than its contrary: within groups that have both, where there are."""
    values = shares(seen, declines)
    base, end = mean(beginning(values)), mean(ending(values))
    place = lasting(above(smoothed(values), (base + end) / 2))
    if place is None or not end >= max(THRESHOLDS.refusing, base + THRESHOLDS.refusing_rise):
        return None
    place = dated(values, place, base, base + 0.5 * (end - base))
    differences = []
    for members in grouped(scored):
        those = [e.reward for e in members if declines(e)]
        others = [e.reward for e in members if not declines(e)]
        if those and others:
            differences.append(np.mean(those) - np.mean(others))
    paid = [e.reward for e in scored if e.step >= seen.steps[place] and declines(e)]
    rest = [e.reward for e in scored if not declines(e)]
    worth = float(np.mean(differences)) if len(differences) >= 3 else float(np.mean(paid) - np.mean(rest or [0.0]))
    if worth <= 0:
        return None
    return symptom(
        seen, place,
        f"the policy {what} in {end:.0%} of the episodes at the end ({base:.0%} at the beginning), and that is "
        f"worth {worth:.2f} more than the contrary",
        {"share": end, "before": base, "worth": worth},
        example(seen, place, lambda e: e.scored and declines(e) and e.reward > 0),
    )  # fmt: skip


Places = npt.NDArray[np.int64]
Change = tuple[float, float, float]
"""Success before and after, and how many standard errors they are apart."""
FEW_GROUPS = 4
"""Of a kind on each side: fewer say nothing."""


def kind_for_kind(seen: Evidence) -> Symptom | None:
    """Success of each kind over windows of steps and as a trend. The unit is the group, whose members share a task."""
    kinds, total = _by_kind(seen), len(seen.steps)
    if len(kinds) < 2 or total < 4:
        return None
    best: tuple[float, str, str, int, tuple[float, ...]] | None = None
    last = max(2, total // 4)
    windows = [(start, last) for start in sorted({0, total // 4, total // 2, max(0, total - 2 * last)})]
    for start, width in [*windows, (0, total // 2), (0, 0)]:
        found = {kind: _change(*groups, total, start, width) for kind, groups in kinds.items()}
        changes = {kind: change for kind, change in found.items() if change is not None}
        if len(changes) < 2:
            continue
        fallen = min(changes, key=lambda kind: changes[kind][2])
        risen = max(changes, key=lambda kind: changes[kind][2])
        (f0, f1, fz), (r0, r1, rz) = changes[fallen], changes[risen]
        apart = fz <= -2.0 and rz >= 2.0 and rz - fz >= THRESHOLDS.apart
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
    return symptom(
        seen, place,
        f"success in {risen} rose from {r0:.2f} to {r1:.2f} while in {fallen} it fell from {f0:.2f} to {f1:.2f}",
        {"risen_before": r0, "risen_after": r1, "fallen_before": f0, "fallen_after": f1},
        example(seen, place, lambda e: e.scored and not e.success and fallen in (e.kind, e.domain)),
        f"weigh the kinds apart: algorithm.curriculum.kind failing_kinds, a smaller share of {risen} in "
        "environment.mix, algorithm.whiten environment; look at what the reward pays for in both",
    )  # fmt: skip


def _change(places: Places, values: Floats, total: int, start: int, width: int) -> Change | None:
    """Of success, from the ``width`` steps from ``start`` on to the last ones; width 0: along a straight line."""

    def noise(values: Floats, rest: Floats) -> float:
        """Variance of a group's success: what is seen, and no less than that of four tosses of its mean."""
        level = float(values.mean())
        return max(float(rest @ rest) / max(1, len(rest) - 2), level * (1 - level) / 4, 1e-3)

    if width:
        before = values[(places >= start) & (places < start + width)]
        after = values[places >= total - width]
        if start + 2 * width > total or min(len(before), len(after)) < FEW_GROUPS:
            return None
        rest = np.concatenate([before - before.mean(), after - after.mean()])
        error = math.sqrt(noise(np.concatenate([before, after]), rest) * (1 / len(before) + 1 / len(after)))
        first, final = float(before.mean()), float(after.mean())
        return first, final, (final - first) / error
    at = places - places.mean()
    spread = float(at @ at)
    if len(values) < 2 * FEW_GROUPS or spread == 0:
        return None
    level, slope = float(values.mean()), float(at @ values) / spread
    first, final = (min(1.0, max(0.0, level + slope * (end - places.mean()))) for end in (0.0, total - 1.0))
    return first, final, slope / math.sqrt(noise(values, values - level - slope * at) / spread)


def _by_kind(seen: Evidence) -> dict[str, tuple[Places, Floats]]:
    """By kind and domain, of each group the place of its step and its success; without a store of each step."""
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    several = len({e.domain for e in seen.episodes or ()}) > 1
    by_step = seen.by_step()
    for place, step in enumerate(seen.steps.tolist()):
        for members in grouped(by_step.get(step, [])):
            won = sum(e.success for e in members) / len(members)
            for kind in {members[0].kind, members[0].domain if several else "-"} - {"-"}:
                found[kind].append((place, won))
    if not seen.episodes:
        for name, values in seen.domains.items():
            found[name] = [(place, value) for place, value in enumerate(values.tolist()) if math.isfinite(value)]
    return {
        kind: (np.array([place for place, _ in pairs]), np.array([value for _, value in pairs]))
        for kind, pairs in found.items()
        if pairs
    }


def entropy_collapse(seen: Evidence) -> Symptom | None:
    entropy, success, alike = seen.of("entropy"), seen.of("success"), _variety(seen)
    if mean(ending(success)) >= THRESHOLDS.solved:
        return None
    recent, base, varied = smoothed(entropy), mean(beginning(entropy)[:2]), mean(beginning(alike))
    low = above(-recent, -THRESHOLDS.collapsed * base) & above(-recent, -THRESHOLDS.collapsed_nats)
    place: int | None
    if (place := lasting(low)) is not None:
        stuck = mean(ending(seen.of("same_rewards"))) >= 0.8 or mean(ending(alike)) <= 0.25
        # From where it began to fall to this half of itself: success that rises meanwhile pays for it.
        higher = np.flatnonzero(above(recent[:place], 2 * recent[place]))
        fell = int(higher[-1]) if len(higher) else 0
        risen = mean(ending(success)) - mean(success[max(0, fell - 4) : fell + 1])
        if risen >= THRESHOLDS.gain and not stuck:
            return None
        place = min(place, fell + 1)
        text = f"entropy fell from {base:.3g} to {mean(ending(entropy)):.3g} nats per token"
        numbers = {"before": base, "after": mean(ending(entropy))}
    elif varied >= THRESHOLDS.varied and (place := _narrowed(seen, alike, varied)) is not None:
        share = mean(alike[place:])
        text = f"the members of a group say the same: {share:.0%} of them differ, at the beginning {varied:.0%}"
        numbers = {"before": varied, "after": share}
    else:
        return None
    end = f", while success is {mean(ending(success)):.2f}" if np.isfinite(success).any() else ""
    return symptom(seen, place, text + end, numbers, example(seen, place))


def _variety(seen: Evidence) -> Floats:
    """Of each step the mean share of different texts among the members of a group; NaN without a store."""

    def share(members: Sequence[SeenEpisode]) -> float:
        groups = [group for group in grouped(members) if len(group) > 1]
        return mean(np.array([(len({e.said for e in group}) - 1) / (len(group) - 1) for group in groups]))

    return per_step(seen, share)


def _narrowed(seen: Evidence, alike: Floats, varied: float) -> int | None:
    """Where the members of a group began to say the same: hardly any of them differ, to the end; or groups agree in
    their rewards from there on, and half of the variety is gone, so that tasks are not why they agree."""
    found, agreed = [], _agreement(seen)
    place = lasting(above(-smoothed(alike), -THRESHOLDS.same_said))
    if place is not None and mean(ending(alike)) <= THRESHOLDS.same_said:
        found.append(dated(alike, place, varied, mean(ending(alike))))
    if agreed is not None and agreed[0] > 0 and mean(alike[agreed[0] :]) <= varied / 2:
        found.append(agreed[0])
    return min(found, default=None)


def template_collapse(seen: Evidence) -> Symptom | None:
    by_step, steps, chosen = seen.by_step(), seen.steps.tolist(), np.random.default_rng(0)
    triples: dict[str, set[tuple[str, ...]]] = {}
    for e in seen.episodes or ():
        words = _WORD.findall(e.said.casefold())
        triples[e.id] = set(zip(words, words[1:], words[2:], strict=False)) or {tuple(words)}
    across = np.full(len(steps), np.nan)
    for at, step in enumerate(steps):
        # A step of one group has one task: its neighbors before it count too.
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
            pair = chosen.choice(len(names), 2, replace=False)
            one, two = (triples[tasks[names[i]][int(chosen.integers(len(tasks[names[i]])))].id] for i in pair)
            same.append(len(one & two) >= THRESHOLDS.alike * min(len(one), len(two)))
        across[at] = float(np.mean(same))
    place = lasting(above(across, THRESHOLDS.alike_pairs))
    end, base = mean(ending(across)), mean(beginning(across))
    if place is None or not end >= THRESHOLDS.alike_pairs:
        return None
    if mean(ending(seen.of("success"))) >= THRESHOLDS.solved and base >= 0.2:
        return None  # one answer is right for every task
    text = f"{end:.0%} of the pairs of answers to different tasks are the same ({base:.0%} at the beginning)"
    return symptom(seen, place, text, {"share": end, "before": base}, example(seen, place, lambda e: e.scored))


def agreeing_groups(seen: Evidence) -> Symptom | None:
    if (agreed := _agreement(seen)) is None:
        return None
    place, share = agreed
    what, easier = "all alike", "a reward that tells better from worse (environment.reward partial)"
    if mean(ending(seen.of("all_right"))) >= 0.5:
        what = "all right"
        easier = "harder tasks (environment.difficulties, algorithm.curriculum.kind success_rate)"
    elif mean(ending(seen.of("all_wrong"))) >= 0.5:
        what = "all wrong"
        easier = (
            "easier tasks first (environment.difficulties), environment.reward partial, or supervised training before "
            "(mua sft)"
        )
    return symptom(
        seen, place,
        f"in {share:.0%} of the groups all members have the same reward ({what}), so that nothing is learned from them",
        {"share": share}, example(seen, place, lambda e: e.scored),
        f"{easier}, a larger algorithm.group_size, a higher rollout.temperature, or algorithm.refill",
    )  # fmt: skip


def _agreement(seen: Evidence) -> tuple[int, float] | None:
    """From which place on groups have no differences in reward, to the end, and what share of them; None where they
    have, need none, or have been learned."""
    distilled = seen.setting("algorithm.distillation") is not None
    if distilled or seen.setting("algorithm.loss") == "cross_entropy" or seen.setting("algorithm.group_size", 8) < 2:
        return None
    if seen.setting("algorithm.advantage", "grpo") in ("gae", "none"):
        return None
    same, count = seen.of("same_rewards"), np.nan_to_num(seen.of("groups"))
    refills = seen.setting("algorithm.refill.max_extra_groups", 0) + seen.setting("algorithm.refill.oversample", 0)
    if refills:  # groups that agree are replaced; those that were not found are missing
        count = np.full(len(same), float(seen.setting("algorithm.groups_per_step", 32)))
        same = seen.of("missing_groups") / count
    success = seen.of("success")
    end = mean(ending(success))
    learned = end >= 0.8 and end - mean(beginning(success)) >= THRESHOLDS.gain
    if mean(ending(seen.of("all_right"))) >= 0.5 and learned:
        return None
    place = _agreeing_from(np.nan_to_num(same) * count, count, 24 if seen.live else 12)
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
        if place == 0 and n - k < 0.5:
            return place
        if before >= 8 and binom.sf(k - 1, n, (agreed + 1) / (before + 2)) < THRESHOLDS.unlikely:
            return place
        # Lower end of Wilson's interval.
        z, share = 2.33, k / n
        center = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        if center - half >= THRESHOLDS.agree:
            return place
    return None


def no_learning(seen: Evidence) -> Symptom | None:
    steps, nothing = len(seen.steps), _nothing_moves(seen)
    if steps and nothing is not None:
        text, numbers = nothing
        remedy = None if numbers else "set algorithm.shuffle_rewards to false"
        return symptom(seen, 0, text, numbers, remedy=remedy)
    reward = seen.of("reward")
    informed = np.nansum((1 - seen.of("same_rewards")) * seen.of("groups")) if seen.metrics else 0.0
    known = np.isfinite(reward)
    if known.sum() < 20 or informed < THRESHOLDS.informed or seen.live:
        return None
    # A straight line through the rewards: by how much it rises over the run, and how certain that is.
    at, values = np.flatnonzero(known), reward[known]
    line = linregress(at, values)
    rise, unsure = line.slope * (at[-1] - at[0]), line.stderr * (at[-1] - at[0])
    room = max(1.0, float(values.max())) - float(values[: max(2, len(values) // 5)].mean())
    if rise > unsure or rise + 1.64 * unsure > min(0.15 * room, 0.3 * abs(values.mean())) or room < 0.1:
        return None
    held_out = [v[np.isfinite(v)] for v in seen.evaluations.values() if np.isfinite(v).sum() >= 2]
    if any(v[-1] - v[0] >= 0.05 for v in held_out):
        return None
    return symptom(
        seen, steps - 1,
        f"after {steps} steps and {informed:.0f} groups with a difference, reward has changed by {rise:+.3f} "
        f"(± {1.64 * unsure:.3f})",
        {"rise": float(rise), "unsure": float(1.64 * unsure)}, example(seen, max(0, steps - 3)),
    )  # fmt: skip


def _nothing_moves(seen: Evidence) -> tuple[str, dict[str, float]] | None:
    """What makes learning impossible, with numbers; no numbers where the configuration shuffles rewards."""
    if seen.setting("algorithm.shuffle_rewards", False):
        return "rewards are dealt at random (algorithm.shuffle_rewards)", {}
    if len(seen.steps) < 3:
        return None
    known = {
        name: values
        for name in ("learning_rate", "grad_norm", "trained_tokens")
        if np.isfinite(values := seen.of(name)).sum() >= 3
    }
    if "learning_rate" in known and np.nansum(known["learning_rate"]) < THRESHOLDS.still_rate:
        highest = float(np.nanmax(known["learning_rate"]))
        return f"the learning rate is {highest:.3g}: weights hardly move", {"learning_rate": highest}
    if "grad_norm" in known and np.nanmax(known["grad_norm"]) == 0:
        return "every gradient is 0", {"grad_norm": 0.0}
    rewarded = np.isfinite(seen.of("same_rewards")).any()
    if "trained_tokens" in known and np.nanmax(known["trained_tokens"]) == 0 and rewarded:
        return "no step trained a token", {"trained_tokens": 0.0}
    if seen.moved is not None and seen.moved < THRESHOLDS.still_nats and engine_mismatch(seen) is None:
        text = "the same tokens after the same text have the same log-probabilities at the beginning and at the end: "
        return f"{text}the policy that samples does not change", {"moved": seen.moved}
    return None


CAUSES = tuple(
    Cause(name, globals()[name], **texts | {"evidence": texts["evidence"].format_map(vars(THRESHOLDS))})
    for name, texts in DATA["causes"].items()
)
"""In causal order."""
