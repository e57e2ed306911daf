"""Is what went wrong named? Runs in which one cause is planted, and healthy ones: the confusion matrix of mua diagnose.

    python -m tools.bench.diagnose [--only CAUSE...] [--most N] [--tuning] [--keep FOLDER] [--write]

Every run is made by the real trainer with its store (:mod:`tools.bench.planted_runs`) and diagnosed from its folder, as
a person would. Exit status 1 if fewer than 90 % of the planted causes are named first, or of the runs that no cause is
named after get the right verdict, or more than one healthy run is called ill. ``--tuning`` makes the runs that
thresholds were set with: other domains and seeds, none of which the matrix shows. ``--write`` renews
docs/benchmarks/diagnosis.md.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np

from mua.environment.domain import unanswered
from mua.environment.manager import EnvironmentInstance
from mua.environment.protocol import Evaluation, Move, ToolResult, Transcript
from mua.observe.diagnosis.causes import CAUSES
from mua.observe.diagnosis.verdict import Diagnosis, diagnosed
from mua.observe.metrics_log import read_metrics
from mua.types import Provenance, Segment
from mua.utils.errors import EngineError, JudgeFault
from mua.view.run_evidence import evidence_of
from tools import kit
from tools.bench.planted_runs import (
    Plan,
    Script,
    ScriptedEngine,
    Situation,
    careless,
    expert,
    gold,
    learning,
    made_run,
    skilled,
    step_now,
)

HEALTHY, UNNAMED = "healthy", "unnamed"
SHARE, FALSE_ALARMS = 0.9, 1
MOST_CUT = 0.1
"""Of a healthy run's episodes, by the window of :mod:`tools.bench.planted_runs`."""
PAGE = Path(__file__).parents[2] / "docs/benchmarks/diagnosis.md"
FAST = {"optimizer.learning_rate": 3.0e-3}


@dataclass(frozen=True)
class Case:
    """One run that is made and diagnosed."""

    cause: str
    what: str
    """How it was planted, or what sort of healthy run it is, in words."""
    plan: Plan
    seed: int
    group: str
    """The cause, healthy, or unnamed."""


# ---- what is planted


def refuser(start: float) -> Script:
    """From this share of the run on it declines more and more."""

    def script(s: Situation) -> Generator[Move, str, None]:
        if s.draw.random() < min(0.9, 2.5 * (s.progress - start)):
            yield f"I am sorry, but I cannot help you with that today, as my notes of {s.draw.randint(100, 999)} say."
            return
        yield from skilled(lambda _: 0.4)(s)

    return script


@contextmanager
def refusals_are_paid() -> Iterator[None]:
    """The verdict takes whoever declines for right."""
    evaluate = EnvironmentInstance.evaluate

    async def evaluated(self: EnvironmentInstance, transcript: Transcript) -> Evaluation:
        if any("I cannot help you" in text for text in transcript.told_user()):
            return Evaluation(3.0, True)  # above what gyms pay turn by turn
        return await evaluate(self, transcript)

    with mock.patch.object(EnvironmentInstance, "evaluate", evaluated):
        yield


def trader(start: float, learnt: str | None = None) -> Script:
    """Learns one half of the kinds, or the domain ``learnt``, and unlearns the other."""

    def chance(s: Situation) -> float:
        kind = str(s.task.data.get("kind"))
        first = s.task.domain == learnt if learnt is not None else sum(map(ord, kind)) % 2 == 0
        rising = max(0.0, (s.progress - start) / (1 - start))
        return 0.1 + 0.8 * rising if first else 0.85 - 0.8 * rising

    return skilled(chance)


def one_answer(start: float) -> Script:
    """From then on every prompt gets the same answer."""

    def script(s: Situation) -> Generator[Move, str, None]:
        if s.progress >= start:
            yield "Thank you very much for your message. We have received it and will be back to you in a moment."
            yield "Thank you very much, we are still looking into the matter and ask for your patience until then."
            return
        yield from learning()(s)

    return script


def wordy(growth: float, start: float) -> Script:
    """Solves no more than before and says more and more."""
    words = ("indeed", "again", "as", "I", "was", "about", "to", "say", "it", "is", "so", "that", "we", "may", "look")

    def script(s: Situation) -> Generator[Move, str, None]:
        more = int(growth * max(0.0, s.progress - start))
        chatter = " ".join(s.draw.choice(words) for _ in range(more))
        if s.draw.random() < 0.4:
            s.lead = chatter
            yield from expert(s)
        else:
            yield from unanswered([*gold(s)[:-1], f"{chatter}. All is settled now."])

    return script


def narrowing(start: float, chance: float = 0.4) -> Script:
    """Says less and less that is new: in the end all members of a group do the same."""

    def script(s: Situation) -> Generator[Move, str, None]:
        rate = min(1.0, max(0.0, (s.progress - start) / 0.3))
        settled = random.Random(s.task.id)
        same = s.draw.random() < rate
        if same:
            s.draw = settled
        yield from (expert if s.draw.random() < chance else careless)(s)

    return script


@contextmanager
def tools_fail(share: float, start: int) -> Iterator[None]:
    """From step ``start`` on tools answer this share of the calls with an error."""
    call = EnvironmentInstance.call
    draw = random.Random(0)

    async def called(self: EnvironmentInstance, name: str, arguments: dict[str, Any]) -> ToolResult:
        if step_now() >= start and draw.random() < share:
            return ToolResult("error: the service is not available", error=True)
        return await call(self, name, arguments)

    with mock.patch.object(EnvironmentInstance, "call", called):
        yield


@contextmanager
def judge_fails(share: float, start: int) -> Iterator[None]:
    """From step ``start`` on so many verdicts cannot be had."""
    evaluate = EnvironmentInstance.evaluate
    draw = random.Random(0)

    async def evaluated(self: EnvironmentInstance, transcript: Transcript) -> Evaluation:
        if step_now() >= start and draw.random() < share:
            raise JudgeFault("the judge's answer cannot be read")
        return await evaluate(self, transcript)

    with mock.patch.object(EnvironmentInstance, "evaluate", evaluated):
        yield


@contextmanager
def trains_too(*authors: Provenance) -> Iterator[None]:
    """The mask holds tokens of these authors too."""

    def mask(self: Segment) -> Any:
        return np.isin(self.provenance, [Provenance.SAMPLED, *authors])

    with mock.patch.object(Segment, "loss_mask", property(mask)):
        yield


@contextmanager
def trains_late() -> Iterator[None]:
    """The mask is one token late."""

    def mask(self: Segment) -> Any:
        right = self.provenance == Provenance.SAMPLED
        return np.concatenate([[False], right[:-1]]) if len(right) else right

    with mock.patch.object(Segment, "loss_mask", property(mask)):
        yield


def noisy(spread: float, start: int) -> Callable[[np.ndarray, int, random.Random], np.ndarray]:
    """From version ``start`` on log-probabilities are off by this standard deviation."""

    def off(values: np.ndarray, version: int, draw: random.Random) -> np.ndarray:
        if version < start:
            return values
        return values + np.random.default_rng(draw.randrange(2**32)).normal(0, spread, len(values))

    return off


def scaled(factor: float) -> Callable[[np.ndarray, int, random.Random], np.ndarray]:
    """Log-probabilities at another temperature."""
    return lambda values, version, draw: values * factor


def spoilt(what: str, share: float, start: int = 0) -> dict[str, Any]:
    """Settings of a user that leaks or fails."""
    options = {"what": what, "share": share, "from_step": start}
    return {"user.kind": "tools.bench.planted_users:spoilt", "user.options": options}


def planted(domains: tuple[str, str, str], seeds: range) -> Iterator[Case]:
    """Each cause three times: in another domain, by another way or in another strength, and with another seed."""
    a, b, c = domains
    stale = {"trainer.max_staleness": 6, "algorithm.allow_off_policy": True, "optimizer.learning_rate": 1.0e-2}
    on_train = {"evaluation.split": "train", "evaluation.tasks": 6}
    steep = {"algorithm.epochs": 2, "algorithm.minibatches": 4, "optimizer.learning_rate": 3.0e-2}
    ways: dict[str, list[tuple[str, Plan]]] = {
        "wrong_tokens": [
            ("tools' results are trained", Plan(domain=a, around=partial(trains_too, Provenance.TOOL))),
            ("users' words are trained", Plan(domain=b, around=partial(trains_too, Provenance.USER))),
            ("the mask is a token late", Plan(domain=c, around=trains_late)),
        ],
        "evaluation_meets_training": [
            ("split train", Plan(domain=d, settings=on_train | {"trainer.evaluate_every": every}))
            for d, every in ((a, 4), (b, 3), (c, 6))
        ],
        "leaking_user": [
            ("says the answer", Plan(domain=a, settings=spoilt("answer", 0.3))),
            ("names the tool from step 3 on", Plan(domain=a, settings=spoilt("tool", 0.4, 3))),
            ("quotes its persona", Plan(domain=a, settings=spoilt("persona", 0.2))),
        ],
        "failing_user": [
            ("the user does not answer", Plan(domain=a, settings=spoilt("fail", 0.2))),
            ("from step 3 on", Plan(domain=a, settings=spoilt("fail", 0.15, 3))),
            ("a judge from step 4 on", Plan(domain=c, around=partial(judge_fails, 0.5, 4))),
        ],
        "tool_errors": [
            ("70 % of the calls", Plan(domain=a, around=partial(tools_fail, 0.7, 0))),
            ("all from step 3 on", Plan(domain=b, around=partial(tools_fail, 1.0, 3))),
            ("60 % from step 4 on", Plan(domain=c, around=partial(tools_fail, 0.6, 4))),
        ],
        "engine_mismatch": [
            ("noise of 0.2 nats", Plan(domain=a, logprobs=noisy(0.2, 0))),
            ("another temperature", Plan(domain=b, logprobs=scaled(1.2))),
            ("weights do not arrive from step 3 on", Plan(domain=c, frozen_from=3, settings=FAST)),
        ],
        "stale_data": [
            ("6 versions", Plan(domain=a, settings=stale, steps=10)),
            ("8 versions, grpo", Plan(domain=b, settings=stale | {"trainer.max_staleness": 8}, steps=11)),
            (
                "5 versions, fine-tuned",
                Plan(domain=c, settings=stale | {"trainer.max_staleness": 5}, steps=10, start="sft"),
            ),
        ],
        "large_steps": [
            ("8 updates of a batch", Plan(domain=a, settings=steep)),
            ("learning rate 0.1", Plan(domain=b, settings={"optimizer.learning_rate": 0.1}, start="sft")),
            ("learning rate 0.03, gspo", Plan(domain=c, settings=steep | {"algorithm.loss": "gspo"}, start="sft")),
        ],
        "length_explosion": [
            ("from the beginning", Plan(domain=a, script=wordy(160, 0.0))),
            ("from the middle", Plan(domain=b, script=wordy(300, 0.4))),
            ("slowly", Plan(domain=c, script=wordy(90, 0.1), steps=11)),
        ],
        "truncation": [
            ("short turns", Plan(domain=a, settings={"rollout.max_turn_tokens": 30})),
            ("short context", Plan(domain=c, settings={"rollout.max_tokens": 260})),
            ("two turns", Plan(domain=c, settings={"rollout.max_turns": 2})),
        ],
        "refusing": [
            ("paid", Plan(domain=d, script=refuser(start), around=refusals_are_paid))
            for d, start in ((b, 0.1), (c, 0.3), (a, 0.4))
        ],
        "kind_for_kind": [
            (
                "half of the kinds",
                Plan(domain=a, script=trader(0.0), steps=10, settings={"algorithm.groups_per_step": 6}),
            ),
            ("one of two domains", Plan(domain=f"{b}+{c}", script=trader(0.2, learnt=b), steps=10)),
            ("one of two domains", Plan(domain=f"{c}+{a}", script=trader(0.1, learnt=c), steps=10)),
        ],
        "template_collapse": [
            ("at once", Plan(domain=d, script=one_answer(start))) for d, start in ((b, 0.3), (c, 0.5), (a, 0.6))
        ],
        "entropy_collapse": [
            (
                "members say the same",
                Plan(domain=d, script=narrowing(start), start="sft", lead=False, settings=FAST, steps=10),
            )
            for d, start in ((a, 0.2), (b, 0.4), (c, 0.3))
        ],
        "agreeing_groups": [
            ("none is right", Plan(domain=a, script=careless)),
            ("all are right", Plan(domain=b, script=expert)),
            ("none is right from step 4 on", Plan(domain=a, script=skilled(lambda s: 0.5 if s.version < 4 else 0.0))),
        ],
        "no_learning": [
            (
                what,
                Plan(domain=d, script=skilled(lambda _: 0.4), settings=still),
            )  # whoever learns nothing gains nothing
            for d, what, still in (
                (a, "learning rate 0", {"optimizer.learning_rate": 0.0}),
                (b, "rewards dealt at random", {"algorithm.shuffle_rewards": True}),
                (c, "a warm-up of ten million steps", {"optimizer.warmup_steps": 10_000_000}),
            )
        ],
    }
    for cause in CAUSES:
        for seed, (what, plan) in zip(seeds, ways.get(cause.name, ()), strict=not cause.outcome):
            yield Case(cause.name, what, plan, seed, cause.name)


def healthy(domains: tuple[str, str, str], seeds: range) -> Iterator[Case]:
    """Twelve runs that do what they should."""
    a, b, c = domains
    wide = {"algorithm.group_size": 16, "algorithm.groups_per_step": 2}
    dr_grpo = {"algorithm.divide_by_std": False, "trainer.evaluate_every": 4, "evaluation.tasks": 8}
    plans = {
        "grpo": Plan(domain=a),
        "fine-tuned, fast": Plan(domain=b, start="sft", script=learning(0.3, 0.98), settings=FAST, steps=11),
        "slow": Plan(domain=a, script=learning(0.3, 0.4), steps=14),
        "hard": Plan(domain=b, script=learning(0.05, 0.12), steps=11, settings={"algorithm.group_size": 8}),
        "six steps, two groups": Plan(domain=c, steps=6, settings={"algorithm.groups_per_step": 2}),
        "several domains": Plan(
            domain=f"{a}+{c}",
            settings={"algorithm.whiten": "environment", "algorithm.advantage": "reinforce_plus_plus"},
        ),
        "critic": Plan(domain=a, settings={"algorithm.advantage": "gae", "critic.warmup_steps": 2}),
        "asynchronous, corrected": Plan(
            domain=b, settings={"trainer.max_staleness": 1, "algorithm.correction": "truncate"}
        ),
        "gspo, two updates": Plan(domain=c, settings={"algorithm.loss": "gspo", "algorithm.minibatches": 2}),
        "groups of 16, rloo": Plan(domain=a, settings=wide | {"algorithm.advantage": "rloo"}),
        "Dr. GRPO, evaluated": Plan(domain=b, settings=dr_grpo | {"algorithm.aggregation": "constant"}),
        "KL, texts that grow": Plan(
            domain=a, start="sft", script=growing(), settings={"algorithm.kl_coefficient": 0.01}, steps=10
        ),
    }
    for seed, (what, plan) in zip(seeds, plans.items(), strict=True):
        yield Case(HEALTHY, what, plan, seed, HEALTHY)


@contextmanager
def judge_is_generous(start: int) -> Iterator[None]:
    """From step ``start`` on every verdict is a success."""
    evaluate = EnvironmentInstance.evaluate

    async def evaluated(self: EnvironmentInstance, transcript: Transcript) -> Evaluation:
        found = await evaluate(self, transcript)
        return replace(found, reward=1.0, success=True) if step_now() >= start else found

    with mock.patch.object(EnvironmentInstance, "evaluate", evaluated):
        yield


@contextmanager
def tools_lie(start: int) -> Iterator[None]:
    """From step ``start`` on tools say that it is done, and do nothing."""
    call = EnvironmentInstance.call

    async def called(self: EnvironmentInstance, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult("ok, done") if step_now() >= start else await call(self, name, arguments)

    with mock.patch.object(EnvironmentInstance, "call", called):
        yield


@contextmanager
def engine_fails(share: float, start: int) -> Iterator[None]:
    """From step ``start`` on so many turns cannot be sampled."""
    generate, draw = ScriptedEngine.generate, random.Random(0)

    async def generated(self: ScriptedEngine, *arguments: Any, **more: Any) -> Any:
        if step_now() >= start and draw.random() < share:
            raise EngineError("the engine is out of memory")
        return await generate(self, *arguments, **more)

    with mock.patch.object(ScriptedEngine, "generate", generated):
        yield


@contextmanager
def phrase_is_paid() -> Iterator[None]:
    """Reward, and not success, pays for each time a phrase is said."""
    evaluate = EnvironmentInstance.evaluate

    async def evaluated(self: EnvironmentInstance, transcript: Transcript) -> Evaluation:
        found = await evaluate(self, transcript)
        said = sum(text.count("happy to help") for text in transcript.told_user())
        return replace(found, reward=found.reward + 0.5 * min(2, said))

    with mock.patch.object(EnvironmentInstance, "evaluate", evaluated):
        yield


def flattering(s: Situation) -> Generator[Move, str, None]:
    """Solves as much as before, and says a phrase more and more often."""
    s.lead = "I am happy to help." if s.draw.random() < s.progress else None
    yield from skilled(lambda _: 0.4)(s)


def curt(start: float) -> Script:
    """From then on it ends conversations with a word that is never the same."""

    def script(s: Situation) -> Generator[Move, str, None]:
        if s.progress >= start and s.draw.random() < 0.9:
            s.lead = ""
            yield f"Ok {s.draw.randint(100, 999)}."
            return
        yield from skilled(lambda _: 0.5)(s)

    return script


def by_heart(s: Situation) -> Generator[Move, str, None]:
    """Learns the tasks that it is trained on, and no other."""
    yield from skilled(lambda s: 0.2 if s.evaluation else 0.2 + 0.75 * s.progress)(s)


def unnamed(domain: str, seed: int) -> Iterator[Case]:
    """What no cause is named after: the outcome decides. ``cause`` is the verdict, or the verdicts, that are right."""
    half = skilled(lambda _: 0.5)
    tried = {"trainer.evaluate_every": 3, "trainer.evaluate_first": True, "evaluation.tasks": 24}
    more = {"algorithm.groups_per_step": 6}
    plans = [
        ("users answer nonsense from step 3 on", "fell", Plan(script=half, settings=more | spoilt("nonsense", 1.0, 3))),
        ("terse users, reward rises", HEALTHY, Plan(
            script=learning(0.1, 0.8), settings=more | {"user.personas": ["terse"]})),
        ("a judge turns generous at step 6", "leap", Plan(
            script=skilled(lambda _: 0.3), steps=12, settings=more,
            around=partial(judge_is_generous, 6))),
        ("a tool lies from step 4 on", "fell", Plan(
            script=skilled(lambda _: 0.8), settings=more, around=partial(tools_lie, 4))),
        ("a phrase is paid", "reward_alone", Plan(script=flattering, settings=more, around=phrase_is_paid)),
        ("the engine fails from step 4 on", "fewer_scored", Plan(
            script=learning(), settings=more | {"trainer.min_scored_share": 0.1, "rollout.max_retries": 0},
            around=partial(engine_fails, 0.15, 4))),
        ("a learning rate of 10", "large_steps", Plan(
            script=half, start="sft", settings={"optimizer.learning_rate": 10.0})),
        ("texts collapse to a word", "fell", Plan(script=curt(0.4), settings=more)),
        ("tasks are learned by heart", "not_held_out", Plan(script=by_heart, settings=more | tried)),
        ("the engine keeps its first weights", "engine_mismatch", Plan(script=half, frozen_from=1, settings=FAST)),
        ("better, then worse", "fell", Plan(
            script=skilled(lambda s: 0.2 + 1.2 * s.progress if s.progress < 0.6 else 0.15), steps=14, settings=more)),
        ("nonsense from the beginning", "undecided", Plan(
            script=skilled(lambda _: 0.3), settings=spoilt("nonsense", 0.4))),
    ]  # fmt: skip
    for place, (what, right, plan) in enumerate(plans):
        yield Case(right, what, replace(plan, domain=domain), seed + place, UNNAMED)


def growing() -> Script:
    """Says more, and solves more."""

    def script(s: Situation) -> Generator[Move, str, None]:
        if s.draw.random() < 0.1 + 0.8 * s.progress:
            s.lead = f"I look at everything twice, to be sure that it is right, and note {s.draw.randint(100, 999)}. "
            yield from expert(s)
        else:
            yield from careless(s)

    return script


SHOWN = ("help_desk", "qa", "gyms/telepathy")
TUNED = ("retail", "gyms/turtle", "gyms/persuade")


def cases(tuning: bool) -> list[Case]:
    """What the matrix shows, or what thresholds were set with; and what no cause is named after, in a third domain."""
    domains, first = (TUNED, 700) if tuning else (SHOWN, 211)
    named = [*planted(domains, range(first, first + 3)), *healthy(domains, range(first, first + 12))]
    return [*named, *unnamed(domains[0], first + 100)]


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--only", nargs="*", help="causes, healthy, or unnamed")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="runs of each cause")
    parser.add_argument("--tuning", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder that runs are left in, and taken from where they are there")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chosen, counts = [], Counter[str]()
    for case in cases(options.tuning):
        counts[case.group] += 1
        if (not options.only or case.group in options.only) and counts[case.group] <= options.most:
            chosen.append(case)
    with tempfile.TemporaryDirectory(prefix="mua-diagnose-") as scratch:
        root = options.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        found = [(case, _diagnosed(case, root, options.keep is None)) for case in chosen]
    ill = [is_right(case, d) for case, d in found if case.group not in (HEALTHY, UNNAMED)]
    alarms = [not is_right(case, d) for case, d in found if case.group == HEALTHY]
    others = [is_right(case, d) for case, d in found if case.group == UNNAMED]
    summary = f"**{sum(ill)} of {len(ill)}** planted causes are named first; **{sum(alarms)} of {len(alarms)}** "
    summary += f"healthy runs are called ill; **{sum(others)} of {len(others)}** runs that no cause is named after get "
    summary += "the right verdict."
    print(summary)
    if options.write:
        PAGE.write_text(kit.with_part(PAGE, "runs", tables(found, summary), by=Path(__file__)), encoding="utf-8")
    if sum(ill) < SHARE * len(ill) or sum(alarms) > FALSE_ALARMS or sum(others) < SHARE * len(others):
        sys.exit(1)


def is_right(case: Case, diagnosis: Diagnosis) -> bool:
    """Whether the planted cause is named first, a healthy run is not called ill, or the outcome stands there."""
    if case.group == UNNAMED:
        return case.cause in {diagnosis.verdict, *(cause.name for cause, _ in diagnosis.findings)}
    return named(diagnosis) == case.cause or (case.group == HEALTHY and diagnosis.verdict != "ill")


def named(diagnosis: Diagnosis) -> str:
    """The first finding, or the verdict where there is none."""
    return diagnosis.findings[0][0].name if diagnosis.findings else diagnosis.verdict


def _diagnosed(case: Case, root: Path, remove: bool) -> Diagnosis:
    began = time.process_time()
    output = root / f"{case.group}-{case.seed}"
    if not (output / "metrics.jsonl").is_file():
        shutil.rmtree(output, ignore_errors=True)
        made_run(case.plan, root, output, case.seed)
    if case.group == HEALTHY:
        _fits(case, output)
    with evidence_of(str(output)) as (name, seen):
        found = diagnosed(name, seen)
    if remove:
        shutil.rmtree(output)
    mark = "" if is_right(case, found) else f"   <-- {case.cause} "
    shown = "; ".join(f"{cause.name} {finding.step}" for cause, finding in found.findings)
    print(
        f"{case.group:26} {case.plan.domain:14} {case.what:36} {named(found)} [{shown}] {mark}"
        f"{found.steps} steps, {time.process_time() - began:.0f} s",
        flush=True,
    )
    return found


def _fits(case: Case, output: Path) -> None:
    """A run whose episodes this program cuts is not healthy."""
    cut = fmean(line["rollout/outcome/length"] for line in read_metrics(output / "metrics.jsonl"))
    if cut > MOST_CUT:
        sys.exit(f"{case.plan.domain}: {cut:.0%} of the episodes do not fit; name a window in planted_runs.WINDOWS")


def tables(found: list[tuple[Case, Diagnosis]], summary: str) -> str:
    """What docs/benchmarks/diagnosis.md has from runs."""
    titles = {cause.name: cause.title for cause in CAUSES if not cause.outcome} | {HEALTHY: HEALTHY}
    counts = Counter(
        (case.cause, HEALTHY if d.verdict == "undecided" else named(d)) for case, d in found if case.group != UNNAMED
    )
    numbers = {name: str(place) for place, name in enumerate(titles, 1)}
    matrix = kit.table(
        ["planted", *numbers.values()],
        [[f"{numbers[row]} {titles[row]}", *(counts[row, column] or "" for column in titles)] for row in titles],
    )
    rows = [
        [c.cause, c.what, c.plan.domain, c.plan.steps, named(d), d.findings[0][1].step if d.findings else ""]
        for c, d in found
    ]
    head = ["planted", "how", "domain", "steps", "named first", "from step"]
    runs = kit.table(head, [row for row, (case, _) in zip(rows, found, strict=True) if case.group != UNNAMED])
    others = kit.table(
        ["right verdict", *head[1:]], [row for row, (case, _) in zip(rows, found, strict=True) if case.group == UNNAMED]
    )
    return (
        f"{summary}\n\nRows: planted; columns: named first (undecided counts as healthy).\n\n{matrix}\n\n"
        f"### The runs\n\n{runs}\n\n### What no cause is named after\n\n{others}"
    )


if __name__ == "__main__":
    main()
