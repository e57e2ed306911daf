"""What torch has no public name for: pre-hooks, attention with normalizers, process groups beside the default one.

Upstream: torch 2.14.1, sglang 0.5.23.

**A module's forward pre-hooks**, called by whoever computes with its weight without calling the module.
Reason: with ``overlap_param_gather`` Megatron-Core's data-parallel wrapper waits for a module's gathered weight in a
forward pre-hook. One grouped product over all experts reads the weights of their linear layers and calls none of them,
and torch has no public way to call the hooks alone.

Goes when: ``torch.nn.Module`` can run its pre-hooks by a public name;
``tests/parity/test_megatron_layouts.py::test_overlapped_communication_changes_nothing`` trains through it.

**Fused attention on the CPU** that also gives its log-normalizers, and the gradients that belong to given ones.
Reason: softmaxes over parts of the keys are joined by their normalizers, which ``scaled_dot_product_attention`` does
not return. ``flex_attention`` does, but has no backward pass on the CPU. These are the operators that
``scaled_dot_product_attention`` itself calls there.

Goes when:
``tests/unit/test_megatron_attention.py::test_upstream_flex_attention_has_no_backward_pass_on_the_cpu`` fails.

**A process group** between this process and others that are not in its default group.
Reason: SGLang's ``/init_weights_update_group`` makes a group of the engine's ranks and one trainer rank. The engines
have a default process group of their own, and ``torch.distributed.new_group`` only divides the default one.
``_new_process_group_helper``, which SGLang calls itself (``init_custom_process_group``), makes a group from any store;
both sides must call it alike, because it derives the store's keys and the backend's options. Importing SGLang's
function instead would load all of SGLang into the trainer.

Goes when:
``tests/unit/test_megatron_compat.py::test_upstream_groups_outside_the_default_one_are_private`` fails.
``tests/parity/test_engine_transports.py`` sends weights through one.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d


def run_forward_pre_hooks(module: nn.Module) -> None:
    """Call the hooks with no arguments; those that would change them are not for this."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention; where ``causal``, query i sees keys 0 to i.

    Args:
        query: float32 or float64 ``[batch, heads, queries, head dim]``, any strides but 1 in the last dimension.
        key: ``[batch, heads, keys, head dim]``, and so ``value``; heads may be expanded.
        scale: factor on the scores.

    Returns:
        the output, shaped as ``query``, and ``log sum exp`` of each query's scores, ``[batch, heads, queries]``.
    """
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return result


def flash_attention_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, normalizer: Tensor, *, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients with respect to query, key and value.

    Probabilities are recomputed as ``exp(score - normalizer)``: with output and normalizer of a softmax over more keys
    than these, the result is what these keys contribute to the gradients of that softmax.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, normalizer, 0.0, causal, scale=scale
    )
    return result


def outside_group(
    backend: str, host: str, meeting: socket.socket, *, world_size: int, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Join, as rank 0, the group ``name`` that ``world_size - 1`` other processes join at the port of ``meeting``.

    Blocks until all have come or ``timeout`` has passed, which raises torch's ``DistStoreError`` or ``RuntimeError``.
    ``meeting`` listens on a free port; it is the group's afterwards, or closed.
    """
    public: Any = dist  # its stubs do not export the stores
    private: Any = distributed_c10d
    port = meeting.getsockname()[1]
    store = public.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=True,
        master_listen_fd=meeting.detach(),
    )
    group, _ = private._new_process_group_helper(
        world_size, 0, [], dist.Backend(backend), public.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    private._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
