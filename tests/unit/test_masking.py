"""Credentials inside URLs: hidden in everything that is shown or written, and still sent with every request.

Requests go to real HTTP servers of this process. Not covered: credentials of proxies (``test_users_pool.py``), and what
a server writes into its own log.
"""

from __future__ import annotations

import json
import logging
import os
import time
from base64 import b64encode
from pathlib import Path

import pytest
import sqlalchemy as sa
from chat_server import fails, nobody, says, serving
from typer.testing import CliRunner

from mua.cli import app
from mua.config.load import dump_config, load_config
from mua.config.schema import EndpointConfig, ExperimentConfig, LlmConfig
from mua.config.section import all_keys
from mua.environment.endpoint.services import ChatClient
from mua.launch.checks.node import check_endpoint
from mua.launch.slurm import SlurmJob, render
from mua.observe.logs import logging_to
from mua.observe.metrics_log import MetricsWriter, hyperparameters
from mua.observe.provenance import provenance
from mua.rollout.rollout_worker import secrets_of
from mua.store.database import Store
from mua.store.traces import export_parquet, write_traces
from mua.trainer.evaluation.store import policy_of, setting_of
from mua.utils import masking
from mua.utils.errors import ConfigError, UserFault
from mua.utils.masking import HIDDEN, below, mask_secrets, says_secret
from mua.view.html_page import export_page
from mua.view.page_answers import Answers
from mua.view.viewed_runs import opened_runs
from tests.store_support import played, write_run

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
    assert mask_secrets(text) == shown
    assert mask_secrets(shown) == shown


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


def test_results_hold_none_and_do_not_depend_on_them(recipe: Path) -> None:
    config = load_config(recipe)
    _hides(json.dumps(setting_of(config)))
    _hides(json.dumps(policy_of(config)))
    other = recipe.with_name("other.yaml")
    other.write_text(recipe.read_text().replace(PASSWORD, "another-one").replace(KEY, "a-new-key"))
    assert setting_of(load_config(other)) == setting_of(config)
    assert policy_of(load_config(other)) == policy_of(config)


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


SECRETS = """
agent:
  command: [python, a.py, --api-key, "${S1}", --header, "X-Key: ${S2}", "--token=${S3}", "${HUB_TOKEN}"]
  variables: {GITHUB_PAT: "${S4}", DB: "postgres://u:${S5}@h/d", PLAIN: "${PLAIN}"}
environment:
  name: help_desk
  mcp:
    - {name: a, command: python, args: [-c, "run(password='${S6}')", --secret, "${S7}"], env: {ANY: "${S8}"}}
    - {name: b, url: "http://h/mcp?subscription-key=${S9}&q=1", headers: {X-Odd: "${S10}"}}
judge: {llm: {base_url: "http://h/v1?sig=${S11}", model: m, api_key: "${S12}", extra: {inner: [{key: "${S13}"}]}}}
store: {url: "postgresql://u:${S14}@h/d"}
slurm: {gpus_per_node: 1, nodes: 1, setup: ["export HF_TOKEN=${S15}", "login --password ${S16}"], qos: "${PLAIN}"}
observe: {mlflow: {experiment: e, tracking_uri: "https://u:${S17}@h"}}
"""


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A configuration full of them, all from the environment, and their values."""
    monkeypatch.setattr(masking, "_remembered", {})
    values = {f"S{n}": f"v{n}xq-hidden{n}" for n in range(1, 18)} | {"HUB_TOKEN": "hub-hidden"}
    for name, value in (values | {"PLAIN": "to-be-seen"}).items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "x.yaml"
    path.write_text(
        f"name: x\noutput: {tmp_path}/out\nmodel: {{path: m, max_length: 1024}}\nrollout: {{max_tokens: 1000}}\n"
        f"trainer: {{steps: 1}}\n{SECRETS}"
    )
    return path, list(values.values())


def test_whatever_is_made_of_a_configuration_holds_none(secrets: tuple[Path, list[str]]) -> None:
    path, values = secrets
    config = load_config(path)
    shown = CliRunner().invoke(app, ["config", "show", str(path)]).stdout
    as_json = CliRunner().invoke(app, ["config", "show", str(path), "--json"]).stdout
    job = render(SlurmJob(config, path, ()))
    made = {
        "shown": shown, "json": as_json, "store": json.dumps(provenance(config)), "job": job,
        "trackers": str(hyperparameters(config)), "evaluation": json.dumps(setting_of(config)),
        "error": mask_secrets(f"it said {' '.join(values)}!"),
    }  # fmt: skip
    for where, text in made.items():
        assert [value for value in values if value in text] == [], where
    assert shown.count("to-be-seen") == 2
    assert "export HF_TOKEN=${S15}; login --password ${S16}" in job, "a shell on the node fills them in"
    again = path.with_name("again.yaml")
    again.write_text(shown)
    assert dump_config(load_config(again)) == shown
    wanted = {"agent.command.3", "agent.variables.DB", "environment.mcp.1.headers.X-Odd", "judge.llm.extra.inner.0.key"}
    assert wanted < set(secrets_of(config))


def test_a_place_a_default_and_a_name_are_no_secrets(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered: dict[str, str] = {}
    monkeypatch.setattr(masking, "_remembered", remembered)
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    for name, value in {"PWD": "/srv/x", "HOME": "/srv/me", "U": "alice", "P": "pw-4711", "A_KEY": "none"}.items():
        monkeypatch.setenv(name, value)
    servers = 'mcp: [{name: a, command: python, env: {HOME: "${HOME}", T: "${NO_SUCH_TOKEN:-full}", K: "${A_KEY}"}}]'
    text = recipe.read_text().replace("{name: help_desk}", f"{{name: help_desk, {servers}}}")
    recipe.write_text(text.replace(str(recipe.parent), "${PWD}") + 'store: {url: "postgresql://${U}:${P}@h/d"}\n')
    load_config(recipe)
    assert remembered == {"pw-4711": "P"}


def test_a_secret_written_into_a_job_is_refused_wherever_it_comes_from(secrets: tuple[Path, list[str]]) -> None:
    path, values = secrets
    for override in ('slurm.setup=["export HF_TOKEN=hf-plain-text"]', f'slurm.extra=["--comment={values[0]}"]'):
        config = load_config(path, [override])
        with pytest.raises(ConfigError, match="the secret would stand in the job's script"):
            render(SlurmJob(config, path, [override]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Error: api_key=abcd1", f"Error: api_key={HIDDEN}"),
        ("curl -H 'X-Api-Key: abcd 1234' x", f"curl -H 'X-Api-Key: {HIDDEN} 1234' x"),
        ('{"access_token": "ab cd", "max_tokens": 5}', f'{{"access_token": "{HIDDEN}", "max_tokens": 5}}'),
        ("--wandb-key abcd --steps 5", f"--wandb-key {HIDDEN} --steps 5"),
        ("authorization: Bearer abcdefg", f"authorization: {HIDDEN}"),
        ("https://h/?appid=abcd&q=a&accessToken=b", f"https://h/?appid={HIDDEN}&q=a&accessToken={HIDDEN}"),
        ("AWS_SECRET_ACCESS_KEY=ab/cd+ef== x", f"AWS_SECRET_ACCESS_KEY={HIDDEN} x"),
        ("PGPASSWORD=abcd psql --token\tabcd", f"PGPASSWORD={HIDDEN} psql --token\t{HIDDEN}"),
        ("it said AKIAIOSFODNN7EXAMPLE, glpat-abcd1234", f"it said {HIDDEN}, {HIDDEN}"),
        ("postgresql://u:it's@h/d 'http://a:b1@i/'", f"postgresql://{HIDDEN}@h/d 'http://{HIDDEN}@i/'"),
        ("--label-key answer --image-token <image> page_token=2 think_end_token=</think> PWD=/srv", None),
        ("{'a': 'http://host:PORT', 'mail': 'me@host'}", None),
        ("unexpected token: }, stop_token=<|im_end|>, sort_key=name, tokens=5", None),
        ("the key: value; train/loss: 0.5; author=me; tokenizer=a", None),
    ],
)
def test_text_is_masked_by_the_names_in_it(text: str, shown: str | None) -> None:
    assert mask_secrets(text) == (shown or text)
    assert mask_secrets(mask_secrets(text)) == mask_secrets(text)


def test_no_key_of_the_configuration_is_taken_for_a_secret() -> None:
    named = {".".join(key) for key in all_keys(ExperimentConfig) if says_secret(key[-1], alone=False)}
    assert all(name.endswith("api_key") for name in named)


@pytest.mark.parametrize("text", ["token=" * 20_000, "://a:" * 20_000, "?a=" * 30_000, "a" * 100_000, "--a " * 30_000])
def test_hostile_text_takes_no_longer_than_it_is_long(text: str) -> None:
    began = time.process_time()
    mask_secrets(text)
    assert time.process_time() - began < 5


def test_files_with_conversations_or_keys_are_their_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "store.sqlite").touch(0o666)  # of an older version
        with Store.open(tmp_path) as store:
            write_run(store)
            with store.begin() as connection:
                connection.execute(sa.text("UPDATE runs SET name = 'x'"))
                beside = list(tmp_path.iterdir())
                modes = {path.name: path.stat().st_mode & 0o077 for path in beside}
        with MetricsWriter(tmp_path / "m", tensorboard=True) as metrics:
            metrics.log_details(0, {}, {"rollout/episodes/solved": "he said"})
        with logging_to(tmp_path / "m", "train"):
            logging.getLogger("mua").warning("he said")
        write_traces(tmp_path / "t.jsonl", [played(0, 0, 0, success=True)])
        export_parquet(tmp_path / "t.parquet", [played(0, 0, 0, success=True)])
        with opened_runs([str(tmp_path)]) as viewed:
            export_page(Answers(viewed), tmp_path / "page.html", only={})
    finally:
        os.umask(before)
    assert len(beside) >= 3, "what SQLite puts beside the file, too"
    modes |= {path.name: path.stat().st_mode & 0o077 for path in tmp_path.glob("*.*")}
    modes |= {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "m").rglob("*")
              if path.name in ("details.jsonl", "train.log", "tensorboard")}  # fmt: skip
    assert set(modes) >= {"t.jsonl", "t.experts", "t.parquet", "page.html", "details.jsonl", "train.log", "tensorboard"}
    assert not any(modes.values()), modes
