"""Every workaround for Megatron-Core: that it does what it says, and that upstream still needs it.

A test named ``test_upstream_...`` or ``test_gloo_...`` fails when the limit is gone; the workaround that names it can
then be deleted. Covers a machine without CUDA only.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mua.compat import megatron_cpu
from mua.compat.megatron_adam import GroupStepAdam
from tests.distributed import run_distributed
from tests.megatron_support import write_model

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")


def run_script(script: str, *arguments: str) -> dict[str, Any]:
    """What the script prints last, as JSON, in a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def upstream() -> dict[str, Any]:
    """Facts about Megatron-Core as installed, without the hook."""
    return run_script("""
        import inspect, json, torch
        import megatron.core.parallel_state
        import megatron.core.tensor_parallel.random as random
        import megatron.core.transformer.moe.moe_utils as moe
        import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
        facts = {
            "recompute names": hasattr(random, "FP8GlobalStateManager"),
            "host tensor": type(moe.maybe_move_tensor_to_cpu(torch.zeros(1), as_numpy=True)).__name__,
            "manager": "Manager()" in inspect.getsource(writer.get_write_results_queue.__wrapped__),
        }
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        megatron.core.parallel_state.initialize_model_parallel()
        try:
            random.model_parallel_cuda_manual_seed(1)
        except Exception as error:
            facts["seed"] = str(error)
        print(json.dumps(facts))
    """)


@needs_cpu
def test_upstream_still_needs_the_import_hook(upstream: dict[str, Any]) -> None:
    assert "NVIDIA driver" in upstream["seed"]


def test_upstream_lacks_recompute_names(upstream: dict[str, Any]) -> None:
    assert not upstream["recompute names"]


@needs_cpu
def test_upstream_still_leaves_host_tensors_as_they_are(upstream: dict[str, Any]) -> None:
    assert upstream["host tensor"] == "Tensor"


def test_upstream_checkpoint_still_starts_a_manager(upstream: dict[str, Any]) -> None:
    assert upstream["manager"]


def test_upstream_adam_fallback_still_cannot_resume(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    facts = run_script(
        """
        import json, sys
        from pathlib import Path
        from mua.compat import megatron_cpu
        for module in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
            del megatron_cpu._REPAIRS[module]
        from mua.algorithms.losses import CrossEntropyLoss
        from mua.errors import ModelError
        from tests.megatron_support import backend, make_batch
        model, checkpoint = Path(sys.argv[1]), Path(sys.argv[2])
        with backend(model) as built:
            built.train_step(make_batch(), CrossEntropyLoss())
            built.save(checkpoint, {})
        with backend(model) as built:
            try:
                built.load(checkpoint)
                print(json.dumps({"error": None}))
            except ModelError as error:
                print(json.dumps({"error": str(error)}))
        """,
        str(tmp_path / "model"),
        str(tmp_path / "step_00000001"),
    )
    assert facts["error"] is not None
    assert "could not be loaded" in facts["error"]


def uneven_gather() -> str:
    rank = dist.get_rank()
    try:
        dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.ones(2 + rank))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_gloo_still_lacks_uneven_gather() -> None:
    assert all(run_distributed(uneven_gather, 2))


def uneven_collectives() -> tuple[np.ndarray, np.ndarray]:
    from megatron.core.tensor_parallel import mappings

    rank, sizes = dist.get_rank(), [2, 0, 3]
    local = torch.full((sizes[rank], 2), float(rank))
    gathered = mappings._gather_along_first_dim(local, dist.group.WORLD, sizes)
    scattered = mappings._reduce_scatter_along_first_dim(torch.arange(10.0).view(5, 2), dist.group.WORLD, sizes)
    return gathered.numpy(), scattered.numpy()


@needs_cpu
def test_uneven_gather_and_reduce_scatter() -> None:
    results = run_distributed(uneven_collectives, 3)
    for gathered, _ in results:
        assert gathered[:, 0].tolist() == [0, 0, 2, 2, 2]
    whole = np.arange(10.0).reshape(5, 2) * 3
    assert np.array_equal(np.concatenate([scattered for _, scattered in results]), whole)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_group_step_adam_is_torchs(adam_w_mode: bool) -> None:
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    own, reference = (torch.nn.Parameter(start.clone()) for _ in range(2))
    theirs = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)([reference], **settings)
    ours = GroupStepAdam([own], **settings, adam_w_mode=adam_w_mode)
    for step in range(5):
        own.grad = reference.grad = torch.full_like(start, float(step) - 1.5)
        ours.step()
        theirs.step()
    torch.testing.assert_close(own, reference, rtol=1e-6, atol=1e-7)
    assert ours.param_groups[0]["step"] == 5
    assert set(ours.state[own]) == {"exp_avg", "exp_avg_sq"}


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = run_script("""
        import json, os, sys
        sys.dont_write_bytecode = False
        import mua.megatron
        import megatron.core.utils as module
        print(json.dumps({"file": module.__file__, "device": str(module.torch.device("cpu"))}))
    """)
    assert facts["file"].endswith("site-packages/megatron/core/utils.py")
    assert list((tmp_path / "mua" / "megatron-cpu").glob("*/*.pyc"))


def test_a_hook_that_comes_too_late_says_so() -> None:
    facts = run_script("""
        import json, sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        from mua.compat import megatron_cpu
        try:
            megatron_cpu.install()
        except RuntimeError as error:
            print(json.dumps({"error": str(error)}))
    """)
    assert "was imported before mua.compat.megatron_cpu.install()" in facts["error"]


def random_states() -> tuple[list[float], bool]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    before = torch.get_rng_state()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        drawn = torch.rand(3).tolist()
    return drawn, torch.equal(before, torch.get_rng_state())


@needs_cpu
def test_tensor_parallel_random_states_differ_and_leave_the_generator_alone() -> None:
    (first, kept), (second, also_kept) = run_distributed(random_states, 2)
    assert first != second
    assert kept
    assert also_kept
