"""Every workaround for Megatron-Core and torch: that it does what it says, and that upstream still needs it.

A test named ``test_upstream_...`` or ``test_gloo_...`` fails when the limit is gone; the workaround that names it can
then be deleted. Covers a machine without CUDA only; those of attention are in test_megatron_attention.py, of SGLang in
``tests/contract/test_sglang_cpu_shim.py``.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mua.algorithms.losses import CrossEntropyLoss
from mua.compat import megatron_cpu
from mua.compat.megatron_optimizer import joined, split
from mua.config.schema import MegatronConfig
from mua.megatron.parallel import start_groups
from tests.distributed import run_distributed, run_on_workers
from tests.megatron_support import backend, make_batch, write_model

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")


COMPAT = Path(megatron_cpu.__file__).parent
NOTED = [path for path in sorted(COMPAT.rglob("*.py")) if "Upstream:" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", NOTED, ids=lambda path: path.name)
def test_what_is_said_of_upstream_is_said_of_what_is_installed(path: Path) -> None:
    documentation = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    named = re.findall(r"(megatron-core|torch|sglang)\s+(\d[\d.]*\d)", documentation.split("Upstream:")[1])
    assert named
    for package, said in named:
        assert f"{version(package).split('+')[0]}.".startswith(f"{said}.")
    for file, test in re.findall(r"``(tests/[\w/]+\.py)::(\w+)``", documentation):
        assert f"def {test}(" in (COMPAT.parents[1] / file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def upstream() -> dict[str, Any]:
    """Facts about Megatron-Core as installed, without the hook, in an interpreter of its own."""
    script = """
        import json, sys, torch
        import megatron.core.parallel_state
        import megatron.core.tensor_parallel.random as random
        import megatron.core.transformer.moe.moe_utils as moe
        facts = {
            "host tensor": type(moe.maybe_move_tensor_to_cpu(torch.zeros(1), as_numpy=True)).__name__,
            "recompute names": hasattr(random, "FP8GlobalStateManager"),
        }
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        megatron.core.parallel_state.initialize_model_parallel()
        try:
            random.model_parallel_cuda_manual_seed(1)
        except Exception as error:
            facts["seed"] = str(error)
        print(json.dumps(facts))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@needs_cpu
@pytest.mark.slow
def test_upstream_still_needs_the_import_hook(upstream: dict[str, Any]) -> None:
    assert "NVIDIA driver" in upstream["seed"]


@needs_cpu
@pytest.mark.slow
def test_upstream_still_leaves_host_tensors_as_they_are(upstream: dict[str, Any]) -> None:
    assert upstream["host tensor"] == "Tensor"


@pytest.mark.slow
def test_upstream_lacks_recompute_names(upstream: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What recomputes a norm calls names that only Transformer Engine defines."""
    from megatron.core.tensor_parallel import random

    assert not upstream["recompute names"]
    given = torch.full((2,), 3.0, requires_grad=True)
    part = random.CheckpointWithoutOutput()
    squares = part.checkpoint(torch.square, given)
    whole = squares.sum()
    part.discard_output_and_register_recompute(whole)
    whole.backward()
    assert given.grad is not None
    assert given.grad.tolist() == [6.0, 6.0]
    monkeypatch.delattr(random, "FP8GlobalStateManager")
    with pytest.raises(NameError, match="FP8GlobalStateManager"):
        random.CheckpointWithoutOutput().checkpoint(torch.square, given)


def test_upstream_compiles_while_it_recomputes() -> None:
    """The C++ source is there, and nothing here asks for it: views of an emptied tensor have the bytes again."""
    from megatron.core.tensor_parallel import random

    assert "set_data_ptr" in random._SHARE_STORAGE_SRC
    values = torch.arange(6.0)
    view, version, computed = values.view(2, 3), values._version, values.clone()
    values.untyped_storage().resize_(0)
    random._get_share_storage()(values, computed)
    assert random._share_storage_ext is None
    assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert values._version == version


def uneven_gather() -> str:
    rank = dist.get_rank()
    try:
        dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.ones(2 + rank))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_gloo_still_lacks_uneven_gather() -> None:
    assert all(run_on_workers(2, uneven_gather))


def uneven_collectives() -> tuple[np.ndarray, np.ndarray]:
    from megatron.core.tensor_parallel import mappings

    rank, sizes = dist.get_rank(), [2, 0, 3]
    local = torch.full((sizes[rank], 2), float(rank))
    gathered = mappings._gather_along_first_dim(local, dist.group.WORLD, sizes)
    scattered = mappings._reduce_scatter_along_first_dim(torch.arange(10.0).view(5, 2), dist.group.WORLD, sizes)
    return gathered.numpy(), scattered.numpy()


@needs_cpu
def test_uneven_gather_and_reduce_scatter() -> None:
    results = run_on_workers(3, uneven_collectives)
    for gathered, _ in results:
        assert gathered[:, 0].tolist() == [0, 0, 2, 2, 2]
    whole = np.arange(10.0).reshape(5, 2) * 3
    assert np.array_equal(np.concatenate([scattered for _, scattered in results]), whole)


def test_a_bfloat16_weight_and_its_remainder_are_the_float32_one() -> None:
    weights = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3F807FFF, 0], dtype=torch.int32)  # halfway, and ends
    whole = torch.cat([weights, -weights, bits.view(torch.float32), -bits.view(torch.float32)])
    high, low = split(whole)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(joined(high, low), whole)
    halfway = low == -(2**15)  # a cast rounds these to even, Transformer Engine away from zero
    assert halfway.sum() >= 4
    assert torch.equal(high[~halfway], whole[~halfway].bfloat16())


class PreciseAdam:
    """What Megatron asks of Transformer Engine's Adam with the bits that a bfloat16 weight lacks as its main weight."""

    def __init__(self, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
        self.param_groups = [{"params": [parameter]}]
        self.state = {
            parameter: {"master_param": remainder}
            | {name: torch.ones(len(parameter)) for name in ("exp_avg", "exp_avg_sq")}
        }

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[parameter][name]

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        assert value.dtype == self.state[parameter][name].dtype
        self.state[parameter][name] = value


def precise_optimizer(whole: torch.Tensor) -> Any:
    """Of one bfloat16 parameter with float32 weights ``whole``."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parameter, remainder = split(whole)
    optimizer = types.SimpleNamespace(
        model_param_group_index_map={parameter: (0, 0)},
        config=types.SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
        optimizer=PreciseAdam(parameter, remainder),
    )
    for name in ("_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states"):
        setattr(optimizer, name, getattr(DistributedOptimizer, name).__get__(optimizer))
    return optimizer


def test_a_precise_adam_is_saved_with_whole_weights() -> None:
    from mua.compat.megatron_optimizer_state import WEIGHT, ParameterState

    whole = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    saved, other = precise_optimizer(whole), precise_optimizer(torch.zeros(1000))
    ((one, _),), ((two, _),) = saved.model_param_group_index_map.items(), other.model_param_group_index_map.items()
    found = ParameterState(one, 0, 1000, saved, None).read()
    assert torch.equal(found[WEIGHT], whole)
    ParameterState(two, 0, 1000, other, None).write(found)
    assert torch.equal(two, one)
    assert torch.equal(other.optimizer.state[two]["master_param"], saved.optimizer.state[one]["master_param"])


def test_upstream_takes_remainders_for_weights() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    optimizer = precise_optimizer(torch.randn(10))
    (parameter,) = optimizer.model_param_group_index_map
    upstream = DistributedOptimizer._get_main_param_and_optimizer_states.__wrapped__
    assert upstream(optimizer, parameter)["param"].dtype == torch.int16


def test_upstream_initializes_a_precise_adam_by_one_argument() -> None:
    """Transformer Engine's takes a second one without default."""
    from megatron.core import optimizer

    assert "opt.initialize_state(p)" in inspect.getsource(optimizer)


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("torch.cuda.current_device()", "_mua_cuda.current_device()"),
        ("torch.zeros(1, device='cuda')", "torch.zeros(1, device='cpu')"),
        ("x.y.cuda(non_blocking=True)", "_mua_stay(x.y)"),
        ("p.grad.type() == 'torch.cuda.FloatTensor'", "_mua_type_name(p.grad) == 'torch.cuda.FloatTensor'"),
        ("x.type(torch.float32)", "x.type(torch.float32)"),
        ("torch.empty(2, pin_memory=True)", "torch.empty(2, pin_memory=False)"),
        ("torch.tensor([1], pin_memory=True).cuda()", "_mua_stay(torch.tensor([1], pin_memory=False))"),
        ("f('cuda:0', 'nccl')", "f('cuda:0', 'nccl')"),
    ],
)
def test_source_is_rewritten(source: str, rewritten: str) -> None:
    assert ast.unparse(megatron_cpu._Rewrite().visit(ast.parse(source))) == rewritten


@needs_cpu
def test_rewritten_bytecode_stays_out_of_the_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec("megatron.core.utils")
    assert found is not None
    assert isinstance(found.loader, megatron_cpu._CpuLoader)
    assert found.origin is not None
    installed = Path(importlib.util.cache_from_source(found.origin))
    before = installed.stat() if installed.exists() else None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    compiled = found.loader.get_code("megatron.core.utils")
    assert list((tmp_path / "mua" / "megatron-cpu").glob("*/*.pyc"))
    assert before == (installed.stat() if installed.exists() else None)
    monkeypatch.setattr(megatron_cpu._CpuLoader, "read", None)  # what is in the cache is not compiled again
    assert found.loader.get_code("megatron.core.utils") == compiled


def test_a_hook_that_comes_too_late_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_cpu, "_installed", None)
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match=r"was imported before mua\.compat\.megatron_cpu\.install\(\)"):
        megatron_cpu.install()


def noise(model: str, checkpoints: str, settings: dict[str, Any]) -> str:
    """What a rank and the libraries below it write to standard error while it trains, saves and loads."""

    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as errors:
        os.dup2(errors.fileno(), 2)
        try:
            with backend(Path(model), **settings) as built:
                built.train_step(make_batch(), CrossEntropyLoss())
                for step, background in ((1, True), (2, False)):
                    built.save(Path(checkpoints) / f"step_{step:08d}", {}, background=background)
                built.load(Path(checkpoints) / "step_00000002")
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
        errors.seek(0)
        return errors.read()


@needs_cpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}, marks=pytest.mark.slow),
    ],
    ids=["single", "TP2"],
)
def test_training_and_checkpoints_write_no_notices(settings: dict[str, Any], tmp_path: Path) -> None:
    """None of what Megatron-Core tells its developers. In fresh ranks, as it says most things once a process."""
    write_model(tmp_path / "model", experts=4)
    world = settings.get("tensor_parallel", 1)
    assert run_distributed(noise, world, str(tmp_path / "model"), str(tmp_path / "out"), settings) == [""] * world


def test_other_records_of_the_same_loggers_are_written(caplog: pytest.LogCaptureFixture) -> None:
    for name, message in megatron_cpu._RECORDS.items():
        logger = logging.getLogger(name)
        logger.warning("%s", f"something else than {message[:5]}")
        logger.warning(f"x {message} y")
    assert len(caplog.records) == len(megatron_cpu._RECORDS)
    assert all(record.getMessage().startswith("something else") for record in caplog.records)


def test_upstream_groups_outside_the_default_one_are_private() -> None:
    """torch's public ``new_group`` divides the default group, and SGLang therefore calls what it is made of."""
    with pytest.raises(ValueError, match="new group's world size should be less or equal"):
        run_in_a_group_of_one(lambda: dist.new_group([0, 1]))
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None
    assert sglang.submodule_search_locations is not None
    source = (Path(sglang.submodule_search_locations[0]) / "srt/utils/common.py").read_text(encoding="utf-8")
    body = source.split("def init_custom_process_group(")[1].split("\ndef ")[0]
    assert "_new_process_group_helper(" in body
    assert "_world.pg_group_ranks[pg] =" in body


def run_in_a_group_of_one(function: Callable[[], Any]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        function()
    finally:
        dist.destroy_process_group()


def random_states() -> tuple[list[float], bool]:
    from megatron.core import tensor_parallel

    start_groups(MegatronConfig(tensor_parallel=2), 5)
    before = torch.get_rng_state()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        drawn = torch.rand(3).tolist()
    return drawn, torch.equal(before, torch.get_rng_state())


@needs_cpu
def test_tensor_parallel_random_states_differ_and_leave_the_generator_alone() -> None:
    (first, kept), (second, also_kept) = run_on_workers(2, random_states)
    assert first != second
    assert kept
    assert also_kept
