"""The Hugging Face tensors of a model that is spread over ranks, and a folder of tensors that are at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor, distributed

from megatron_bridge.hf_folder import DEFAULT_SHARD_BYTES, copy_other_files, main_dtype
from megatron_bridge.plan import TensorSpec, plan_model
from megatron_bridge.reshard import Resharder
from megatron_bridge.safetensors_io import SafetensorsWriter
from mua.utils.atomic import publish_folder, staged_folder
from mua.utils.checksums import NAME as CHECKSUMS
from mua.utils.checksums import Sidecar, seal


def export_hf(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and values of every tensor, in whole, on every rank of the plan's group; collective over it."""
    plan = plan_model(chunks)
    resharder = Resharder(
        plan, dict.fromkeys(distributed.get_process_group_ranks(plan.group), (0,)), 1 << 26, by_turns=False
    )
    for index, layout in enumerate(resharder.buckets):
        flat = resharder.assemble(index)[0]
        for tensor in layout.tensors:
            yield tensor.spec.name, tensor.view(flat)


def write_hf_folder(
    tensors: Iterable[tuple[str, Tensor]],
    specs: Sequence[TensorSpec],
    out: Path,
    *,
    source: Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write ``tensors``, announced by ``specs``, and the other files of ``source`` as the folder ``out``.

    An existing model folder ``out`` is replaced; any other non-empty folder is refused. ``dtype`` or
    ``torch_dtype`` in config.json is set to what was written where it differs; every other byte is kept. On any
    error nothing is left behind and the old ``out`` is untouched.
    """
    with staged_folder(out) as folder:
        copy_other_files(source, folder, main_dtype(specs))
        with (
            closing(Sidecar(folder / CHECKSUMS, job="export")) as sidecar,
            closing(SafetensorsWriter(folder, specs, max_shard_bytes, sidecar=sidecar)) as writer,
        ):
            for name, tensor in tensors:
                write_whole(writer, name, tensor)
            writer.finish()
        seal(folder, writer.header_sizes())
        publish_folder(folder, out)


def write_whole(writer: SafetensorsWriter, name: str, tensor: Tensor) -> None:
    sink = writer.sink(name)
    sink.write(tensor)
    writer.complete(sink)
