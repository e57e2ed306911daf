"""Every cause of a bad run: a function that looks at :class:`Evidence` and gives a :class:`Symptom` or nothing.

``causes.yaml`` holds what is data: the causes' texts in causal order, and the thresholds with the reason of each.
Causal order: what stands earlier brings about what stands later, so that of two that begin together the earlier one is
named. docs/diagnosis.md is written from it (``python -m tools.diagnosis_page``).

Outcomes (:mod:`mua.observe.diagnosis.outcomes`) are known before causes are asked. The last causes say that an outcome
is bad, whether or not another cause explains it.

Thresholds are of two sorts: what numerics, statistics or a configuration rule out (a trained token that nobody sampled,
an evaluation task that was trained on, a gap of float32 numbers), and what is usual in published runs, with a wide
margin. What a weak policy does at first and unlearns is no disease: causes of that sort must still hold at the end
(:func:`stays_high`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from statistics import fmean
from types import SimpleNamespace

import numpy as np
from scipy.stats import binom, binomtest

from mua.observe.diagnosis.curves import Floats, Mask, above, beginning, dated, ending, lasting, mean, smoothed
from mua.observe.diagnosis.evidence import DATA, Evidence, RunOutcome, SeenEpisode, TokenSample
from mua.observe.diagnosis.outcomes import comparisons, step_means, training_units

THRESHOLDS = SimpleNamespace(**DATA["thresholds"])
DECLINES = re.compile(
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
    trajectory: str | None = None
    """Id of one to look at."""


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
    outcome: bool = False
    """No cause but a result, which stands behind the causes."""


# ---- what several causes ask


def stays_high(values: Floats, bound: float) -> int | None:
    """Where a share began to be high if its average passes ``bound``, and at its end it is still as high, and hardly
    lower than at its beginning."""
    place, base, end = lasting(above(smoothed(values), bound)), mean(beginning(values)), mean(ending(values))
    if place is None or len(values) < 5 or end < max(bound, 0.8 * base):
        return None
    return dated(values, place, base if base < bound else 0.0, mean(values[place:]))


def example(seen: Evidence, place: int, fits: Callable[[SeenEpisode], bool] = lambda _: True) -> str | None:
    """The first episode from this place on that ``fits``."""
    step = seen.steps[place]
    return next((e.id for e in seen.episodes or () if e.step >= step and fits(e)), None)


def widest(seen: Evidence, place: int, key: Callable[[TokenSample], float]) -> str | None:
    """The trajectory of the token sample from this place on with the largest ``key``, or any episode."""
    samples = [s for s in seen.tokens or () if s.step >= seen.steps[place] and math.isfinite(key(s))]
    return max(samples, key=key).trajectory if samples else example(seen, place)


def or_of_tokens(seen: Evidence, values: Floats, value: Callable[[TokenSample], float]) -> Floats:
    """``values``, and where they are missing the mean of a number of the step's token samples."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for sample in seen.tokens or ():
        found[sample.step].append(value(sample))
    return np.where(np.isfinite(values), values, [mean(found[step]) for step in seen.steps])


def shares(seen: Evidence, counts: Callable[[SeenEpisode], float], scored: bool = True) -> Floats:
    """Of each step the share of (scored) episodes that count, or the mean count; NaN without any."""
    return seen.per_step(lambda members: mean([counts(e) for e in members if e.scored or not scored]))


def grouped(episodes: Sequence[SeenEpisode]) -> list[list[SeenEpisode]]:
    """The scored members of each group."""
    found: defaultdict[int, list[SeenEpisode]] = defaultdict(list)
    for e in episodes:
        if e.scored:
            found[e.ordinal].append(e)
    return list(found.values())


def gain(seen: Evidence, place: int) -> float:
    """By how much success at the end is above that before ``place``, or at the beginning; 0 where nobody knows."""
    success = seen.of("success")
    before = success[max(0, place - 5) : place]
    found = mean(ending(success)) - mean(before if np.isfinite(before).sum() >= 2 else beginning(success))
    return float(np.nan_to_num(found))


# ---- the causes, by the names of causes.yaml


def wrong_tokens(seen: Evidence) -> Symptom | None:
    if (sample := next((sample for sample in seen.tokens or () if sample.wrong), None)) is not None:
        text = f"{sample.wrong} of {sample.trained} trained tokens of a segment were not sampled by the policy"
        return Symptom(sample.step, f"{text} (most are {sample.wrong_of})", sample.trajectory)
    sampled = seen.of("sampled_tokens") * seen.of("episodes") * (1 - np.nan_to_num(seen.of("unscored")))
    trained = seen.of("trained_tokens") * float(seen.setting("algorithm.minibatches", 1))
    if (place := lasting(above(trained, 1.02 * sampled + 1), 2)) is None:
        return None
    text = f"{trained[place]:.0f} tokens were trained in a step whose episodes hold {sampled[place]:.0f} sampled ones"
    return Symptom(seen.steps[place], text)


def evaluation_meets_training(seen: Evidence) -> Symptom | None:
    if not seen.met:
        return None
    name, (step, tasks) = min(seen.met.items(), key=lambda item: item[1][0])
    return Symptom(step, f"{len(tasks)} tasks of {name} are tasks of training: {', '.join(tasks[:3])}")


def leaking_user(seen: Evidence) -> Symptom | None:
    told = [e for e in seen.episodes or () if e.scored and e.leak]
    since = [e.leak for e in seen.episodes or () if e.scored and told and e.step >= told[0].step]
    if len(told) >= 2 and len(told) / len(since) >= THRESHOLDS.leaks:
        text = f"in {len(told) / len(since):.0%} of the episodes since then the user gives away what it should not"
        return Symptom(told[0].step, f"{text}: {told[0].leak}", told[0].id)
    leaks = np.nan_to_num(seen.of("leaks"))
    place = lasting(above(smoothed(leaks / np.fmax(1.0, seen.of("episodes")), 5), THRESHOLDS.leaks), 2)
    if place is None or leaks.sum() < 2:
        return None
    return Symptom(seen.steps[place], f"{leaks.sum():.0f} utterances of users quoted their instructions")


def failing_user(seen: Evidence) -> Symptom | None:
    def lost(e: SeenEpisode) -> bool:
        late = e.outcome == "timeout" and _WHO.search(e.error or "")
        return e.outcome in ("user_error", "judge_error") or bool(late)

    ended = np.fmax(seen.of("ended_user") + np.nan_to_num(seen.of("ended_judge")), shares(seen, lost, scored=False))
    faults = seen.of("user_faults") / np.fmax(1.0, seen.of("episodes"))
    if np.nansum(ended) > 0:  # then retries were for the same reason
        faults = np.fmax(faults, seen.of("attempts") - 1)
    for values, bound, what in (
        (ended, THRESHOLDS.user_faults, "episodes ended"),
        (faults, THRESHOLDS.user_retries, "episodes had to be tried again"),
    ):
        place = lasting(above(smoothed(values, 5), bound), 2)
        if place is None and len(values) and values[-1] >= 0.5:
            place = len(values) - 1  # a step that stopped the run
        if place is not None:
            while place > 0 and values[place - 1] > 0:
                place -= 1
            bad = [e for e in seen.episodes or () if e.step >= seen.steps[place] and not e.scored]
            kind = Counter(e.outcome for e in bad).most_common(1)[0][0] if bad else "user_error or judge_error"
            error = next((f": {e.error}" for e in bad if e.error), "")[:200]
            text = f"{mean(values[place:]):.0%} of the {what} as {kind}{error}"
            return Symptom(seen.steps[place], text, bad[0].id if bad else None)
    return None


def tool_errors(seen: Evidence) -> Symptom | None:
    crashed = seen.of("ended_environment")
    if (place := lasting(above(smoothed(crashed, 5), THRESHOLDS.user_faults), 2)) is not None:
        text = f"{mean(crashed[place:]):.0%} of the episodes ended as environment_error"
        return Symptom(seen.steps[place], text, example(seen, place, lambda e: not e.scored))
    calls, failed = seen.of("tool_calls"), seen.of("tool_errors")
    if seen.episodes is not None:
        calls, failed = (shares(seen, count, scored=False) for count in (lambda e: e.calls, lambda e: e.call_errors))
    rate = failed / np.where(smoothed(calls) >= 0.25, np.where(calls > 0, calls, np.nan), np.nan)
    base, most, rise = mean(beginning(rate)), THRESHOLDS.tool_errors, THRESHOLDS.tool_errors_rise
    if (place := stays_high(rate, max(base + rise, rise) if base <= most - rise else most)) is None:
        return None
    names = Counter(e.error for e in seen.episodes or () if e.step >= seen.steps[place] and e.call_errors and e.error)
    text = f"{mean(rate[place:]):.0%} of tool calls fail from then on ({base:.0%} at the beginning)"
    text += f", most often {names.most_common(1)[0][0][:120]!r}" if names else ""
    return Symptom(seen.steps[place], text, example(seen, place, lambda e: e.call_errors > 0))


def engine_mismatch(seen: Evidence) -> Symptom | None:
    exact = seen.setting("model.dtype") == "float32" and seen.setting("engine.dtype") in (None, "float32")
    bound, most = (THRESHOLDS.gap_float32, THRESHOLDS.kl_float32) if exact else (THRESHOLDS.gap_low, THRESHOLDS.kl_low)
    gap, kl = _fresh(seen)
    if (place := lasting(above(gap, bound) | above(kl, most), 2)) is None:
        return None
    text = (
        "for tokens of the version that is trained, log-probabilities of engine and trainer are "
        f"{mean(gap[place:]):.3g} apart on average (k3 {mean(kl[place:]):.3g}), and numerics explain {bound:g}"
    )
    return Symptom(seen.steps[place], text, widest(seen, place, lambda sample: sample.fresh_gap))


def _fresh(seen: Evidence) -> tuple[Floats, Floats]:
    """Gap and k3 of tokens of the newest version: measured apart, or in steps without older ones, or from the store."""
    updates = seen.setting("algorithm.epochs", 1) * seen.setting("algorithm.minibatches", 1)
    moving = seen.setting("algorithm.old_logprobs") == "engine" and updates > 1  # then the policy's own drift is in it
    older = (np.nan_to_num(seen.of("lag_max")) > 0) | moving
    gap, kl = (
        np.where(older | np.isfinite(seen.of(name)), seen.of(name), seen.of(whole))
        for name, whole in (("fresh_gap", "gap"), ("fresh_kl", "gap_kl"))
    )
    gap = or_of_tokens(seen, gap, lambda sample: sample.fresh_gap)
    return gap, or_of_tokens(seen, kl, lambda sample: sample.fresh_kl)


def stale_data(seen: Evidence) -> Symptom | None:
    lag, most = seen.of("lag"), seen.of("lag_max")
    if not (np.nan_to_num(lag) > 0).any():
        return None
    kl = or_of_tokens(seen, seen.of("stale_kl"), lambda sample: sample.stale_kl)
    unknown = ~np.isfinite(kl) & above(lag, 0.5) & ~above(_fresh(seen)[1], THRESHOLDS.kl_low)
    kl = np.where(unknown, seen.of("gap_kl"), kl)
    cut = np.fmax(seen.of("correction_removed"), seen.of("correction_cut"))
    bound = seen.setting("trainer.max_staleness", 0) + seen.setting("algorithm.refill.carry_versions", 0)
    blind = bool(seen.setting("algorithm.allow_off_policy", False)) or (
        seen.setting("algorithm.correction", "none") == "none"
        and (seen.setting("algorithm.old_logprobs") == "recompute" or seen.setting("algorithm.loss") == "reinforce")
    )
    holds = above(smoothed(kl), THRESHOLDS.stale_kl) | (above(lag, 0.5) & above(smoothed(cut), THRESHOLDS.stale_cut))
    holds |= above(smoothed(lag), THRESHOLDS.stale_lag if blind else math.inf)
    if seen.config:
        holds |= above(most, bound + 1) & above(lag, max(1.0, bound))
    if (place := lasting(holds, 2)) is None:
        return None
    text = f"tokens are {mean(lag[place:]):.1f} versions old on average, {np.nanmax(most[place:]):.0f} at most"
    if np.isfinite(kl[place:]).any():
        text += f", whose log-probabilities have moved (k3 {mean(kl[place:]):.3g})"
    text += ", and nothing in the loss knows of it" if blind else ""
    return Symptom(seen.steps[place], text, widest(seen, place, lambda sample: sample.lag))


def large_steps(seen: Evidence) -> Symptom | None:
    t, norm, entropy = THRESHOLDS, seen.of("grad_norm"), seen.of("entropy")
    used = np.where(norm > 0, norm, np.nan)
    usual = float(np.nanmedian(beginning(used))) if np.isfinite(used).any() else math.nan
    norm_bound = max(t.gradient_rise * usual, float(seen.setting("optimizer.clip_grad", 1.0)))
    # sapo's bounds are temperatures
    allowed = {"gspo": t.clipped_sequences, "sapo": math.inf}.get(seen.setting("algorithm.loss"), t.clipped)
    looked = [
        (seen.of("update_kl"), t.update_kl, 2, "the updates of a batch move the policy by a KL of {:.3g}"),
        (seen.of("clipped_low") + seen.of("clipped_high"), allowed, 3, "{:.0%} of the tokens are clipped"),
        (seen.of("skipped"), 1e-9, 2, "the gradient norm is not finite, and updates are left out"),
        (used, norm_bound, 3, f"the gradient norm is {{:.3g}}, and was {usual:.3g} at the beginning"),
        (seen.of("reference_kl"), t.reference_kl, 2, "the policy is {:.3g} nats per token from the reference"),
    ]
    found = [(lasting(above(values, bound), run), values, text) for values, bound, run, text in looked]
    found.append((_leap(entropy), entropy, "entropy, {:.3g}, is far from that of the next step"))
    places = [(place, text.format(values[place])) for place, values, text in found if place is not None]
    if not places:
        return None
    place, text = min(places)
    rate = seen.of("learning_rate")[place]
    text += f" (learning rate {rate:.3g})" if np.isfinite(rate) else ""
    return Symptom(seen.steps[place], text, example(seen, place))


def _leap(entropy: Floats) -> int | None:
    """Where entropy leaps from one step to the next and stays there. Medians of three, because a single odd batch,
    whose texts are others, is no leap of the policy."""

    def far(one: Floats, other: Floats) -> Mask:
        high = np.fmax(one, other)
        return above(np.abs(one - other), np.fmax(THRESHOLDS.leap_nats, THRESHOLDS.leap * high))

    for at in np.flatnonzero(far(entropy[:-1], entropy[1:])).tolist():
        sides = (np.array([np.median(part)]) for part in (entropy[max(0, at - 2) : at + 1], entropy[at + 1 : at + 4]))
        if far(*sides)[0]:
            return int(at)
    return None


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
    text = f"an episode's sampled tokens grew from {base:.0f} to {end:.0f}, and success from "
    text += f"{mean(beginning(success)):.2f} to {mean(ending(success)):.2f}"
    return Symptom(seen.steps[place], text, longest)


def truncation(seen: Evidence) -> Symptom | None:
    def is_cut(e: SeenEpisode) -> bool:
        return e.outcome == "length" or e.cut_turns > 0

    cut = np.fmax(np.fmax(seen.of("ended_length"), seen.of("cut_by_time")), shares(seen, is_cut))
    for values, bound, counts, what in (
        (cut, THRESHOLDS.cut, is_cut, "are cut because a turn or the context is too long"),
        (seen.of("ended_turns"), THRESHOLDS.out_of_turns, lambda e: e.outcome == "max_turns", "end for want of turns"),
    ):
        if (place := stays_high(values, bound)) is not None:
            text = f"{mean(values[place:]):.0%} of the episodes {what}"
            return Symptom(seen.steps[place], text, example(seen, place, counts))
    return None


def refusing(seen: Evidence) -> Symptom | None:
    """Whether declining, or talk alone that is paid, became common in tasks whose own solution does not decline, and is
    worth more than its contrary: within groups that have both, where there are."""
    asked = [e for e in seen.episodes or () if e.scored and not e.to_decline]
    acts = sum(e.calls > 0 for e in asked) >= 0.1 * len(asked)

    def declines(e: SeenEpisode) -> bool:
        idle = acts and not e.calls and bool(e.told) and e.reward > 0
        return idle or bool(DECLINES.search(e.told)) or "transfer_to_human" in e.said

    values = seen.per_step(lambda members: mean([declines(e) for e in members if e.scored and not e.to_decline]))
    base, end = mean(beginning(values)), mean(ending(values))
    place = lasting(above(smoothed(values), (base + end) / 2))
    if place is None or not end >= max(THRESHOLDS.refusing, base + THRESHOLDS.refusing_rise):
        return None
    place = dated(values, place, base, end)
    groups = [[e for e in asked if e.step >= seen.steps[place]], *grouped(asked)]
    worth = [
        mean([e.reward for e in members if declines(e)]) - mean([e.reward for e in members if not declines(e)])
        for members in groups
    ]
    within = mean(worth[1:])
    more = within if math.isfinite(within) else worth[0]
    if not more > 0:
        return None
    text = f"the policy declines, or does nothing but talk, in {end:.0%} of the episodes that ask for more at the end "
    text += f"({base:.0%} at the beginning), and that is worth {more:.2f} more than the contrary"
    return Symptom(seen.steps[place], text, example(seen, place, lambda e: e.scored and declines(e) and e.reward > 0))


def kind_for_kind(seen: Evidence) -> Symptom | None:
    """Success of each kind, and domain, before and after. The unit is the group, whose members share a task."""
    units, total = training_units(seen).get("success"), len(seen.rows)
    if units is None:
        return None
    kinds, domains = units.kinds, np.array([kind.split(": ")[0] for kind in units.kinds])
    parts = {name: units.only(kinds == name) for name in set(kinds)}
    parts |= (
        {name: replace(units, kinds=domains).only(domains == name) for name in set(domains)}
        if len(set(domains)) > 1
        else {}
    )
    changes = [(kind, one) for kind, part in parts.items() for one in comparisons(part, total)]
    pairs = [
        (up.apart - down.apart, fallen, down, risen, up)
        for (fallen, down), (risen, up) in product(changes, changes)
        if down.begin == up.begin and abs(down.start - up.start) <= total // 4
        and down.apart <= -2.0 and up.apart >= 2.0 and down.before - down.after >= 0.2 and up.after - up.before >= 0.15
    ]  # fmt: skip
    if not pairs or (best := max(pairs, key=lambda pair: pair[0]))[0] < THRESHOLDS.apart:
        return None
    _, fallen, down, risen, up = best
    place = dated(smoothed(step_means(parts[fallen], total)), down.start, down.before, down.after)
    text = f"success in {risen} rose from {up.before:.2f} to {up.after:.2f} while in {fallen} it fell from "
    lost = example(seen, place, lambda e: e.scored and not e.success and f"{e.domain}: {e.kind}".startswith(fallen))
    return Symptom(seen.steps[place], f"{text}{down.before:.2f} to {down.after:.2f}", lost)


def template_collapse(seen: Evidence) -> Symptom | None:
    by_step, steps = seen.by_step(), seen.steps
    across = np.full(len(steps), np.nan)
    for at in range(len(steps)):
        answers: dict[str, set[tuple[str, ...]]] = {}
        for step in reversed(steps[max(0, at - 2) : at + 1]):  # a step of one group has one task: neighbors count too
            for e in by_step.get(step, ()) if len(answers) < 3 else ():
                if e.scored:
                    words = _WORD.findall(e.said.casefold())
                    answers[e.task] = set(zip(words, words[1:], words[2:], strict=False)) or {tuple(words)}
        pairs = list(combinations(islice(answers.values(), 16), 2))
        if len(pairs) >= 3:
            across[at] = fmean(len(one & two) >= THRESHOLDS.alike * min(len(one), len(two)) for one, two in pairs)
    place = lasting(above(across, THRESHOLDS.alike_pairs))
    end, base = mean(ending(across)), mean(beginning(across))
    if place is None or not end >= THRESHOLDS.alike_pairs:
        return None
    if mean(ending(seen.of("success"))) >= THRESHOLDS.solved and base >= 0.2:
        return None  # one answer is right for every task
    text = f"{end:.0%} of the pairs of answers to different tasks are the same ({base:.0%} at the beginning)"
    return Symptom(seen.steps[place], text, example(seen, place, lambda e: e.scored))


def entropy_collapse(seen: Evidence) -> Symptom | None:
    entropy, success, varied = seen.of("entropy"), seen.of("success"), seen.per_step(_variety)
    end, base, said = mean(ending(success)), mean(beginning(entropy)[:2]), mean(beginning(varied))
    if not end < THRESHOLDS.solved:  # solved, or supervised training, which explores nothing
        return None
    recent = smoothed(entropy)
    if (place := lasting(above(-recent, -min(THRESHOLDS.collapsed * base, THRESHOLDS.collapsed_nats)))) is not None:
        stuck = mean(ending(seen.of("same_rewards"))) >= 0.8 or mean(ending(varied)) <= 0.25
        higher = np.flatnonzero(above(recent[:place], 2 * recent[place]))  # it began to fall to this half of itself
        place = min(place, int(higher[-1]) + 1 if len(higher) else 1)
        if gain(seen, place) >= THRESHOLDS.gain and not stuck:  # success that rises meanwhile pays for it
            return None
        text = f"entropy fell from {base:.3g} to {mean(ending(entropy)):.3g} nats per token"
    elif said >= THRESHOLDS.varied and (place := _narrowed(seen, varied, said)) is not None:
        share = mean(varied[place:])
        text = f"the members of a group say the same: {share:.0%} of them differ, at the beginning {said:.0%}"
    else:
        return None
    return Symptom(seen.steps[place], f"{text}, while success is {end:.2f}", example(seen, place))


def _variety(members: Sequence[SeenEpisode]) -> float:
    """Mean share of different texts among the members of a group."""
    groups = [group for group in grouped(members) if len(group) > 1]
    return mean([(len({e.said for e in group}) - 1) / (len(group) - 1) for group in groups])


def _narrowed(seen: Evidence, varied: Floats, base: float) -> int | None:
    """Where the members of a group began to say the same: hardly any of them differ, to the end; or groups agree in
    their rewards from there on, and half of the variety is gone, so that tasks are not why they agree."""
    agreed, end = _agreement(seen), mean(ending(varied))
    if agreed is not None and agreed > 0 and mean(varied[agreed:]) <= base / 2:
        return agreed
    place = lasting(above(-smoothed(varied), -THRESHOLDS.same_said))
    return None if place is None or end > THRESHOLDS.same_said else dated(varied, place, base, end)


def agreeing_groups(seen: Evidence) -> Symptom | None:
    if (place := _agreement(seen)) is None:
        return None
    ends = (("all_right", ": all right"), ("all_wrong", ": all wrong"))
    what = next((told for name, told in ends if mean(ending(seen.of(name))) >= 0.5), "")
    text = f"in {mean(_alike(seen)[0][place:]):.0%} of the groups all members have the same reward{what}"
    return Symptom(seen.steps[place], text, example(seen, place, lambda e: e.scored))


def _alike(seen: Evidence) -> tuple[Floats, Floats]:
    """Of each step the share of groups without a difference, and how many groups there were."""
    if seen.setting("algorithm.refill.max_extra_groups", 0) + seen.setting("algorithm.refill.oversample", 0):
        # Groups that agree are replaced; those that were not found are missing.
        count = np.full(len(seen.rows), float(seen.setting("algorithm.groups_per_step", 32)))
        return seen.of("missing_groups") / count, count
    return seen.of("same_rewards"), np.nan_to_num(seen.of("groups"))


def _agreement(seen: Evidence) -> int | None:
    """From which place on groups have no differences in reward, to the end; None where they have, need none, or have
    been learned.

    Of enough groups: that all agree from the beginning on; that they do so far more often than before; or that a
    difference is too rare to learn from, whatever was before.
    """
    needs_none = (
        seen.setting("algorithm.distillation") is not None
        or seen.setting("algorithm.loss") == "cross_entropy"
        or seen.setting("algorithm.group_size", 8) < 2
        or seen.setting("algorithm.advantage", "grpo") in ("gae", "none")
    )
    if needs_none or (seen.success_rose and mean(ending(seen.of("all_right"))) >= 0.5):
        return None
    share, count = _alike(seen)
    total, same = (np.cumsum(each[::-1])[::-1] for each in (count, np.nan_to_num(share) * count))
    for place in range(len(count) - 2):
        n, k = round(total[place]), round(same[place])
        if n < (24 if seen.live else 12):
            return None
        if k < 0.95 * n:
            continue
        before, agreed = total[0] - n, same[0] - k
        more = before >= 8 and binom.sf(k - 1, n, (agreed + 1) / (before + 2)) < THRESHOLDS.unlikely
        rare = binomtest(k, n).proportion_ci(0.98, "wilson").low >= THRESHOLDS.agree
        if (place == 0 and k == n) or more or rare:
            return place
    return None


def no_learning(seen: Evidence) -> Symptom | None:
    """What makes learning impossible, where nothing was learned."""
    if seen.success_rose or not seen.rows:
        return None
    if seen.setting("algorithm.shuffle_rewards", False):
        return Symptom(seen.steps[0], "rewards are dealt at random (algorithm.shuffle_rewards)")
    for name, least, text in (
        ("learning_rate", THRESHOLDS.still_rate, "the learning rates of all steps are {:.3g} together"),
        ("grad_norm", 1e-300, "every gradient is 0"),
        ("trained_tokens", 1e-300, "no step trained a token"),
    ):
        values = seen.of(name)
        if np.isfinite(values).sum() >= 3 and np.nansum(values) < least:
            return Symptom(seen.steps[0], text.format(np.nansum(values)))
    if seen.moved is not None and seen.moved < THRESHOLDS.still_nats and engine_mismatch(seen) is None:
        text = "the same tokens after the same text have the same log-probabilities at the beginning and at the end"
        return Symptom(seen.steps[0], f"{text}: the policy that samples does not change")
    return None


# ---- outcomes that are bad, whatever the cause


def _bad(
    seen: Evidence, one: RunOutcome, text: str, fits: Callable[[SeenEpisode], bool] = lambda e: not e.success
) -> Symptom:
    return Symptom(one.step, text, example(seen, int(np.searchsorted(seen.steps, one.step)), fits))


def fewer_scored(seen: Evidence) -> Symptom | None:
    if (one := seen.outcome("scored")) is None or one.change >= 0:
        return None
    ended = Counter(e.outcome for e in seen.episodes or () if e.step >= one.step and not e.scored)
    kinds = "".join(f", {count} {kind}" for kind, count in ended.most_common(3))
    return _bad(seen, one, f"the share of episodes that are {one}{kinds}", lambda e: not e.scored)


def fell(seen: Evidence) -> Symptom | None:
    worse = [one for one in seen.outcomes if one.change < 0 and one.name != "scored"]
    return _bad(seen, min(worse, key=lambda one: one.step), "; ".join(map(str, worse))) if worse else None


def _outruns(one: RunOutcome, other: RunOutcome) -> bool:
    """Whether the first rose, the other did not, and they are apart by more than the noise of both."""
    apart = (one.after - one.before) - (other.after - other.before)
    error = math.hypot(one.high - one.low, other.high - other.low) / (2 * 1.96)
    return one.change > 0 >= other.change and apart > 2.6 * error


def not_held_out(seen: Evidence) -> Symptom | None:
    """Training's tasks alone are learned."""
    trained, held_out = seen.outcome("success"), [one for one in seen.outcomes if one.name.startswith("held-out")]
    if trained is None or not held_out:
        return None
    most = max(held_out, key=lambda one: one.high)
    early = most.step <= seen.steps[0] + 0.1 * len(seen.rows)  # evaluated before anything was learned
    return _bad(seen, trained, f"in training {trained}, but {most}") if early and _outruns(trained, most) else None


def reward_alone(seen: Evidence) -> Symptom | None:
    reward, success = seen.outcome("reward"), seen.outcome("success")
    if reward is None or success is None or seen.success_rose or success.after < 0.05:
        return None  # a policy that never succeeds may still have to earn its first success by a partial reward
    return _bad(seen, reward, f"{reward}, but {success}") if _outruns(reward, success) else None


def leap(seen: Evidence) -> Symptom | None:
    one, success = seen.outcome("success"), seen.of("success")
    for at in range(3, len(success) - 2) if one is not None and one.change > 0 and len(success) >= 10 else ():
        before, after = success[:at], success[at:]
        noise = math.sqrt((np.nanvar(before) * len(before) + np.nanvar(after) * len(after)) / (len(success) - 2))
        if min(mean(after[:2]) - mean(before[-2:]), mean(after) - mean(before)) >= max(THRESHOLDS.leaps, 4 * noise):
            text = (
                f"success leapt from {mean(before):.2f} to {mean(after):.2f} in one step, and is steady on both sides"
            )
            return Symptom(seen.steps[at], text, example(seen, at, lambda e: e.success))
    return None


def flat(seen: Evidence) -> Symptom | None:
    informed, one = np.nansum((1 - seen.of("same_rewards")) * seen.of("groups")), seen.outcome("reward")
    few = len(seen.rows) < 20 or informed < THRESHOLDS.informed
    if one is None or few or seen.live or any(one.change for one in seen.outcomes) or one.before > 0.9:
        return None
    if one.high > min(0.15 * (1 - one.before), 0.3 * abs(one.before)):
        return None
    return _bad(seen, one, f"after {len(seen.rows)} steps and {informed:.0f} groups with a difference, {one}")


CAUSES = tuple(
    Cause(name, globals()[name], **texts | {"evidence": texts["evidence"].format_map(vars(THRESHOLDS))})
    for name, texts in DATA["causes"].items()
)
"""In causal order."""
