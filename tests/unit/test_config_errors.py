"""Every class of bad configuration: one line each, with file, line, key, and what to write instead.

Not covered: bad input that only a run can find (a missing checkpoint, an unknown environment).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mua.config import load_config
from mua.observe.output import find_config, prepare_output
from mua.utils.errors import ConfigError

BASE = """\
name: base
output: runs/base
model:
  path: models/tiny
  max_length: 1024
environment:
  name: help_desk
rollout:
  max_tokens: 1000
trainer:
  steps: 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    return tmp_path


def errors(text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the error that x.yaml, holding ``text``, gives."""
    Path("x.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("x.yaml"), overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout:\n  max_turn: 3", "x.yaml:3: rollout.max_turn: unknown key; did you mean rollout.max_turns"),
        ("max_staleness: 1", "x.yaml:2: max_staleness: unknown key; did you mean trainer.max_staleness"),
        ("trainer:\n  steps: many", "x.yaml:3: trainer.steps: expected an"),
        ("trainer:\n  steps: true", "x.yaml:3: trainer.steps: expected an"),
        ("trainer:\n  resume: yes", "x.yaml:3: trainer.resume: expected true"),
        ("optimizer:\n  epsilon: .nan", "x.yaml:3: optimizer.epsilon: expected a"),
        ("name: 7", "x.yaml:2: name: expected a"),
        ("trainer: [1, 2]", "x.yaml:2: trainer: expected a"),
        ("algorithm:\n  aggregation: token_meen", "x.yaml:3: algorithm.aggregation: "),
        ("sft: {}", "x.yaml:2: sft: "),
        ("user:\n  kind: llm", "x.yaml:3: user.kind: "),
        ("rollout:\n  max_tokens: 4096", "x.yaml:3: rollout.max_tokens 4096 must stay"),
        ("algorithm: {advantage: gae}\ncritic: {warmup_steps: 3}", "x.yaml:3: critic.warmup_steps 3 leaves the"),
        (
            "algorithm: {advantage: gae}\ncritic: {optimizer: {schedule: linear, min_learning_rate: 0.1}}",
            "x.yaml:3: critic.optimizer.min_learning_rate 0.1 exceeds critic.optimizer.learning_rate",
        ),
        (
            "megatron: {max_tokens_per_microbatch: 512, context_parallel: 2}",
            "base.yaml:9: rollout.max_tokens 1000 does not",
        ),
    ],
)
def test_one_clear_line(folder: Path, text: str, message: str) -> None:
    (line,) = errors("extends: base.yaml\n" + text)
    assert line.startswith(message)


def test_the_longest_segment_that_fits_the_engine_is_allowed(folder: Path) -> None:
    assert load_config(Path("base.yaml"), ["rollout.max_tokens=1016"]).rollout.max_tokens == 1016


def test_several_errors_are_all_reported_a_line_each(folder: Path) -> None:
    lines = errors("extends: base.yaml\nnmae: a\nengine:\n  count: -1\nseed: x\n")
    assert sorted(lines) == [
        "x.yaml:2: nmae: unknown key; did you mean name?",
        "x.yaml:4: engine.count: expected a number greater than 0, got -1 (an integer)",
        "x.yaml:5: seed: expected an integer, got 'x' (a string)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml: expected sections and keys"),
        ("a: 1\na: 2", "x.yaml:2: a: "),
        ("a: &x {b: 1}\nc:\n  <<: *x", "x.yaml:3: c.<<: merge keys are"),
        ("a: &x [*x]", "x.yaml:1: a.0: "),
        (b"a: \xff", "x.yaml:1: not UTF-8 text (byte"),
        ("a: 1\nb: \xff".encode("latin-1"), "x.yaml:2: not UTF-8 text (byte"),
        ("# one\u2028# two\x85# three\nzzq:\n  - &a [*a]", "x.yaml:3: zzq.0.0: "),
        ("a: " + "[" * 5000, "x.yaml:1: not valid YAML: nested"),
        ("\na:\n" + "- " * 60 + "x", "x.yaml:3: not valid YAML: nested"),
        (
            "a: &a [1, 1, 1]\n"
            + "".join(f"{n}: &{n} [{f'*{m}, ' * 9}]\n" for m, n in zip("abcdef", "bcdefg", strict=True)),
            "x.yaml:5: e: ",
        ),
        ("&a zzq: &b [*b, *a]", "x.yaml:1: zzq.0: "),
        ('a: "\\U00110000"', "x.yaml:1: not valid YAML: a"),
        (f"%YAML {'9' * 5000}.1\n---\na: 1", "x.yaml:1: not valid YAML: a"),
        (f"a: {'9' * 5000}", "x.yaml:1: a: "),
        ("a: !!bool x", "x.yaml:1: a: "),
        ("a: !!python/object/apply:os.getcwd []", "x.yaml:1: a: the YAML tag"),
        ("a: [1, 2", "x.yaml:1: not valid YAML"),
        ("a:\n\t- 1", "x.yaml:2: not valid YAML"),
        ('"a\\nb": 1', "x.yaml:1: a key must be"),
        ("#" * 2_000_000, "x.yaml: is larger than 1048576"),
        ("extends: /dev/zero", "/dev/zero: cannot be read (named"),
        ('extends: "a\\nb"', "x.yaml:1: extends: "),
        ("extends: x.yaml", "x.yaml: extends: "),
    ],
)
def test_files_that_are_no_configuration(folder: Path, text: str | bytes, message: str) -> None:
    (line,) = errors(text)
    assert line.startswith(message)


def test_missing_variables_are_all_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUA_A", raising=False)
    assert errors("extends: base.yaml\nname: ${MUA_A}\noutput: ${MUA_B}/${broken\n") == [
        "x.yaml:2: name: the environment variable MUA_A is not set; export it or write ${MUA_A:-default}",
        "x.yaml:3: output: the environment variable MUA_B is not set; export it or write ${MUA_B:-default}",
        "x.yaml:3: output: '${' starts a variable; write ${NAME} or ${NAME:-default}",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps", "command line: an argument: expected key.path=value"),
        ("trainer.step=3", "command line: trainer.step: unknown key; did you mean trainer.steps"),
        ("a." * 50_000 + "a=1", f"command line: {('a.' * 50)}...: a key of more than 50 parts"),
        ("x" * 300 + "=1", f"command line: {'x' * 100}: expected key.path=value"),
        ("name=" + "[" * 5000, "command line: name: "),
        (f"seed={'9' * 30}", "command line: seed: "),
    ],
)
def test_bad_overrides(folder: Path, override: str, message: str) -> None:
    (line,) = errors("extends: base.yaml\n", override)
    assert line.startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "user:\n  kind: llm\n  llm: sk-secret\n",
        "user:\n  llm:\n    api_ky: sk-secret\n",
        "user:\n  llm:\n    api_key: {a: sk-secret}\n",
        "user:\n  llm:\n    api_key: 'sk-secret\n",
        "user:\n  llm:\n    api_key: sk-secret\n    api_key: sk-secret\n",
    ],
)
def test_secrets_are_never_echoed(folder: Path, text: str) -> None:
    assert "sk-secret" not in "\n".join(errors("extends: base.yaml\n" + text))


def test_an_output_that_cannot_be_written_is_refused(folder: Path) -> None:
    output = "/dev/null/mua"
    config = load_config(Path("base.yaml"), [f"output={output}"])
    with pytest.raises(ConfigError, match=rf"^output: cannot write into {output}: \w+"):
        prepare_output(config)


def test_the_output_holds_the_configuration_and_a_checkpoint_finds_it(folder: Path) -> None:
    config = load_config(Path("base.yaml"), ["output=out"])
    written = prepare_output(config)
    checkpoint = Path("out/checkpoints/step_3")
    checkpoint.mkdir(parents=True)
    assert find_config(checkpoint).resolve() == written.resolve()
    assert load_config(written) == config
    with pytest.raises(ConfigError, match="no such checkpoint"):
        find_config(Path("out/checkpoints/step_4"))


def test_files_that_extend_each_other_without_end_are_refused(folder: Path) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    assert errors("extends: loop.yaml") == [
        "loop.yaml: cannot be read (named by extends in x.yaml): Too many levels of symbolic links"
    ]
    os.mkfifo("fifo.yaml")
    assert errors("extends: fifo.yaml") == [
        "fifo.yaml: cannot be read (named by extends in x.yaml): not a regular file"
    ]
    for n in range(40):  # each is read twice by the one before it: 2^40 times in all
        Path(f"d{n}.yaml").write_text(f"extends: [d{n + 1}.yaml, d{n + 1}.yaml]\n")
    Path("d40.yaml").write_text("name: x\n")
    (line,) = errors("extends: d0.yaml")
    assert line.endswith("extends: more than 100 files are read for one configuration")


def test_thousands_of_wrong_keys_are_told_in_twenty_lines(folder: Path) -> None:
    found = errors("extends: base.yaml\n" + "".join(f"zzq{n}: 1\n" for n in range(5000)))
    assert len(found) == 21
    assert found[0].startswith("x.yaml:2: zzq0: unknown key")
    assert found[-1] == "x.yaml:1: and 4980 more keys are wrong"


STALE = "trainer.max_staleness=1"


@pytest.fixture
def smallest(tmp_path: Path) -> Path:
    path = tmp_path / "y.yaml"
    path.write_text("name: x\noutput: x\nmodel: {path: x}\nenvironment: {name: help_desk}\ntrainer: {steps: 1}\n")
    return path


def test_carried_groups_need_oversampling_and_a_correction(smallest: Path) -> None:
    carry = "algorithm.refill.carry_versions=1"
    with pytest.raises(ConfigError, match=r"refill\.carry_versions: carry_versions is read only with oversample"):
        load_config(smallest, [carry])
    chosen = [carry, "algorithm.refill.oversample=1"]
    with pytest.raises(ConfigError, match=r"carry_versions 1 trains on"):
        load_config(smallest, chosen)
    assert load_config(smallest, [*chosen, "algorithm.correction=truncate"]).algorithm.refill.carry_versions == 1
    assert load_config(smallest, [*chosen, "algorithm.allow_off_policy=true"]).algorithm.allow_off_policy


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["algorithm.loss=reinforce", "algorithm.old_logprobs=engine", "algorithm.correction=band"],
    ],
)
def test_stale_samples_without_a_correction_are_refused_unless_said(smallest: Path, changes: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(smallest, [STALE, *changes])
    (line,) = str(caught.value).splitlines()
    assert "trainer.max_staleness 1 trains on" in line
    for way_out in ("truncate, mask or band", "algorithm.old_logprobs to engine", "algorithm.allow_off_policy"):
        assert way_out in line
    assert load_config(smallest, changes).trainer.max_staleness == 0
    for way_out in (["algorithm.correction=mask"], ["algorithm.loss=grpo", "algorithm.old_logprobs=engine"]):
        assert load_config(smallest, [STALE, *way_out]).algorithm.sees_sampler
    assert load_config(smallest, [STALE, *changes, "algorithm.allow_off_policy=true"]).algorithm.allow_off_policy
