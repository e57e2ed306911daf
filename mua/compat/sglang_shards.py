"""SGLang's end of a bucket of slices: copies them into the parameters of this rank, inside an engine's process.

Reason: ``/update_weights_from_tensor`` gives an engine whole Hugging Face tensors (``load_weights``) or whole
parameters ("direct"); slices of parameters need a loader of one's own, which SGLang imports by name
(``--custom-weight-loader``) and calls between ``/begin_weight_update`` and ``/end_weight_update``. It writes where
SGLang's own loaders write, so what begin restores and end packs again is as it is for whole tensors. Where parameters
are laid out otherwise (packed for AMX, quantized, transposed) it refuses before it writes anything. An exception would
end the engine, so a refusal is written behind the bucket, where the sender reads it.

Upstream: sglang 0.5.23. Goes when: SGLang takes slices of parameters itself.
``tests/parity/test_engine_transports.py`` compares every parameter with what SGLang loads from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # whoever starts an engine needs the name of the loader alone

LOADER = f"{__name__}.load"
"""What ``--custom-weight-loader`` and ``load_format`` say."""
RECEIPT_BYTES = 1024
"""Behind the bucket: the first byte says what became of it, then comes what is wrong in UTF-8, ended by 0."""
_LOADED, _REFUSED = 1, 2
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Copy one bucket. Its name is its table (see :func:`table`), its tensor the buffer with room for the receipt."""
    import torch

    for text, flat in named_tensors:
        said = json.loads(text)
        receipt = flat[said["receipt"] : said["receipt"] + RECEIPT_BYTES]
        try:
            with torch.no_grad():
                _load(model, said, flat)
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)  # the sender fills the buffer again after the answer
            receipt[0] = _LOADED
        except Exception as error:
            words = str(error).encode()[: RECEIPT_BYTES - 2]
            receipt[: len(words) + 2] = torch.frombuffer(bytearray([_REFUSED, *words, 0]), dtype=torch.uint8)


def refusal(receipt: torch.Tensor) -> str:
    """What a receipt complains of; empty if it does not."""
    if int(receipt[0]) != _REFUSED:
        return ""
    return bytes(receipt[1:].tolist()).split(b"\0")[0].decode(errors="replace")


def _load(model: torch.nn.Module, said: dict[str, Any], flat: torch.Tensor) -> None:
    import torch

    owners = {
        f"{prefix}.{name}": (module, parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    copies = []
    for name, row, rows, cols, dtype, start in said["slots"]:
        if name not in owners:
            raise ValueError(f"this engine has no parameter {name}")
        matrix = _matrix(name, *owners[name], said["matrices"][name])
        if matrix.device != flat.device:
            raise ValueError(f"{name} is on {matrix.device}, the bucket on {flat.device}")
        kind = getattr(torch, dtype)
        slices = flat[start : start + rows * cols * kind.itemsize].view(kind).view(rows, cols)
        copies.append((matrix[row : row + rows], slices))
    for matrix, slices in copies:
        matrix.copy_(slices)


def _matrix(name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, planned: list[int]) -> torch.Tensor:
    """The parameter as ``[rows, cols]``. Raises ValueError where slices would end up in the wrong place."""
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in _PLAIN:
        raise ValueError(f"{name} belongs to {type(method).__name__}, which packs its weights")
    if getattr(module, "use_intel_amx_backend", False):
        raise ValueError(f"{name} is packed for AMX")
    if getattr(method, "use_triton_kernels", False) or getattr(method, "load_up_proj_weight_first", False):
        raise ValueError(f"{name} is kept in another order by the engine's experts backend")
    held = parameter.data
    shape = [held.shape[0], 1] if held.ndim == 1 else [held.shape[:-1].numel(), held.shape[-1]]
    if shape != planned or not held.is_contiguous():
        raise ValueError(f"{name} is {list(held.shape)} here, and the plan has {planned} rows and columns of it")
    return held.view(shape)


def table(slots: Sequence[tuple[str, int, int, int, str, int]], matrices: dict[str, list[int]], receipt: int) -> str:
    """What lies where in a bucket, for :func:`load`.

    Args:
        slots: name of the parameter, first row of its matrix, rows, columns, dtype, first byte.
        matrices: rows and columns of each of these parameters in whole.
        receipt: first byte of the receipt.
    """
    return json.dumps({"slots": slots, "matrices": matrices, "receipt": receipt}, separators=(",", ":"))
