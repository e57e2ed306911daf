"""Credentials inside URLs: hidden in everything that is shown or written, and still sent with every request.

Requests go to real HTTP servers of this process. Not covered: credentials of proxies (``test_users_pool.py``), and what
a server writes into its own log.
"""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest
from chat_server import fails, nobody, says, serving
from typer.testing import CliRunner

from mua.cli import app
from mua.config.load import dump_config, load_config
from mua.config.schema import EndpointConfig, LlmConfig
from mua.environment.endpoint.services import ChatClient
from mua.launch.checks.node import check_endpoint
from mua.trainer.evaluation.store import policy_of, setting_of
from mua.utils.errors import UserFault
from mua.utils.masking import HIDDEN, below, mask_credentials

PASSWORD, KEY = "hunter2-4711", "k3y-very-secret"
URL = f"https://me:{PASSWORD}@host:8000/v1?api_key={KEY}&api-version=2"
BASIC = "Basic " + b64encode(f"me:{PASSWORD}".encode()).decode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, f"https://{HIDDEN}@host:8000/v1?api_key={HIDDEN}&api-version=2"),
        ("http://token@host/v1", f"http://{HIDDEN}@host/v1"),
        ("http://me:p@ss@host/v1", f"http://{HIDDEN}@host/v1"),
        ("http://me:p?a#ss@host/v1", f"http://{HIDDEN}@host/v1"),
        ("http://h/?Token=a&key=b&sig=c;code=d#e", f"http://h/?Token={HIDDEN}&key={HIDDEN}&sig={HIDDEN};code={HIDDEN}#e"),
        ("http://a:b1@h/ 'http://c:d@i/?auth=x', now", f"http://{HIDDEN}@h/ 'http://{HIDDEN}@i/?auth={HIDDEN}', now"),
        ("http://host/search?q=a@b:c", "http://host/search?q=a@b:c"),
        ("me@host: no URL, key=5", "me@host: no URL, key=5"),
    ],
)  # fmt: skip
def test_only_credentials_are_masked(text: str, shown: str) -> None:
    assert mask_credentials(text) == shown
    assert mask_credentials(shown) == shown


def test_a_path_goes_before_the_query() -> None:
    assert below(URL, "models") == f"https://me:{PASSWORD}@host:8000/v1/models?api_key={KEY}&api-version=2"
    assert below("http://host/v1/", "chat/completions") == "http://host/v1/chat/completions"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    llm = f'{{base_url: "{URL}", model: m, fallbacks: [{{base_url: "{URL}", model: n}}]}}'
    path.write_text(
        f"name: x\noutput: {tmp_path}/out\nmodel: {{path: m, max_length: 1024}}\nenvironment: {{name: help_desk}}\n"
        f'rollout: {{max_tokens: 1000}}\ntrainer: {{steps: 1}}\nuser: {{kind: llm, llm: {llm}}}\n'
        f'evaluation: {{policy: {{kind: endpoint, endpoint: {{base_url: "{URL}", model: p}}}}}}\n'
    )  # fmt: skip
    return path


def _hides(text: str) -> None:
    assert HIDDEN in text
    assert PASSWORD not in text
    assert KEY not in text


def test_the_configuration_shows_none_and_can_be_read_again(recipe: Path) -> None:
    shown = CliRunner().invoke(app, ["config", "show", str(recipe)])
    assert shown.exit_code == 0
    _hides(shown.stdout)
    again = recipe.with_name("again.yaml")
    again.write_text(shown.stdout)
    assert dump_config(load_config(again)) == shown.stdout  # as a run's config.yaml is read by a conversion
    llm = load_config(recipe).user.llm
    assert llm is not None
    assert llm.base_url == URL  # the run itself has it


def test_results_hold_none_and_do_not_depend_on_them(recipe: Path) -> None:
    config = load_config(recipe)
    _hides(json.dumps(setting_of(config)))
    _hides(json.dumps(policy_of(config)))
    other = recipe.with_name("other.yaml")
    other.write_text(recipe.read_text().replace(PASSWORD, "another-one").replace(KEY, "a-new-key"))
    assert setting_of(load_config(other)) == setting_of(config)
    assert policy_of(load_config(other)) == policy_of(config)


def test_a_job_script_with_one_is_refused(recipe: Path) -> None:
    overrides = [f"user.llm.base_url={URL}", "slurm.nodes=1", "slurm.gpus_per_node=1"]
    said = CliRunner().invoke(app, ["launch", "slurm", "--dry-run", "--unchecked", str(recipe), *overrides])
    assert said.exit_code == 2
    assert said.stderr.startswith("mua: user.llm.base_url: the secret would stand in the job's script")
    assert PASSWORD not in said.output
    assert KEY not in said.output


async def test_the_simulated_user_is_asked_with_them_and_no_fault_tells_them() -> None:
    async with serving(says("hello"), fails(500, body=f"who is {PASSWORD} at ?api_key={KEY}")) as server:
        url = _with_credentials(server.url)
        user = ChatClient(LlmConfig(base_url=url, model="m", max_retries=0))
        try:
            assert (await user.chat([{"role": "user", "content": "hi"}], seed=1)).text == "hello"
            assert server.queries == [{"api_key": KEY}]
            assert server.headers[0]["Authorization"] == BASIC
            with pytest.raises(UserFault) as fault:
                await user.chat([{"role": "user", "content": "hi"}], seed=1)
            _hides(str(fault.value))
            assert fault.value.passing
        finally:
            await user.close()


def test_the_preflight_names_the_endpoint_without_them() -> None:
    with nobody() as address:
        found = check_endpoint(EndpointConfig(base_url=_with_credentials(f"http://{address}/v1"), model="m"))
    assert found.state == "failure"
    _hides(found.line())


def _with_credentials(url: str) -> str:
    return f"{url.replace('://', f'://me:{PASSWORD}@')}?api_key={KEY}"
