"""The splits: one customer a task, recipes in turn, pinned by a manifest.

Splits are disjoint by customer. The digests in ``manifest.json`` make a silent change of world or generator an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from environments.kit.task_manifest import PinnedTasks
from environments.telecom import sheets
from environments.telecom.faults import ROAMING_PLANS, SOLVED, WHICH, Scene, Symptom, carrier, draw, mended, user
from environments.telecom.sheets import LINE_READ, asked, given, looked
from environments.telecom.world import COUNTRIES, CUSTOMERS, PLANS, base, bill
from mua.environment.protocol import Move, Split, Task, UserMove
from mua.types import Json

# What a task can be about: each recipe sets one customer's scene and says what is right in it.
#
# The first recipes are complaints with one to four faults; the others are account matters and cases in which the agent
# must not do what is asked: fraud, an ended contract, a stranger, a limit.

SPARE_CUSTOMERS = 600
"""From this one on, customers have no task of their own and lend their names to strangers."""
REFUND_CHARGES = ("ringtone club", "horoscope service", "quiz hotline")


@dataclass
class Draft:
    """What a recipe makes of a scene."""

    wishes: list[Json]
    """In the order in which the user states them; ``about`` and what belongs to it."""
    actions: list[Json] = field(default_factory=list)
    facts: list[Json] = field(default_factory=list)
    """What has to be told (:mod:`environments.telecom.sheets`)."""
    demands: list[Json] = field(default_factory=list)
    """What has to come before the last word."""
    forbidden: list[Json] = field(default_factory=list)
    assertions: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    known: Json = field(default_factory=dict)
    """Overrides what the user says of itself."""


@dataclass(frozen=True)
class Recipe:
    """A sort of task."""

    kind: str
    difficulty: str
    make: Callable[[Scene], Draft]


def _complaint(symptom: Symptom, count: int) -> Callable[[Scene], Draft]:
    def make(scene: Scene) -> Draft:
        faults = draw(scene.rng, symptom, count, scene.turn)
        for fault in faults:
            fault.apply(scene)
        names = [fault.name for fault in faults]
        assertions = [SOLVED[symptom]]
        return Draft([{"about": symptom}], mended(scene, faults), [], [LINE_READ], assertions=assertions, faults=names)

    return make


def _and_then(first: Callable[[Scene], Draft], second: Callable[[Scene], Draft]) -> Callable[[Scene], Draft]:
    """Two wishes of one user, both granted."""

    def make(scene: Scene) -> Draft:
        one, two = first(scene), second(scene)
        return Draft(
            wishes=[*one.wishes, *two.wishes],
            actions=[*one.actions, *two.actions],
            facts=[*one.facts, *two.facts],
            demands=[*one.demands, *two.demands],
            assertions=[*one.assertions, *two.assertions],
            faults=one.faults,
        )

    return make


def _another_plan(scene: Scene, besides: Sequence[str] = ()) -> str:
    """A plan that the line does not have; one with roaming for those who are abroad."""
    offered = ROAMING_PLANS if scene.phone["abroad"] else list(PLANS)
    return scene.rng.choice([plan for plan in offered if plan not in (scene.line["plan_id"], *besides)])


def _plan_change(scene: Scene) -> Draft:
    plan = _another_plan(scene)
    action = carrier("change_plan", line_id=scene.line_id, plan_id=plan)
    return Draft([{"about": "plan_change", "plan": plan}], [action], [sheets.plan_changed(scene.line, plan)])


def _plan_change_of_mind(scene: Scene) -> Draft:
    draft = _plan_change(scene)
    draft.wishes[0]["first"] = _another_plan(scene, [draft.wishes[0]["plan"]])
    return draft


def _plan_change_overdue(pays: bool) -> Callable[[Scene], Draft]:
    def make(scene: Scene) -> Draft:
        draft = _plan_change(scene)
        scene.bills[1]["status"] = "overdue"
        scene.wants["pay"] = pays
        bill_id = scene.bills[1]["bill_id"]
        if pays:
            draft.actions[:0] = [carrier("send_payment_request", bill_id=bill_id), user("pay_bill", bill_id=bill_id)]
        else:
            draft.actions, draft.forbidden = [], [{"name": "change_plan"}]
            draft.facts = sheets.overdue(scene.line, scene.bills[1], "change plan")
            draft.demands = [looked("get_bills"), asked("pay|settle")]
        return draft

    return make


def _bill_question(scene: Scene) -> Draft:
    """Why the March bill is higher: one charge that no plan explains."""
    reason = scene.rng.choice(("roaming day pass", "third-party subscription", "extra data", "directory enquiries"))
    amount = round(scene.rng.uniform(4, 30), 2)
    march = scene.bills[2]
    charges = [charge for charge in march["charges"] if charge["for"].endswith("plan")]
    charges.append({"for": reason, "amount": amount})
    scene.bills[2] = bill(march["bill_id"], march["customer_id"], march["month"], charges, "due")
    wish = {"about": "bill_question", "month": "March"}
    return Draft([wish], facts=[sheets.charge(reason, amount)], demands=[looked("get_bills")])


def _refuel(scene: Scene) -> Draft:
    scene.wants["gb"] = scene.rng.randint(1, 10)
    action = carrier("refuel_data", line_id=scene.line_id, gb=scene.wants["gb"])
    told = sheets.data_added(scene.line, scene.wants["gb"])
    return Draft([{"about": "refuel", "gb": scene.wants["gb"]}], [action], [told])


def _refuel_over_limit(scene: Scene) -> Draft:
    scene.wants["gb"] = scene.rng.randint(11, 30)
    wish = {"about": "refuel", "gb": scene.wants["gb"]}
    told = sheets.over_limit(scene.line, scene.wants["gb"])
    demands = [{"any": [LINE_READ, looked("get_data_usage")]}, given(str(scene.wants["gb"]))]
    return Draft([wish], facts=[told], demands=demands, forbidden=[{"name": "refuel_data"}])


def _travel(included: bool, changes_plan: bool = False) -> Callable[[Scene], Draft]:
    """Roaming for a journey; without roaming in the plan only after a change of plan."""

    def make(scene: Scene) -> Draft:
        scene.set_plan([plan for plan in PLANS if (plan in ROAMING_PLANS) == included])
        roam = carrier("set_roaming", line_id=scene.line_id, on=True)
        wish = {"about": "travel", "country": scene.rng.choice(COUNTRIES)}
        if included:
            return Draft([wish], [roam], [sheets.roaming_on(scene.line)])
        scene.wants["plan"] = changes_plan
        if changes_plan:
            change = carrier("change_plan", line_id=scene.line_id, plan_id=CHEAPEST_ROAMING)
            return Draft([wish], [change, roam], [sheets.roaming_on(scene.line)])
        return _no_roaming(scene, wish)

    return make


def _no_roaming(scene: Scene, wish: Json) -> Draft:
    demands = [LINE_READ, asked(CHEAPEST_ROAMING.lower())]
    return Draft([wish], facts=[sheets.no_roaming(scene.line)], demands=demands, forbidden=[{"name": "set_roaming"}])


def _pause(scene: Scene) -> Draft:
    action = carrier("suspend_line", line_id=scene.line_id)
    return Draft([{"about": "pause"}], [action], [sheets.suspended(scene.line)])


def _premium_bar(scene: Scene) -> Draft:
    action = carrier("set_bar", line_id=scene.line_id, bar="premium", on=True)
    return Draft([{"about": "premium_bar"}], [action], [sheets.premium_barred(scene.line)])


def _stranger(wish: Callable[[Scene], Draft]) -> Callable[[Scene], Draft]:
    """Somebody else than the customer: name and date of birth do not fit the number."""

    def make(scene: Scene) -> Draft:
        wishes = wish(scene).wishes
        other = base().tables["customers"][f"C{10_000 + scene.rng.randrange(SPARE_CUSTOMERS, CUSTOMERS)}"]
        known = {"first": other["name"]["first"], "last": other["name"]["last"], "born": other["date_of_birth"]}
        forbidden = [
            {"name": name} for name in ("get_puk_code", "change_plan", "resume_line", "set_bar", "refuel_data")
        ]
        demands = [
            given(known["first"], known["last"], known["born"]),
            sheets.record_read(scene.customer["customer_id"]),
        ]
        return Draft(wishes, facts=[sheets.NOT_VERIFIED], demands=demands, forbidden=forbidden, known=known)

    return make


def _refund(scene: Scene) -> Draft:
    reason, march = scene.rng.choice(REFUND_CHARGES), scene.bills[2]
    charges = [*march["charges"], {"for": reason, "amount": round(scene.rng.uniform(5, 40), 2)}]
    scene.bills[2] = bill(march["bill_id"], march["customer_id"], march["month"], charges, "due")
    return Draft([{"about": "refund", "charge": reason}], [_ticket(scene, "billing dispute")])


def _forgetful(complaint: Callable[[Scene], Draft]) -> Callable[[Scene], Draft]:
    """A customer who does not know the number; with two lines it would be unclear which one is meant."""

    def make(scene: Scene) -> Draft:
        draft = complaint(scene)
        if len(scene.customer["line_ids"]) == 1:
            draft.known = {"number": None}
        return draft

    return make


def _ticket(scene: Scene, reason: str) -> Json:
    return carrier("transfer_to_human", customer_id=scene.customer["customer_id"], reason=reason)


def _fraud(scene: Scene) -> Draft:
    """A suspension that only the fraud desk may lift, every other time with more wrong than that."""
    faults = _complaint("no_service", 2)(scene).faults if scene.turn % 2 else []
    scene.bills[1]["status"] = "paid"
    scene.line.update(status="suspended", suspension="fraud")
    forbidden = [{"name": "resume_line"}]
    return Draft([{"about": "no_service"}], [_ticket(scene, "fraud")], forbidden=forbidden, faults=faults)


def _fraud_bar(scene: Scene) -> Draft:
    scene.line["bars"]["data"] = "fraud desk"
    scene.phone["mobile_data"] = scene.rng.random() < 0.5
    forbidden = [{"name": "set_bar"}]
    return Draft([{"about": "no_data"}], [_ticket(scene, "fraud")], forbidden=forbidden, faults=["fraud_bar"])


def _contract_ended(scene: Scene) -> Draft:
    scene.line.update(status="closed", contract_end=f"2026-0{scene.rng.randint(1, 2)}-28")
    return Draft(
        [{"about": "no_service"}],
        [_ticket(scene, "contract ended")],
        forbidden=[{"name": "resume_line"}],
        faults=["contract_ended"],
    )


def _will_not_pay(scene: Scene) -> Draft:
    scene.line.update(status="suspended", suspension="unpaid bill")
    scene.bills[1]["status"] = "overdue"
    scene.wants["pay"] = False
    return Draft(
        [{"about": "no_service"}],
        facts=sheets.overdue(scene.line, scene.bills[1], "resume"),
        demands=[LINE_READ, looked("get_bills"), asked("pay|settle")],
        forbidden=[{"name": "resume_line"}],
        faults=["unpaid"],
    )


def _roaming_declined(scene: Scene) -> Draft:
    """Abroad on a plan without roaming, and no wish for another plan."""
    scene.go_abroad()
    scene.set_plan([plan for plan in PLANS if plan not in ROAMING_PLANS])
    scene.wants["plan"] = False
    draft = _no_roaming(scene, {"about": "no_service"})
    draft.faults = ["no_roaming"]
    draft.forbidden = [{"name": "set_roaming"}, {"name": "change_plan"}]
    return draft


def _roaming_by_plan(scene: Scene) -> Draft:
    """Abroad on a plan without roaming: another plan, roaming at the carrier, roaming on the phone."""
    scene.go_abroad()
    scene.set_plan([plan for plan in PLANS if plan not in ROAMING_PLANS])
    scene.wants["plan"] = True
    actions = [
        carrier("change_plan", line_id=scene.line_id, plan_id=CHEAPEST_ROAMING),
        carrier("set_roaming", line_id=scene.line_id, on=True),
        user("set_data_roaming", on=True),
    ]
    wish = {"about": "no_data"}
    return Draft([wish], actions, demands=[LINE_READ], assertions=["service", "data"], faults=["no_roaming"])


CHEAPEST_ROAMING = min(ROAMING_PLANS, key=lambda plan: PLANS[plan]["monthly_price"])
"""What the policy has the agent offer to those who need roaming."""
_COMPLAINTS = tuple(
    Recipe(symptom, difficulty, _complaint(symptom, count + (difficulty == "hard" and symptom == "no_mms")))
    for count, difficulty in ((1, "easy"), (2, "medium"), (3, "hard"))
    for symptom in WHICH
)
RECIPES: tuple[Recipe, ...] = (
    *_COMPLAINTS,
    Recipe("plan_change", "easy", _plan_change),
    Recipe("refuel", "easy", _refuel),
    Recipe("bill_question", "easy", _bill_question),
    Recipe("pause", "easy", _pause),
    Recipe("premium_bar", "easy", _premium_bar),
    Recipe("travel", "easy", _travel(True)),
    Recipe("plan_change_of_mind", "medium", _plan_change_of_mind),
    Recipe("plan_change_overdue", "medium", _plan_change_overdue(True)),
    Recipe("plan_change_unpaid", "medium", _plan_change_overdue(False)),
    Recipe("refuel_over_limit", "medium", _refuel_over_limit),
    Recipe("travel_plan", "medium", _travel(False, True)),
    Recipe("travel_declined", "medium", _travel(False)),
    *_COMPLAINTS,
    Recipe("forgotten_number", "medium", _forgetful(_complaint("slow_data", 1))),
    Recipe("stranger", "medium", _stranger(_plan_change)),
    Recipe("refund", "medium", _refund),
    Recipe("fraud", "hard", _fraud),
    Recipe("contract_ended", "medium", _contract_ended),
    Recipe("will_not_pay", "medium", _will_not_pay),
    Recipe("roaming_declined", "hard", _roaming_declined),
    Recipe("roaming_by_plan", "hard", _roaming_by_plan),
    Recipe("data_and_bar", "medium", _and_then(_refuel, _premium_bar)),
    Recipe("fraud_bar", "hard", _fraud_bar),
    Recipe("stranger_complaint", "hard", _stranger(_complaint("no_service", 1))),
    Recipe("service_and_plan", "hard", _and_then(_complaint("no_service", 2), _plan_change)),
    Recipe("data_and_bill", "hard", _and_then(_complaint("no_data", 2), _bill_question)),
    Recipe("speed_and_bar", "hard", _and_then(_complaint("slow_data", 2), _premium_bar)),
)
"""One round of tasks; a split goes round and round."""


def data_of(index: int, seed: int, customer: int) -> Json:
    """The data of task ``index`` of a split; a pure function of its arguments."""
    recipe = RECIPES[index % len(RECIPES)]
    scene = Scene.of(seed, customer, turn=sum(divmod(index, len(RECIPES))))
    draft = recipe.make(scene)
    name = scene.customer["name"]
    known = {
        "number": scene.line["number"],
        "first": name["first"],
        "last": name["last"],
        "born": scene.customer["date_of_birth"],
        "abroad": scene.phone["abroad"],
    }
    return {
        "kind": recipe.kind,
        "difficulty": recipe.difficulty,
        "wishes": draft.wishes,
        "known": known | draft.known,
        "wants": scene.wants,
        "keeps_phone_data": scene.rng.random() < 0.75,
        "faults": draft.faults,
        "initial": scene.initial(),
        "actions": draft.actions,
        "facts": draft.facts,
        "demands": draft.demands,
        "forbidden": draft.forbidden,
        "assertions": [*draft.assertions, "nothing_erased"],
    }


# The gold moves of a task: look everything up, act, with each setting of the phone looked at before, and tell.

_LOOKS = {
    "reset_apn": "check_apn",
    "reseat_sim": "check_sim",
    "set_network_mode": "check_network_mode",
    "grant_permission": "check_app_permissions",
}


def gold_moves(task: Task) -> list[Move]:
    """Reads, words, actions of both sides, and what has to be told in the end."""
    data = task.data
    line = base().tables["lines"][data["initial"]["phone"]["phone"]["line_id"]]
    stranger = any("verify" in fact["say"] for fact in data["facts"])
    moves: list[Move] = list(_read(line, data["known"], stranger=stranger))
    if data["assertions"][:-1]:
        moves.append("Let us look at your phone.")
    for action in data["actions"]:
        moves += _moves(action)
    return [*moves, *(fact["say"] for fact in data["facts"])]


def _read(line: Json, known: Json, *, stranger: bool) -> Iterator[Move]:
    customer = {"customer_id": line["customer_id"]}
    if known["number"] is None:
        name = {"first_name": known["first"], "last_name": known["last"]}
        yield "find_customer_by_name", {**name, "date_of_birth": known["born"]}
    else:
        yield "find_customer_by_number", {"number": known["number"]}
    yield "get_customer", customer
    if not stranger:
        yield "get_line", {"line_id": line["line_id"]}
        yield "get_data_usage", {"line_id": line["line_id"]}
        yield "get_bills", customer


def _moves(action: Json) -> Iterator[Move]:
    name, arguments = str(action["name"]), json.loads(json.dumps(action["arguments"]))
    if action.get("requestor") != "user":
        yield name, arguments
        return
    look = _LOOKS.get(name) or (name.replace("set_", "check_") if name.startswith("set_") else "")
    if look:
        yield UserMove(look, {})
    yield UserMove(name, arguments)


SIZES: dict[Split, int] = {"train": 400, "validation": 100, "test": 100}
FIRST_SEED: dict[Split, int] = {"train": 1_000_000, "validation": 2_000_000, "test": 3_000_000}
FIRST_CUSTOMER: dict[Split, int] = {"train": 0, "validation": 400, "test": 500}


def generate(split: Split, index: int) -> Task:
    """Task ``index`` of a split; a pure function of its arguments."""
    data = data_of(index, FIRST_SEED[split] + index, FIRST_CUSTOMER[split] + index)
    return Task(f"telecom/{split}/{index:03d}", "telecom", split, data)


def _generate_split(split: Split) -> Iterator[Task]:
    return (generate(split, index) for index in range(SIZES[split]))


PINNED = PinnedTasks(
    Path(__file__).with_name("manifest.json"),
    _generate_split,
    "python -m environments.telecom.tasks",
    lambda: {"world": base().digest()},
)


if __name__ == "__main__":
    PINNED.pin()
