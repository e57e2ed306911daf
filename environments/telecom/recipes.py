"""What a task can be about: each recipe sets one customer's scene and says what is right in it.

The first recipes are complaints with one to four faults; the others are account matters and cases in which the agent
must not do what is asked: fraud, an ended contract, a stranger, a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from environments.telecom.faults import ROAMING_PLANS, SOLVED, WHICH, Scene, Symptom, carrier, draw, mended, user
from environments.telecom.world import COUNTRIES, CUSTOMERS, PLANS, base, bill
from mua.environment.statements import CANNOT, Statement
from mua.types import Json

REFUSALS: dict[str, Statement] = {
    "identity": [["verify", "match", "identity"], list(CANNOT)],
    "overdue": [["overdue", "unpaid", "not paid", "not been paid"], list(CANNOT)],
    "roaming": ["roaming", list(CANNOT)],
    "limit": ["10 gb", list(CANNOT)],
}
"""What a refused user has to be told, by the reason."""
SPARE_CUSTOMERS = 600
"""From this one on, customers have no task of their own and lend their names to strangers."""
REFUND_CHARGES = ("ringtone club", "horoscope service", "quiz hotline")


@dataclass
class Draft:
    """What a recipe makes of a scene."""

    wishes: list[Json]
    """In the order in which the user states them; ``about`` and what belongs to it."""
    actions: list[Json] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    refused: str | None = None
    """The reason in :data:`REFUSALS`, where all there is to do is to refuse."""
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
        return Draft([{"about": symptom}], mended(scene, faults), assertions=[SOLVED[symptom]], faults=names)

    return make


def _and_then(first: Callable[[Scene], Draft], second: Callable[[Scene], Draft]) -> Callable[[Scene], Draft]:
    """Two wishes of one user, both granted: a complaint first."""

    def make(scene: Scene) -> Draft:
        one, two = first(scene), second(scene)
        return Draft(
            wishes=[*one.wishes, *two.wishes],
            actions=[*one.actions, *two.actions],
            statements=[*one.statements, *two.statements],
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
    return Draft(
        [{"about": "plan_change", "plan": plan}], [carrier("change_plan", line_id=scene.line_id, plan_id=plan)]
    )


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
            draft.actions, draft.refused = [], "overdue"
            draft.forbidden = [{"name": "change_plan"}]
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
    return Draft([{"about": "bill_question", "month": "March"}], statements=[[f"{amount:.2f}", reason]])


def _refuel(scene: Scene) -> Draft:
    scene.wants["gb"] = scene.rng.randint(1, 10)
    action = carrier("refuel_data", line_id=scene.line_id, gb=scene.wants["gb"])
    return Draft([{"about": "refuel", "gb": scene.wants["gb"]}], [action])


def _refuel_over_limit(scene: Scene) -> Draft:
    scene.wants["gb"] = scene.rng.randint(11, 30)
    wish = {"about": "refuel", "gb": scene.wants["gb"]}
    return Draft([wish], refused="limit", forbidden=[{"name": "refuel_data"}])


def _travel(included: bool, changes_plan: bool = False) -> Callable[[Scene], Draft]:
    """Roaming for a journey; without roaming in the plan only after a change of plan."""

    def make(scene: Scene) -> Draft:
        scene.set_plan([plan for plan in PLANS if (plan in ROAMING_PLANS) == included])
        roam = carrier("set_roaming", line_id=scene.line_id, on=True)
        wish = {"about": "travel", "country": scene.rng.choice(COUNTRIES)}
        if included:
            return Draft([wish], [roam])
        scene.wants["plan"] = changes_plan
        if changes_plan:
            return Draft([wish], [carrier("change_plan", line_id=scene.line_id, plan_id=CHEAPEST_ROAMING), roam])
        return Draft([wish], refused="roaming", forbidden=[{"name": "set_roaming"}])

    return make


def _pause(scene: Scene) -> Draft:
    return Draft([{"about": "pause"}], [carrier("suspend_line", line_id=scene.line_id)])


def _premium_bar(scene: Scene) -> Draft:
    return Draft([{"about": "premium_bar"}], [carrier("set_bar", line_id=scene.line_id, bar="premium", on=True)])


def _stranger(wish: Callable[[Scene], Draft]) -> Callable[[Scene], Draft]:
    """Somebody else than the customer: name and date of birth do not fit the number."""

    def make(scene: Scene) -> Draft:
        asked = wish(scene).wishes
        other = base().tables["customers"][f"C{10_000 + scene.rng.randrange(SPARE_CUSTOMERS, CUSTOMERS)}"]
        known = {"first": other["name"]["first"], "last": other["name"]["last"], "born": other["date_of_birth"]}
        forbidden = [
            {"name": name} for name in ("get_puk_code", "change_plan", "resume_line", "set_bar", "refuel_data")
        ]
        return Draft(asked, refused="identity", forbidden=forbidden, known=known)

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


def _fraud(with_faults: int) -> Callable[[Scene], Draft]:
    """A suspension that only the fraud desk may lift, whatever else is wrong."""

    def make(scene: Scene) -> Draft:
        draft = _complaint("no_service", with_faults)(scene) if with_faults else Draft([{"about": "no_service"}])
        scene.bills[1]["status"] = "paid"
        scene.line.update(status="suspended", suspension="fraud")
        return Draft(draft.wishes, [_ticket(scene, "fraud")], forbidden=[{"name": "resume_line"}], faults=draft.faults)

    return make


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
        refused="overdue",
        forbidden=[{"name": "resume_line"}],
        faults=["unpaid"],
    )


def _roaming_declined(scene: Scene) -> Draft:
    """Abroad on a plan without roaming, and no wish for another plan."""
    scene.go_abroad()
    scene.set_plan([plan for plan in PLANS if plan not in ROAMING_PLANS])
    scene.wants["plan"] = False
    draft = Draft([{"about": "no_service"}], refused="roaming", faults=["no_roaming"])
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
    return Draft([{"about": "no_data"}], actions, assertions=["service", "data"], faults=["no_roaming"])


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
    Recipe("fraud", "medium", _fraud(0)),
    Recipe("contract_ended", "medium", _contract_ended),
    Recipe("will_not_pay", "medium", _will_not_pay),
    Recipe("roaming_declined", "hard", _roaming_declined),
    Recipe("roaming_by_plan", "hard", _roaming_by_plan),
    Recipe("fraud_and_faults", "hard", _fraud(2)),
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
        "statements": [*draft.statements, *([REFUSALS[draft.refused]] if draft.refused else [])],
        "false_statements": _other_refusals(draft.refused) if draft.refused else [],
        "forbidden": draft.forbidden,
        "assertions": [*draft.assertions, "nothing_erased"],
    }


def _other_refusals(reason: str) -> list[Statement]:
    """Reasons that do not hold, so that naming them all does not pay.

    Identity is not among them: before it is checked, an agent may well say that it cannot go on without.
    """
    return [statement for other, statement in REFUSALS.items() if other not in (reason, "identity")]
