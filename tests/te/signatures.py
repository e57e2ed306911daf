"""The signatures of Transformer Engine that the stand-in keeps, read from source without importing it.

    python -m tests.te.signatures FOLDER      of an unpacked wheel of transformer-engine (it holds all of the Python)

writes ``signatures.json`` beside this file: of every function and method that Megatron-Core reaches here, its arguments
in order with their kinds and literal defaults.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("signatures.json")
NAMES = {
    "pytorch/attention/dot_product_attention/dot_product_attention.py": (
        "DotProductAttention.__init__", "DotProductAttention.forward", "DotProductAttention.set_context_parallel_group",
    ),
    "pytorch/attention/rope.py": ("apply_rotary_pos_emb",),
    "pytorch/cpp_extensions/gemm.py": ("general_gemm",),
    "pytorch/cpu_offload.py": ("get_cpu_offload_context",),
    "pytorch/cross_entropy.py": ("parallel_cross_entropy",),
    "pytorch/distributed.py": (
        "CudaRNGStatesTracker.__init__", "CudaRNGStatesTracker.add", "CudaRNGStatesTracker.fork",
        "CudaRNGStatesTracker.get_states", "CudaRNGStatesTracker.reset", "CudaRNGStatesTracker.set_states",
        "activation_recompute_forward.__init__", "checkpoint", "get_all_rng_states",
        "is_fp8_activation_recompute_enabled", "set_tensor_model_parallel_attributes",
    ),
    "pytorch/module/base.py": ("get_dummy_wgrad",),
    "pytorch/module/fp8_padding.py": ("Fp8Padding.__init__", "Fp8Padding.forward"),
    "pytorch/module/fp8_unpadding.py": ("Fp8Unpadding.__init__", "Fp8Unpadding.forward"),
    "pytorch/module/grouped_linear.py": ("GroupedLinear.__init__", "GroupedLinear.forward"),
    "pytorch/module/layernorm_linear.py": ("LayerNormLinear.__init__", "LayerNormLinear.forward"),
    "pytorch/module/linear.py": ("Linear.__init__", "Linear.forward"),
    "pytorch/module/rmsnorm.py": ("RMSNorm.__init__",),
    "pytorch/optimizers/fused_adam.py": (
        "FusedAdam.__init__", "FusedAdam.get_unscaled_state", "FusedAdam.initialize_state",
        "FusedAdam.set_scaled_state", "FusedAdam.step",
    ),
    "pytorch/optimizers/multi_tensor_apply.py": ("MultiTensorApply.__call__", "MultiTensorApply.__init__"),
    "pytorch/permutation.py": (
        "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs", "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs", "moe_unpermute",
    ),
    "pytorch/quantization.py": ("autocast.__init__", "fp8_autocast", "quantized_model_init"),
    "pytorch/router.py": (
        "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function",
    ),
}  # fmt: skip
ELSEWHERE = {
    "pytorch/attention/dot_product_attention/dot_product_attention.py": "pytorch/attention/dot_product_attention.py",
    "pytorch/cpp_extensions/gemm.py": "pytorch/cpp_extensions/__init__.py",
    "pytorch/module/fp8_unpadding.py": "pytorch/module/fp8_padding.py",
}
"""Where the stand-in has them."""


def signature(arguments: ast.arguments) -> list[list[Any]]:
    """Name, kind and default of each argument; a default that is no literal is given as ``...``."""
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    found = [
        [argument.arg, "positional", _default(default)]
        for argument, default in zip(positional, [*missing, *arguments.defaults], strict=True)
    ]
    found += [[argument.arg, "rest", None] for argument in (arguments.vararg,) if argument]
    found += [
        [argument.arg, "keyword", _default(default)]
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found + [[argument.arg, "any keyword", None] for argument in (arguments.kwarg,) if argument]


def _default(default: ast.expr | None) -> str | None:
    if default is None:
        return None
    try:
        return repr(ast.literal_eval(default))
    except ValueError:
        return "..."


def signatures(source: Path, wanted: tuple[str, ...]) -> dict[str, list[list[Any]]]:
    """Of the functions ``wanted``, and methods as ``Class.method``, in the file ``source``."""
    found = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node.args
        elif isinstance(node, ast.ClassDef):
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": method.args for method in methods}
    return {name: signature(found[name]) for name in wanted}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "transformer_engine"
    known = {path: signatures(folder / path, names) for path, names in NAMES.items() if names}
    lines = [f"{json.dumps(path)}: {json.dumps(functions)}" for path, functions in sorted(known.items())]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
