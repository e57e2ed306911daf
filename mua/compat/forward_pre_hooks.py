"""A module's forward pre-hooks, called by whoever computes with its weight without calling the module.

Reason: with ``overlap_param_gather`` Megatron-Core's data-parallel wrapper waits for a module's gathered weight in a
forward pre-hook. One grouped product over all experts reads the weights of their linear layers and calls none of them,
and torch has no public way to call the hooks alone.

Upstream: torch 2.14.1. Goes when: ``torch.nn.Module`` can run its pre-hooks by a public name;
``tests/parity/test_megatron_layouts.py::test_overlapped_communication_changes_nothing`` trains through it.
"""

from __future__ import annotations

from torch import nn


def run_forward_pre_hooks(module: nn.Module) -> None:
    """Call the hooks with no arguments; those that would change them are not for this."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
