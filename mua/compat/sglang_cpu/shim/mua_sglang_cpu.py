"""SGLang plugin (entry-point group ``sglang.srt.plugins``) for hosts without CUDA. Upstream: sglang 0.5.23.

Attention is computed for several sequences at once (:mod:`mua_cpu_grouped`), and five limits are lifted. Deterministic
inference accepts CPU, prefix cache included: SGLang knows batch-invariant kernels only for CUDA and XPU, so it gets
those of :mod:`mua_cpu_invariant`, when it asks for them. Pinning host memory becomes a no-op, because
``cudaHostRegister`` means nothing here (``return_routed_experts`` asks for it). With a CUDA build of torch 2.14,
``torch.get_device_module()`` is ``torch.cuda`` also where no device is, so that releasing memory would end the server:
without an argument it is the CPU's here. Such a build brings NCCL too, which SGLang would use between the ranks of an
engine wherever it can be loaded: here it is not found, as with a CPU build. Last, scheduler and detokenizer are forked
from the server, which has imported everything, instead of importing it again: only CUDA forbids that, and a start takes
half the processor time.
"""

from __future__ import annotations


def register() -> None:
    """Called by SGLang in every process of the server before the model is built."""
    import multiprocessing

    import mua_cpu_grouped
    import mua_cpu_invariant
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    import sglang.srt.distributed.device_communicators.pynccl as pynccl
    import sglang.srt.mem_cache.pool_host.common as pool_host
    import torch
    from sglang.srt.arg_groups import choices

    def no_library(*_args: object) -> None:
        raise OSError("no CUDA")

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    mua_cpu_grouped.enable()
    batch_invariant_ops.enable_batch_invariant_mode = mua_cpu_invariant.enable
    pool_host._cuda_host_register = lambda *_args, **_kwargs: None
    device_module = torch.get_device_module
    torch.get_device_module = lambda device=None: device_module("cpu" if device is None else device)
    pynccl.NCCLLibrary = no_library
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_args, **_kwargs: None  # SGLang sets "spawn" when it starts
