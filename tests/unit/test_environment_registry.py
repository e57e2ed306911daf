"""Domains by name, and tool arguments against their schema. Does not cover the domains themselves."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import environments
from mua.environment import registry
from mua.environment.registry import domain_names, get_domain
from mua.environment.tool_arguments import validate_arguments
from mua.types import ToolSchema
from mua.utils.errors import ConfigError


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for ``environments/``; modules imported from it are forgotten afterwards."""
    monkeypatch.setattr(environments, "__path__", [str(tmp_path)])
    monkeypatch.setattr(registry, "_registered", registry._registered.__wrapped__)  # not what was found before
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("environments."):
            del sys.modules[name]


def write(folder: Path, name: str, source: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)


GOOD = "class D:\n    name = {name!r}\nDOMAIN = D()\n"


def test_a_package_is_a_domain(packages: Path):
    write(packages, "bakery_a", GOOD.format(name="bakery_a"))
    write(packages, "_private", "")
    (packages / "module.py").write_text("")
    assert domain_names() == ["bakery_a"]
    assert get_domain("bakery_a").name == "bakery_a"


def test_listing_imports_nothing(packages: Path):
    write(packages, "bakery_b", "raise RuntimeError('imported')")
    assert domain_names() == ["bakery_b"]
    with pytest.raises(RuntimeError, match="imported"):
        get_domain("bakery_b")


def test_another_projects_package_of_the_name_is_told_from_ours(monkeypatch: pytest.MonkeyPatch):
    theirs = ModuleType("environments")
    theirs.__path__ = ["/site/environments"]
    monkeypatch.setitem(sys.modules, "environments", theirs)
    with pytest.raises(ConfigError, match=r"^environments: .* is not mua's but /site/environments.*PYTHONPATH"):
        domain_names()
    monkeypatch.setitem(sys.modules, "environments", None)  # as if it was uninstalled
    with pytest.raises(ConfigError, match="cannot be imported"):
        get_domain("retail")


@pytest.mark.parametrize(
    ("asked", "hint"), [("bakery", "; did you mean 'bakery_c'?"), ("zzz", ""), ("os", ""), ("../x", "")]
)
def test_an_unknown_name_lists_the_known_and_the_nearest(packages: Path, asked: str, hint: str):
    write(packages, "bakery_c", GOOD.format(name="bakery_c"))
    write(packages, "florist", "")
    with pytest.raises(ConfigError) as caught:
        get_domain(asked)
    assert str(caught.value) == f"environment.name: unknown environment {asked!r}; known: bakery_c, florist{hint}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_package_here", "no_such_package_here"),
        ("", "has no DOMAIN"),
        (GOOD.format(name="other"), "calls itself 'other'"),
    ],
)
def test_a_broken_package_is_a_config_error(packages: Path, source: str, words: str):
    write(packages, "broken", source)
    with pytest.raises(ConfigError, match=words):
        get_domain("broken")


def test_third_parties_register_by_entry_point(packages: Path, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("their_package")
    module.DOMAIN = SimpleNamespace(name="theirs")
    monkeypatch.setitem(sys.modules, "their_package", module)
    points = [EntryPoint("theirs", "their_package", registry.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "mua.environments" else [])
    assert domain_names() == ["theirs"]
    assert get_domain("theirs") is module.DOMAIN


def test_two_domains_of_one_name_are_an_error(packages: Path, monkeypatch: pytest.MonkeyPatch):
    write(packages, "bakery_d", GOOD.format(name="bakery_d"))
    points = [EntryPoint("bakery_d", "their_package", registry.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match="two domains are called 'bakery_d'"):
        domain_names()


ORDER = ToolSchema(
    "order",
    "Place an order.",
    {
        "type": "object",
        "properties": {
            "customer": {"$ref": "#/$defs/customer"},
            "lines": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"sku": {"type": "string"}, "count": {"type": "integer", "minimum": 1}},
                    "required": ["sku", "count"],
                    "additionalProperties": False,
                },
            },
            "ship": {"enum": ["air", "sea"]},
        },
        "required": ["customer", "lines"],
        "additionalProperties": False,
        "$defs": {"customer": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}},
    },
)
FINE = {"customer": {"id": "c1"}, "lines": [{"sku": "a", "count": 2}], "ship": "sea"}


def test_arguments_that_fit():
    assert validate_arguments(ORDER, FINE) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (FINE | {"customer": {"id": 4}}, "invalid arguments for order: customer.id: 4 is not of type 'string'"),
        (FINE | {"customer": {}}, "invalid arguments for order: customer: 'id' is a required property"),
        (
            FINE | {"lines": [{"sku": "a", "count": 1}, {"sku": "b", "count": 0}]},
            "invalid arguments for order: lines[1].count: 0 is less than the minimum of 1",
        ),
        (FINE | {"lines": []}, "invalid arguments for order: lines: [] should be non-empty"),
        (FINE | {"ship": "rail"}, "invalid arguments for order: ship: 'rail' is not one of ['air', 'sea']"),
        ({"customer": {"id": "c"}}, "invalid arguments for order: 'lines' is a required property"),
        (
            FINE | {"gift": 1},
            "invalid arguments for order: Additional properties are not allowed ('gift' was unexpected)",
        ),
        (FINE | {"lines": [{"sku": "a", "count": True}]}, "lines[0].count: True is not of type 'integer'"),
        ([], "arguments of order must be a JSON object, not an array"),
        ("{}", "arguments of order must be a JSON object, not a string"),
        (None, "arguments of order must be a JSON object, not null"),
    ],
)
def test_arguments_that_do_not_fit_say_where_and_why(arguments: object, message: str):
    found = validate_arguments(ORDER, arguments)
    assert found is not None
    assert found.endswith(message)


def test_a_message_is_short_however_large_the_value():
    found = validate_arguments(ORDER, FINE | {"ship": "x" * 100_000 + "\n\n"})
    assert len(found) < 400
    assert "not one of ['air', 'sea']" in found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(JSON | st.fixed_dictionaries({"customer": JSON, "lines": JSON}))
def test_anything_a_model_may_write_gives_one_line_or_none(arguments: object):
    found = validate_arguments(ORDER, arguments)
    assert found is None or (found and "\n" not in found and len(found) < 1000)


def test_a_reference_outside_the_schema_is_not_fetched():
    fetched: list[str] = []

    class Remote(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fetched.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

    server = HTTPServer(("127.0.0.1", 0), Remote)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    reference = {"$ref": f"http://127.0.0.1:{server.server_port}/schema.json"}
    schema = ToolSchema("x", "", {"type": "object", "properties": {"a": reference}})
    with pytest.raises(Exception, match="no path to a part of it"):
        validate_arguments(schema, {"a": 1})
    server.shutdown()
    server.server_close()
    assert fetched == []
