"""UserRL's published records: what its gyms' files and its parquet tables hold, read into typed records.

:func:`read_records` reads a gym's file (``functions.json``, ``all_stories_refined.json``, ...): a list of records, or
an object of them by id. :func:`read_rows` reads a table made of them for training (``train.parquet``, or its rows as
JSON lines), whose rows name a record by id or title and bring the prompt. :func:`of_rows` puts the two together.

============  ==========================================================  ===================================
gym           file of UserRL (``gyms/<Gym>/<gym>/data``)                  a row's record is named by
============  ==========================================================  ===================================
function      ``functions.json``                                          ``id``
telepathy     ``all_entities_refined.json``                               ``title``
turtle        ``all_stories_refined.json``, by id                         ``title``
intention     ``all_intentions_{train,test}.json``                        ``id``
travel        ``travelgym_data_{22,33,44,233,333,334,444,2222}.json``     ``id``
search        ``questions.json``                                          ``id``
persuade      ``all_statements_refined.json``                             ``id``
tau           ``tau_{train,test}.json``                                   ``id``
============  ==========================================================  ===================================

Fields that no gym needs (a judge's thoughts on a story, the ``type`` of an option) are read over; whatever else is
wrong refuses the whole file, with its place: nothing is left out silently. Rules of the function gym become expression
trees; they are never evaluated as code, and each is checked against its expected value.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import open_file, printable

# Read by the functions of environments._tau.folder, which are imported late: that package brings tau-bench's domains
# along, which gyms without official data do not need.
GymName = Literal["function", "telepathy", "turtle", "intention", "travel", "search", "persuade", "tau"]
Rule: TypeAlias = str | int | list[Any]
"""``"a"``, ``3`` or ``[operator, left, right]``, as :mod:`environments.gyms.function.rules` has them."""
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
_LONGEST_RULE = 200
_DEEPEST_RULE = 20
_CLOSE = 1e-6
"""Within this share of the expected value, the rule gives it."""


def parse_rule(text: str) -> Rule:
    """An arithmetic expression over a, b, c and d; ValueError for anything else."""
    if len(text) > _LONGEST_RULE:
        raise ValueError(f"a rule has at most {_LONGEST_RULE} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{printable(text)!r} is no expression") from error
    return _rule(tree.body, 0)


def rule_at(rule: Rule, numbers: Mapping[str, float]) -> float:
    """What the rule gives; ValueError where it gives no number."""
    if not isinstance(rule, list):
        return float(numbers[rule]) if isinstance(rule, str) else float(rule)
    operator, left, right = rule[0], rule_at(rule[1], numbers), rule_at(rule[2], numbers)
    try:
        if operator == "/":
            return left / right
        if operator == "**":
            return math.pow(left, right)
        return left * right if operator == "*" else left + right if operator == "+" else left - right
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"the rule has no value: {error}") from error


def _rule(node: ast.AST, depth: int) -> Rule:
    if depth > _DEEPEST_RULE:
        raise ValueError("the rule is nested too deeply")
    if isinstance(node, ast.Name) and node.id in ("a", "b", "c", "d"):
        return node.id
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    operator = _OPERATORS.get(type(node.op)) if isinstance(node, ast.BinOp) else None
    if operator is None:
        raise ValueError("a rule holds a, b, c, d, whole numbers and + - * / ** alone")
    binary = cast(ast.BinOp, node)
    return [operator, _rule(binary.left, depth + 1), _rule(binary.right, depth + 1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: str = Field(min_length=1)

    @property
    def names(self) -> tuple[str, ...]:
        """What a row may call it."""
        return (self.id,)


class FunctionRecord(_Record):
    rule: Annotated[Rule, BeforeValidator(lambda given: parse_rule(given) if isinstance(given, str) else given)]
    test_case: tuple[int, int, int, int]
    expected_result: float

    @model_validator(mode="after")
    def _agrees(self) -> FunctionRecord:
        found = rule_at(self.rule, dict(zip("abcd", self.test_case, strict=True)))
        if not math.isclose(found, self.expected_result, rel_tol=_CLOSE, abs_tol=_CLOSE):
            raise ValueError(f"expected_result is {self.expected_result:g}, but the rule gives {found:g} for test_case")
        return self


class TelepathyRecord(_Record):
    title: str
    description: str = Field(min_length=1)
    goal: str
    target_entity: str = Field(min_length=1)
    category: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, self.title)

    @property
    def entity(self) -> str:
        """The name of the thing."""
        return self.target_entity.partition(" - ")[0].strip()

    @property
    def gloss(self) -> str:
        """What ``target_entity`` says of the thing behind its name."""
        return self.target_entity.partition(" - ")[2]


class Criterion(BaseModel):
    statement: str = Field(min_length=1)
    score: float = Field(gt=0, le=1)
    """Its weight."""


class TurtleRecord(_Record):
    new_title: str
    new_surface: str = Field(min_length=1)
    new_bottom: str
    evaluation: tuple[Criterion, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> TurtleRecord:
        if abs(sum(one.score for one in self.evaluation) - 1) > _CLOSE:
            raise ValueError("the scores of evaluation must add up to 1")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, self.new_title)


class Detail(BaseModel):
    description: str = Field(min_length=1)
    importance: Annotated[Literal[1, 2, 3], BeforeValidator(lambda given: int(given) if given in _DIGITS else given)]
    inquiry: str
    options: tuple[str, ...]


class IntentionRecord(_Record):
    category: str
    task: str = Field(min_length=1)
    missing_details: tuple[Detail, ...] = Field(min_length=1)


class Preference(BaseModel):
    """What a traveller wants of one part of the trip; a list of four or more texts in the file."""

    aspect: str
    subcategory: str
    preference: str
    implicit_elicitation: str

    @model_validator(mode="before")
    @classmethod
    def _of_list(cls, given: Any) -> Any:
        if isinstance(given, list):
            if len(given) < len(cls.model_fields):
                raise ValueError(f"must have at least {len(cls.model_fields)} texts")
            return dict(zip(cls.model_fields, given, strict=False))
        return given


class Options(BaseModel):
    correct: tuple[Json, ...] = ()
    wrong: tuple[Json, ...] = ()
    noise: tuple[Json, ...] = ()

    def ids(self) -> list[str]:
        """Of all options."""
        return [str(option.get("id")) for option in (*self.correct, *self.wrong, *self.noise)]


class Aspect(BaseModel):
    """One part of a trip."""

    arguments: Json = Field(default_factory=dict)
    preferences: tuple[Preference, ...] = Field(min_length=1)
    options: Options
    correct_ids: tuple[str, ...] = Field(min_length=1)
    best_id: str

    @model_validator(mode="after")
    def _there(self) -> Aspect:
        known = self.options.ids()
        for wanted in (self.best_id, *self.correct_ids):
            if wanted not in known:
                raise ValueError(f"no option has the id {wanted!r}")
        if len(set(known)) < len(known) or not all(_OPTION_ID.fullmatch(one) for one in known):
            raise ValueError("ids of options must be a letter and a number, such as H3, and each its own")
        if len({one[0] for one in known}) > 1:
            raise ValueError("the ids of its options must begin with one letter")
        return self

    @property
    def letter(self) -> str:
        """That the ids of its options begin with."""
        return self.best_id[0]


class TravelRecord(_Record):
    scenario: Any = None
    dimensions: tuple[str, ...] = Field(min_length=1)
    initial_description: str = Field(min_length=1)
    wanted_num: Any = None
    aspects: dict[str, Aspect]
    """By the names in ``dimensions``, under which the file has them beside the other fields."""

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("dimensions"), list):
            return given
        names = [str(name) for name in given["dimensions"]]
        if len(set(names)) < len(names):
            raise ValueError("dimensions names one aspect twice")
        if lost := [name for name in names if name not in given]:
            raise ValueError(f"dimensions names {lost[0]!r}, which the record does not have")
        return {**given, "aspects": {name: given[name] for name in names}}

    @model_validator(mode="after")
    def _apart(self) -> TravelRecord:
        if len({aspect.letter for aspect in self.aspects.values()}) < len(self.aspects):
            raise ValueError("the ids of options of two aspects begin with one letter")
        return self


class SearchRecord(_Record):
    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class PersuadeRecord(_Record):
    claim: str = Field(min_length=1)
    argument: str


class Action(BaseModel):
    name: str
    kwargs: Json


class TauTask(BaseModel):
    user_id: str
    instruction: str
    actions: tuple[Action, ...]
    outputs: tuple[str, ...] = ()


class _TauInfo(BaseModel):
    task: TauTask


class TauRecord(_Record):
    obs: str
    """The user's first words, as a model once said them."""
    info: _TauInfo

    @property
    def task(self) -> TauTask:
        return self.info.task

    @property
    def domain(self) -> str:
        """``retail`` or ``airline``, which the id begins with."""
        return self.id.partition("-")[0]

    @model_validator(mode="after")
    def _of_a_domain(self) -> TauRecord:
        if self.domain not in ("retail", "airline"):
            raise ValueError("id must begin with retail- or airline-")
        return self


_DIGITS = ("1", "2", "3")
_OPTION_ID = re.compile(r"[A-Z]\d+")
Record: TypeAlias = (
    FunctionRecord
    | TelepathyRecord
    | TurtleRecord
    | IntentionRecord
    | TravelRecord
    | SearchRecord
    | PersuadeRecord
    | TauRecord
)
KINDS: dict[GymName, type[Record]] = {
    "function": FunctionRecord,
    "telepathy": TelepathyRecord,
    "turtle": TurtleRecord,
    "intention": IntentionRecord,
    "travel": TravelRecord,
    "search": SearchRecord,
    "persuade": PersuadeRecord,
    "tau": TauRecord,
}
_ENVIRONMENTS = {f"{name.capitalize()}Gym": name for name in get_args(GymName)}
T = TypeVar("T", bound=BaseModel)


class Row(BaseModel):
    """One row of a table for training."""

    model_config = ConfigDict(frozen=True)
    gym: GymName
    name: str = Field(min_length=1)
    """The record's ``id`` or ``title``."""
    split: str
    index: int
    opening: str
    """The user's first words."""
    given: Json
    """What the gym was made with (``create_kwargs``), without what was only there to fill the column."""


def read_records(gym: GymName, path: Path) -> tuple[Record, ...]:
    """Every record of a file, in its order; :class:`ConfigError` that names file, record and key."""
    from environments._tau.folder import read_json

    listed = read_json(path)
    if isinstance(listed, dict):
        entries = [({"id": key, **value} if isinstance(value, dict) else value) for key, value in listed.items()]
    elif isinstance(listed, list):
        entries = listed
    else:
        raise ConfigError(f"{path}: must be a list of records or an object of them by id")
    if not entries:
        raise ConfigError(f"{path}: holds no records")
    found = tuple(read_record(KINDS[gym], entry, _where(path, n, entry)) for n, entry in enumerate(entries))
    seen: set[str] = set()
    for number, record in enumerate(found):
        if record.id in seen:
            raise ConfigError(f"{path}, record {number}: another record has the id {printable(record.id)!r} too")
        seen.add(record.id)
    return found


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a ``.parquet`` or of its rows as JSON lines; errors as of :func:`read_records`.

    Parquet needs the package pyarrow, which nothing else here does.
    """
    from environments._tau.folder import read_lines

    rows = _parquet(path) if path.suffix == ".parquet" else read_lines(path)
    if not rows:
        raise ConfigError(f"{path}: holds no rows")
    return tuple(_row(row, f"{path}, row {number}") for number, row in enumerate(rows))


def of_rows(
    rows: Sequence[Row], records: Mapping[GymName, Sequence[Record]], where: str
) -> Iterator[tuple[int, Row, Record]]:
    """The rows of the gyms in ``records``, each with its number and its record.

    ConfigError for a name that no record has, or that two have.
    """
    named: dict[tuple[str, str], list[Record]] = {}
    for gym, found in records.items():
        for record in found:
            for name in dict.fromkeys(record.names):
                named.setdefault((gym, name), []).append(record)
    for number, row in enumerate(rows):
        if row.gym not in records:
            continue
        matching = named.get((row.gym, row.name), [])
        if len(matching) != 1:
            count = "no record has" if not matching else f"{len(matching)} records have"
            raise ConfigError(f"{where}, row {number}: {count} the name {printable(row.name)!r} in the gym {row.gym!r}")
        yield number, row, matching[0]


def _row(row: Json, where: str) -> Row:
    extra, prompt = row.get("extra_info"), row.get("prompt")
    if not isinstance(extra, dict):
        raise ConfigError(f"{where}: 'extra_info' must be an object")
    tools = extra.get("tools_kwargs") or {}
    given = ((tools.get("interact_with_env") or {}).get("create_kwargs") or {}) if isinstance(tools, dict) else {}
    if not isinstance(given, dict) or given.get("env_name") not in _ENVIRONMENTS:
        known = ", ".join(_ENVIRONMENTS)
        raise ConfigError(
            f"{where}: 'extra_info.tools_kwargs.interact_with_env.create_kwargs.env_name' must be one of {known}"
        )
    kept = {key: value for key, value in given.items() if value is not None}
    whole = {
        "gym": _ENVIRONMENTS[kept["env_name"]],
        "name": kept.get("id", kept.get("title")),
        "split": extra.get("split"),
        "index": extra.get("index"),
        "opening": _opening(prompt, where),
        "given": kept,
    }
    return read_record(Row, whole, where)


def _opening(prompt: Any, where: str) -> str:
    messages = prompt if isinstance(prompt, list) else []
    said = [one.get("content") for one in messages if isinstance(one, dict) and one.get("role") == "user"]
    if len(said) != 1 or not isinstance(said[0], str):
        raise ConfigError(f"{where}: 'prompt' must be a list of messages with one of the role user")
    return said[0]


def _parquet(path: Path) -> list[Json]:
    from environments._tau.folder import MAX_BYTES

    try:
        tables = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"{path}: parquet is read by the package pyarrow; install it (pip install 'mua[parquet]'), or give the "
            "rows as .jsonl"
        ) from None
    try:
        with open_file(path) as file:
            if path.stat().st_size > MAX_BYTES:
                raise ConfigError(f"{path}: has more than {MAX_BYTES:,} bytes")
            return list(tables.read_table(file).to_pylist())
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{path}: cannot be read as parquet: {printable(str(error))}") from error


def _where(path: Path, number: int, entry: Any) -> str:
    name = entry.get("id") if isinstance(entry, dict) else None
    return f"{path}, record {number}" + (f" ({printable(name)})" if isinstance(name, str) else "")


def read_record(kind: type[T], value: Any, where: str) -> T:
    """``value`` as a ``kind``; ConfigError that names ``where`` and the key that is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the record"
        raise ConfigError(f"{where}: {key}: {first['msg'].removeprefix('Value error, ')}") from None
