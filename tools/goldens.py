"""Writes every setting that a GPU would get of each recipe: Megatron-Core's three configurations, SGLang's arguments.

python -m tools.goldens    # tests/data/golden/<recipe>/{transformer_engine,local}.yaml, and the table of what differs
                           # between them in docs/megatron_options.md (`make goldens`)

A change of a recipe, of a default or of Megatron-Core shows as a diff of these files, which
``tests/unit/test_golden_settings.py`` compares. The machine they are written for has a Hopper GPU, the versions of
``constraints/gpu-py312-cu.txt`` and no Apex, which PyPI does not have.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import re
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from packaging.version import Version

from tools import kit

PAGE = kit.ROOT / "docs" / "megatron_options.md"
FOLDER = kit.ROOT / "tests" / "data" / "golden"
RECIPES = ("qwen3-8b-1x8", "qwen3-32b-4x8-h200", "qwen3-30b-a3b-2x8", "qwen3-235b-a22b-16x8")
IMPLEMENTATIONS = ("transformer_engine", "local")


def main() -> None:
    kit.parser(__doc__).parse_args()
    for path, text in goldens().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    PAGE.write_text(kit.with_part(PAGE, "differences", differences(), by=Path(__file__)), encoding="utf-8")


def goldens() -> dict[Path, str]:
    """Every golden file and what it has to hold."""
    return {
        FOLDER / recipe / f"{implementation}.yaml": as_yaml(settings_of(recipe, implementation))
        for recipe in RECIPES
        for implementation in IMPLEMENTATIONS
    }


def as_yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, sort_keys=True, default_flow_style=False, width=120)


def settings_of(recipe: str, implementation: str) -> dict[str, Any]:
    """What ``configs/<recipe>.yaml`` becomes on a GPU with Transformer Engine, or without."""
    from megatron_bridge.hf_config import read_hf_config
    from megatron_bridge.plan import transformer_config_kwargs
    from mua.config.load import load_config
    from mua.engine.server import engine_server
    from mua.megatron import settings

    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("MUA_")]:
            del os.environ[name]  # recipes read some; the files are for those that are not set
        config = load_config(kit.ROOT / "configs" / f"{recipe}.yaml")
    assert config.model.hf_config is not None
    machine, dtype = machine_with(implementation), getattr(torch, config.model.dtype)
    architecture = transformer_config_kwargs(read_hf_config(kit.ROOT / config.model.hf_config.parent))
    server = engine_server(
        config.engine, dtype=config.model.dtype, context_length=config.model.max_length, seed=config.seed, index=0,
        log_folder=Path("logs"), api_key="", fp32_lm_head=config.model.fp32_lm_head, cuda=True,
    )  # fmt: skip
    with installed(machine.transformer_engine):
        return {
            "transformer_config": plain(
                settings.transformer_config(architecture, config.model, config.megatron, machine)
            ),
            "data_parallel_config": plain(settings.data_parallel_config(config.megatron, machine)),
            "optimizer_config": plain(settings.optimizer_config(config.optimizer, dtype, config.megatron, machine)),
            "sglang_arguments": arguments(server.command(config.model.path)),
        }


def machine_with(implementation: str) -> Any:
    """A Hopper GPU with the pinned versions."""
    from mua.megatron.settings import Capabilities

    pins = (kit.ROOT / "constraints" / "gpu-py312-cu.txt").read_text()
    version = {name: re.search(rf"^{name}==(\S+)$", pins, re.M) for name in ("torch", "transformer-engine")}
    assert all(version.values())
    engine = version["transformer-engine"][1] if implementation == "transformer_engine" else None  # type: ignore[index]
    return Capabilities(cuda=True, compute=(9, 0), torch=version["torch"][1], transformer_engine=engine)  # type: ignore[index]


@contextmanager
def installed(version: str | None) -> Iterator[None]:
    """Megatron-Core's configurations find this version of Transformer Engine, which they only ask for.

    Nothing of it is called: they look for its version, its kernels' names and the arguments of its Adam.
    """
    if version is None:
        yield
        return

    def adam(master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any) -> None:
        raise AssertionError("only its signature is looked at")

    def at_least(wanted: str, check_equality: bool = True) -> bool:
        found = Version(version)
        return found >= Version(wanted) if check_equality else found > Version(wanted)

    core, there = "megatron.core", object()
    kernels = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
    optimizers = types.ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = adam  # type: ignore[attr-defined]
    parents = ("transformer_engine", "transformer_engine.pytorch")
    with ExitStack() as stack:
        modules = {name: types.ModuleType(name) for name in parents} | {optimizers.__name__: optimizers}
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        for module in ("transformer.transformer_config", "optimizer.optimizer_config"):
            stack.enter_context(mock.patch(f"{core}.{module}.is_te_min_version", at_least))
        for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
            stack.enter_context(mock.patch(f"{core}.models.common.embeddings.rope_utils.{name}", there))
        for name in kernels:
            stack.enter_context(mock.patch(f"{core}.transformer.moe.moe_utils.fused_{name}", there))
        yield


def plain(config: Any) -> dict[str, Any]:
    """Every field of a dataclass, as YAML can say it; private ones are Megatron's own and left out."""
    names = (field.name for field in dataclasses.fields(config))
    return {name: _plain(getattr(config, name)) for name in names if not name.startswith("_")}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, functools.partial):
        given = [*map(repr, value.args), *(f"{name}={given!r}" for name, given in sorted(value.keywords.items()))]
        return f"{value.func.__name__}({', '.join(given)})"
    if callable(value):
        return value.__qualname__
    return value


def arguments(command: list[str]) -> dict[str, str | bool]:
    """The arguments of a server, by name, without what differs from start to start."""
    found: dict[str, str | bool] = {}
    for word in command[command.index("sglang.launch_server") + 1 :]:
        if word.startswith("--"):
            name = word.removeprefix("--")
            found[name] = True
        else:
            found[name] = word
    return {name: value for name, value in found.items() if name not in ("config", "port")}


def differences() -> str:
    """A table of the fields that differ between the implementations, those alike in several recipes once."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for recipe in RECIPES:
        engine, local = (settings_of(recipe, implementation) for implementation in IMPLEMENTATIONS)
        for section in engine:
            for name in sorted(engine[section].keys() | local[section].keys()):
                one, other = engine[section].get(name), local[section].get(name)
                if one != other:
                    rows.setdefault((f"{section}.{name}", str(one), str(other)), []).append(recipe)
    everywhere = list(RECIPES)
    return kit.table(
        ("field", "Transformer Engine", "local", "recipes"),
        [
            (f"`{name}`", one, other, "all" if recipes == everywhere else ", ".join(recipes))
            for (name, one, other), recipes in sorted(rows.items())
        ],
    )


if __name__ == "__main__":
    main()
