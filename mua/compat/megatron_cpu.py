"""Runs Megatron-Core where there is no CUDA device, and fixes what it gets wrong without Transformer Engine.

Upstream: megatron-core 0.19.2. It names the device throughout its own source (``torch.cuda.current_device()``,
``device="cuda"``, ``"torch.cuda.FloatTensor"``), so it cannot train on a CPU, although nothing in its mathematics needs
CUDA. :func:`install` puts an import hook in front of it that, on a machine without CUDA, rewrites five kinds of syntax
while a module is imported:

1. ``torch.cuda``        becomes a stand-in (:class:`CudaStandIn`);
2. ``"cuda"``            becomes ``"cpu"``;
3. ``x.type()``          reports ``torch.cuda.<X>Tensor``, which the optimizers compare with;
4. ``x.cuda(...)``       becomes ``x``;
5. ``pin_memory=True``   becomes ``pin_memory=False``.

No installed file is touched, torch is not patched, and with a CUDA device nothing is rewritten. The remaining faults,
which are not names of devices, are fixed after import, here and in :mod:`mua.compat.megatron_optimizer`. Each
applies only where its own condition holds. Notices of Megatron-Core that tell a user nothing are dropped.

Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_still_needs_the_import_hook`` fails.

What is fixed here: random states, experts, collectives that gloo lacks.

``megatron/core/transformer/moe/moe_utils.py``: ``maybe_move_tensor_to_cpu`` converts to numpy only what comes from a
GPU; ``all_to_all_single`` then gets a tensor where it wants integers. Goes earlier
when ``tests/unit/test_megatron_compat.py::test_upstream_still_needs_the_import_hook`` fails.

``megatron/core/tensor_parallel/mappings.py``: gloo has no gather and reduce-scatter of uneven splits, which the
alltoall dispatcher asks for with expert tensor parallelism. Every split is padded to the longest one.
Goes when: ``tests/unit/test_megatron_compat.py::test_gloo_still_lacks_uneven_gather`` fails.

``megatron/core/tensor_parallel/random.py``:

* Without CUDA its tracker reads and writes the generator of a CUDA device through torch's private C names. Here the
  one CPU generator takes that place, and the warning that the CPU state changed inside a fork, true by construction,
  is dropped.
* Without Transformer Engine, ``CheckpointWithoutOutput`` calls three names that only Transformer Engine defines:
  ``recompute_modules=["layernorm"]`` ends in a NameError. They are given their meaning without fp8.
  Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_lacks_recompute_names`` fails.
* What ``CheckpointWithoutOutput`` recomputed it puts into the storage of the tensor that it had emptied by a C++
  function that is compiled while training runs: every node then needs a compiler, ninja and Python's headers, and a
  process that is killed meanwhile leaves a lock on which the next run waits for ever, in a folder that knows no version
  of torch. Here the bytes are copied, as Megatron-Core itself did before: one more copy of a norm's output.
  Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_compiles_while_it_recomputes`` fails.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mua.compat import megatron_optimizer

T = TypeVar("T")


def _nothing(*_: Any, **__: Any) -> None:
    """The device is one, does what it is told at once, and keeps no cache: there is nothing to do or to wait for."""


class SynchronousQueue:
    """``torch.cuda.Stream`` and ``torch.cuda.Event`` of a device that finishes every call before it returns."""

    wait = record = synchronize = wait_stream = wait_event = _nothing

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes and ignores what they take."""

    def record_event(self, event: SynchronousQueue | None = None) -> SynchronousQueue:
        return event or SynchronousQueue()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class CudaStandIn(types.ModuleType):
    """The part of ``torch.cuda`` that Megatron-Core uses, on the CPU. Any other name is torch's own."""

    def __init__(self) -> None:
        super().__init__("mua.compat.megatron_cpu.cuda")
        stream = SynchronousQueue()
        vars(self).update(
            Event=SynchronousQueue,
            Stream=SynchronousQueue,
            nvtx=types.SimpleNamespace(
                range=lambda *_: contextlib.nullcontext(), range_push=_nothing, range_pop=_nothing
            ),
            set_device=_nothing,
            synchronize=_nothing,
            empty_cache=_nothing,
            device_count=lambda: 1,
            is_available=lambda: False,
            current_stream=lambda *_: stream,
            default_stream=lambda *_: stream,
            stream=lambda _: contextlib.nullcontext(),
            manual_seed=torch.manual_seed,
            get_rng_state=lambda *_, **__: torch.get_rng_state(),
            set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
            max_memory_allocated=lambda *_: 0,
            memory_allocated=lambda *_: 0,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")


def cuda_type_name(tensor: Any) -> Any:
    """``tensor.type()`` as it would read on a GPU: ``torch.cuda.FloatTensor`` for a float32 tensor on the CPU."""
    name = tensor.type()
    if isinstance(name, str) and name.endswith("Tensor"):
        return "torch.cuda." + name.rsplit(".", 1)[-1]
    return name


def stay(tensor: T) -> T:
    """``tensor.cuda()`` where the tensor already lies on the only device."""
    return tensor


_PREFIX = "megatron.core"
_STAND_IN = CudaStandIn()
_CUDA, _TYPE, _STAY = "_mua_cuda", "_mua_type_name", "_mua_stay"

# The hook's own text names the cache, so that bytecode of other rules is never taken.
_RULES = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


class _Rewrite(ast.NodeTransformer):
    """The five replacements listed in the module's docstring."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_CUDA, node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "cuda" and ast.unparse(function.value) != "torch":
            return self._call(_STAY, function.value, node)
        if isinstance(function, ast.Attribute) and function.attr == "type" and not node.args and not node.keywords:
            return self._call(_TYPE, function.value, node)
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]  # the pattern itself must stay a literal
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def _call(self, name: str, argument: ast.expr, at: ast.Call) -> ast.AST:
        call = ast.Call(ast.Name(name, ast.Load()), [self.visit(argument)], [])
        return ast.copy_location(call, at)


class _RepairLoader(importlib.machinery.SourceFileLoader):
    """Loads a module of megatron.core unchanged, then applies its repair, if it has one."""

    without_cuda = False

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> types.CodeType:  # type: ignore[override]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # escape sequences in upstream's own text
            code: types.CodeType = compile(self.read(data, path), path, "exec", 0, True, _optimization)
        return code

    def read(self, data: bytes, path: str) -> Any:
        """What is compiled."""
        return data

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        repair = _REPAIRS.get(module.__name__)
        if repair is not None:
            repair(module, self.without_cuda)


class _CpuLoader(_RepairLoader):
    """Loads a module of megatron.core with every mention of CUDA replaced.

    Compiled code goes through Python's own bytecode cache (validated by the source's time and size, written
    atomically), only in the user's cache folder instead of site-packages, so that the rewritten and the original
    code never meet.
    """

    without_cuda = True

    def read(self, data: bytes, path: str) -> ast.AST:
        """The source as a tree, rewritten."""
        return ast.fix_missing_locations(_Rewrite().visit(ast.parse(data, path)))

    def get_data(self, path: Any) -> bytes:
        return super().get_data(_cached(str(path)))

    def set_data(self, path: Any, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(_cached(str(path)), data, _mode=_mode)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update({_CUDA: _STAND_IN, _TYPE: cuda_type_name, _STAY: stay})
        super().exec_module(module)


class _Finder:
    """Gives modules of megatron.core one of the loaders above and leaves all others alone."""

    def __init__(self, loader: type[_RepairLoader]) -> None:
        self.loader = loader

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _PREFIX and not name.startswith(_PREFIX + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = self.loader(spec.loader.name, spec.loader.path)
        return spec


_installed: _Finder | None = None


def _cached(path: str) -> str:
    """The file that holds the rewritten bytecode in place of ``path``; other paths are returned as they are."""
    if not path.endswith(".pyc"):
        return path
    digest = hashlib.sha256(path.encode()).hexdigest()[:32]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(root / "mua" / "megatron-cpu" / _RULES / f"{digest}.pyc")


def install() -> bool:
    """Puts the hook in front of ``megatron.core``; call it before the first import of that package.

    Returns:
        Whether CUDA is absent, so that sources are rewritten. Calling again changes nothing.

    Raises:
        RuntimeError: ``megatron.core`` was imported before, so that the hook came too late.
    """
    global _installed
    without_cuda = not torch.cuda.is_available()
    if _installed is not None:
        return without_cuda
    early = sorted(name for name in sys.modules if name == _PREFIX or name.startswith(_PREFIX + "."))
    if early:
        raise RuntimeError(
            f"{early[0]} was imported before mua.compat.megatron_cpu.install(); import mua.megatron (or call install) "
            "first"
        )
    _installed = _Finder(_CpuLoader if without_cuda else _RepairLoader)
    sys.meta_path.insert(0, _installed)  # type: ignore[arg-type]
    # Drop the notices listed below where Megatron-Core or the parts of torch it calls raise them.
    notices, records = list(_NOTICES), list(_RECORDS.items())
    if without_cuda:
        notices.append((_CUDA_NOTICE, UserWarning))
        records.append(_CUDA_RECORD)
    for message, category in notices:
        warnings.filterwarnings("ignore", message, category, module=r"megatron\.core|torch\.distributed")
    for name, message in records:
        logging.getLogger(name).addFilter(lambda record, message=message: message not in str(record.msg))  # type: ignore[misc]
    return without_cuda


def cuda() -> types.ModuleType:
    """What Megatron-Core sees as ``torch.cuda``: the stand-in, or torch's own where CUDA is available."""
    return torch.cuda if torch.cuda.is_available() else _STAND_IN


_NOTICES: tuple[tuple[str, type[Warning]], ...] = (
    # Known and of no consequence: both packages are optional.
    ("Transformer Engine and Apex are not installed", UserWarning),
    ("Apex is not installed", UserWarning),
    # Experts that are not split where the rest of the layer is.
    ("`sequence_parallel` is set to `True`, but tensor model parallel size is 1", UserWarning),
    # A part of Megatron-Core that is imported along with the rest.
    ("MimoModelConfig is experimental", UserWarning),
    # Upstream warning about its own defaults and its own calls of torch.
    ("full scope is deprecated", UserWarning),
    ("Warning: tp_group is None", DeprecationWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf", UserWarning),
    (r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning),
    ("Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning),
)

_RECORDS = {
    # Upstream, in the log: what is to replace what is used here, and its default for what is not given.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
}

# The same where there is no CUDA device; with one, both would say something.
_CUDA_NOTICE = "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONN"
_CUDA_RECORD = ("torch.utils.cpp_extension", "No CUDA runtime is found")


# ---- faults that are no names of devices


def repair_moe_utils(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``megatron.core.transformer.moe.moe_utils`` a conversion that takes host tensors too."""
    if without_cuda:
        module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
            tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
        )


def repair_random(module: Any, without_cuda: bool) -> None:
    """Applies all repairs to the imported ``megatron.core.tensor_parallel.random``."""
    if without_cuda:
        module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        module._set_cuda_rng_state = lambda new_state, *_, **__: torch.set_rng_state(new_state)
        logging.getLogger(module.__name__).addFilter(
            lambda record: "CPU RNG state changed within GPU RNG context" not in str(record.msg)
        )
    if not hasattr(module, "FP8GlobalStateManager"):
        module.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
        module.activation_recompute_forward = lambda *_, **__: contextlib.nullcontext()
        module.fp8_autocast = lambda *_, **__: contextlib.nullcontext()

    def fill_storage(emptied: Tensor, computed: Tensor) -> None:
        """Give the storage of ``emptied``, which was resized to nothing, the bytes of that of ``computed``.

        Every view of that storage has them then, and no version counter moves.
        """
        storage, source = emptied.untyped_storage(), computed.untyped_storage()
        storage.resize_(source.nbytes())
        storage.copy_(source)

    module._get_share_storage = lambda: fill_storage


def repair_mappings(module: Any, without_cuda: bool) -> None:
    """Replaces the two collectives of the imported ``megatron.core.tensor_parallel.mappings`` where gloo serves."""
    if not without_cuda:
        return
    even_gather, even_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        """Concatenates ``[sizes[r], ...]`` of every rank to ``[sum(sizes), ...]``."""
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        whole = input_.new_empty((max(sizes) * len(sizes), *input_.shape[1:]))
        dist.all_gather_into_tensor(whole, _padded(input_, max(sizes)), group=group)
        return torch.cat([part[:size] for part, size in zip(whole.chunk(len(sizes)), sizes, strict=True)])

    def scatter(input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        """Sums ``[sum(sizes), ...]`` over ranks and returns this rank's ``[sizes[rank], ...]``."""
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        local = input_.new_empty((max(sizes), *input_.shape[1:]))
        padded = torch.cat([_padded(part, max(sizes)) for part in input_.split(sizes)])
        dist.reduce_scatter_tensor(local, padded, group=group)
        return local[: sizes[group.rank()]].contiguous()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather, scatter


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))]).contiguous()


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int, device: torch.device) -> Iterator[None]:
    """Rank ``rank`` of ``world_size`` on ``device``, whose collectives move nothing; the process group is the caller's
    to end. Members and sizes of the groups made inside are right.

    Upstream: torch 2.14.1 has a ``fake`` backend and keeps its store in a private module; megatron-core 0.19.2 names
    gloo for some of its groups, beside which there is no other than the fake one, and asks CUDA for the current device.
    Goes when: ``torch.distributed`` exports the store of its ``fake`` backend.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init: Any = torch.nn.init
    upstream, draw = parallel_state.create_group, init.normal_
    _STAND_IN.current_device = lambda: device  # type: ignore[method-assign]
    parallel_state.create_group = lambda *args, **kwargs: upstream(*args, **(kwargs | {"backend": None}))
    if device.type == "meta":  # drawing values that nobody keeps takes torch a millisecond for each tensor
        init.normal_ = lambda tensor, *_, **__: tensor
    try:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        yield
    finally:
        del _STAND_IN.current_device  # the class's is seen again
        parallel_state.create_group, init.normal_ = upstream, draw


_REPAIRS: dict[str, Callable[[Any, bool], None]] = {
    "megatron.core.tensor_parallel.random": repair_random,
    "megatron.core.tensor_parallel.mappings": repair_mappings,
    "megatron.core.transformer.moe.moe_utils": repair_moe_utils,
    "megatron.core.optimizer": megatron_optimizer.repair_optimizer,
    "megatron.core.optimizer.distrib_optimizer": megatron_optimizer.repair_distributed_optimizer,
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": megatron_optimizer.repair_offload,
}
