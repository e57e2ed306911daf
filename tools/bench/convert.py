"""CPU seconds and memory of Hugging Face import and export, beside the least work there is and beside mbridge.

A random Qwen3 of 0.75 billion parameters (1.5 GB in bfloat16, five files) is loaded into, and saved from, modules with
Megatron's parameter names, on one rank and one thread. The limit does the same packing with raw loops over offsets that
are computed beforehand: ``preadv`` of each block straight into its rows, ``pwrite`` of each block to its place. mbridge
(PyPI) is installed without its dependencies into a temporary folder and runs in the same process on the same modules.

Methods take turns, in every repeat anew; what a method wrote last is deleted right before it writes again. CPU seconds
are of this process (user and system). Peak memory is the high-water mark of the resident set above its level before the
call. Checksums and a flush to the disk (fsync), which neither the limit nor mbridge has, are rows of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tools import kit

MBRIDGE = "mbridge==0.15.1"
LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCABULARY = 28, 1024, 16, 8, 128, 3072, 151936
SHARD_BYTES = 320 << 20


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--folder", type=Path, help="where files go; by default the system's temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="mua-convert-", dir=arguments.folder) as scratch:
        bench = Bench(Path(scratch), arguments.layers)
        bench.run(arguments.repeats)
        bench.print_tables()


class Bench:
    """The model, its folder, the methods and what they took."""

    def __init__(self, scratch: Path, layers: int) -> None:
        from mua.config.schema import MegatronConfig
        from mua.megatron import parallel  # before anything of Megatron, which mbridge imports

        parallel.initialize(MegatronConfig(threads=1), seed=1)
        self.scratch, self.source = scratch, scratch / "source"
        self.config = hf_config(layers)
        self.model = parameters(self.config)
        self.bytes = write_source(self.source, self.config)
        self.results: dict[str, dict[str, list[Measured]]] = {"load": {}, "save": {}}
        self.mbridge = self._install_mbridge()

    def run(self, repeats: int) -> None:
        """Every method in turn, ``repeats`` times; then each result is compared with the source."""
        with contextlib.closing(RawLoad(self.source, self.model)) as raw_load:
            loads: dict[str, Callable[[], object]] = {"limit": raw_load.run, "megatron_bridge": self._load}
            if self.mbridge is not None:
                loads["mbridge"] = lambda: self.mbridge.load_weights([self.model], str(self.source))
            for _ in range(repeats + 1):
                for name, method in loads.items():
                    with torch.no_grad():
                        self.results["load"].setdefault(name, []).append(measure(method))
        raw_save = RawSave(self.source, self.model)
        saves: dict[str, Callable[[Path], object]] = {
            "limit": raw_save.run, "megatron_bridge, checksums, fsync": self._save
        }  # fmt: skip
        if self.mbridge is not None:
            saves["mbridge"] = lambda out: self.mbridge.save_weights([self.model], str(out))
        for _ in range(repeats + 1):
            for name, save in saves.items():
                out = self.scratch / "out"
                shutil.rmtree(out, ignore_errors=True)
                self.results["save"].setdefault(name, []).append(measure(partial(save, out)))
        self._check(self.scratch / "out")

    def _load(self) -> None:
        from megatron_bridge.convert import load_hf

        load_hf([self.model], self.source)

    def _save(self, out: Path) -> None:
        from megatron_bridge.save import save_hf

        save_hf([self.model], out, source=self.source, max_shard_bytes=SHARD_BYTES)

    def _check(self, out: Path) -> None:
        """What was loaded by every method in turn, and saved by ours, is the source bit for bit."""
        shutil.rmtree(out, ignore_errors=True)
        self._load()
        self._save(out)
        ours, source = ({k: v for p in f.glob("*.safetensors") for k, v in load_file(p).items()}
                        for f in (out, self.source))  # fmt: skip
        if ours.keys() != source.keys() or not all(torch.equal(ours[name], source[name]) for name in source):
            raise SystemExit("the tensors differ after a round trip")

    def _install_mbridge(self) -> Any:
        target = self.scratch / "mbridge"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), MBRIDGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{MBRIDGE} does not install here: {done.stderr.strip().splitlines()[-1]}")
            return None
        sys.path.insert(0, str(target))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                from mbridge import AutoBridge  # type: ignore[import-not-found]

                bridge = AutoBridge.from_pretrained(str(self.source))
                bridge.safetensor_io = bridge._get_safetensor_io(str(self.source))
        except Exception as error:
            print(f"{MBRIDGE} does not run here: {type(error).__name__}: {error}")
            return None
        return bridge

    def print_tables(self) -> None:
        """Both tables as Markdown, with date, hardware and versions."""
        print(f"\n{time.strftime('%Y-%m-%d')}, {kit.machine()}, one thread, torch {torch.__version__}")
        print(f"{self.bytes:,} bytes, {len(list(self.model.parameters()))} parameters")
        for kind, methods in self.results.items():
            limit = [each.cpu for each in methods["limit"][1:]]
            columns = (kind, "CPU s, least", "median", "of the limit (least, median)", "wall s, least", "peak MiB")
            print(f"\n{kit.head(*columns)}")
            for name, measured in methods.items():
                cpu = [each.cpu for each in measured[1:]]  # the first call imports, and faults pages in
                ratios = f"{min(cpu) / min(limit):.2f}, {median(cpu) / median(limit):.2f}"
                wall = min(each.wall for each in measured[1:])
                peak = max(each.peak for each in measured[1:]) / 2**20
                print(kit.row(name, f"{min(cpu):.3f}", f"{median(cpu):.3f}", ratios, f"{wall:.2f}", f"{peak:.0f}"))


@dataclass(frozen=True)
class Measured:
    cpu: float
    """Seconds, as ``wall``."""
    wall: float
    peak: int
    """Bytes above the level before."""


def measure(method: Callable[[], object]) -> Measured:
    """Time and memory of one call."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls left to the allocator would hide what this one takes
    kit.forget_peak()
    before = kit.resident()
    wall, cpu = time.perf_counter(), time.process_time()
    method()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Measured(cpu=cpu, wall=wall, peak=max(0, kit.resident("VmHWM") - before))


def hf_config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": HIDDEN,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD,
        "intermediate_size": FFN, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "vocab_size": VOCABULARY,
        "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def parameters(config: dict[str, Any]) -> nn.Module:
    """Modules with the names and shapes of a GPTModel of Transformer Engine's specification, and what bridges ask."""
    from megatron_bridge.plan import transformer_config_kwargs

    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
            "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN),
            "self_attention.q_layernorm.weight": (HEAD,),
            "self_attention.k_layernorm.weight": (HEAD,),
            "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD),
            "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
            "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
            "mlp.linear_fc2.weight": (HIDDEN, FFN),
        }.items():
            shapes[f"decoder.layers.{layer}.{name}"] = shape
    shapes |= {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (VOCABULARY, HIDDEN)}
    model = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        root = model
        for part in path:
            if part not in root._modules:
                root.add_module(part, nn.Module())
            root = root.get_submodule(part)
        weight = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        root.register_parameter(last, weight)
    decoder: Any = model.decoder
    decoder.layers = nn.ModuleList(decoder.layers.children())
    for number, layer_module in enumerate(decoder.layers):
        layer_module.layer_number = number + 1
    group = torch.distributed.group.WORLD
    extra: Any = model
    extra.config = SimpleNamespace(**transformer_config_kwargs(config))
    extra.share_embeddings_and_output_weights = False
    extra.pg_collection = SimpleNamespace(tp=group, mp=group)
    return model


def write_source(folder: Path, config: dict[str, Any]) -> int:
    """A random model folder; bytes of its weights."""
    shape = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "torch_dtype")}
    kit.random_qwen3(folder, 1, dtype="bfloat16", max_shard_size=SHARD_BYTES, **shape)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def blocks_of(model: nn.Module) -> Iterator[tuple[str, int, memoryview]]:
    """By hand, for this one family: the tensor, the row it begins with, and the memory of every block of rows."""

    def memory(block: torch.Tensor) -> memoryview:
        return block.reshape(-1).view(torch.uint8).numpy().data

    for name, parameter in model.named_parameters():
        rows = parameter.detach().view(parameter.shape[0], -1)
        parts = name.split(".")
        prefix = f"model.layers.{parts[2]}." if parts[1] == "layers" else ""
        if name.endswith("linear_qkv.weight"):
            query = HEADS // GROUPS * HEAD
            for group in range(GROUPS):
                first = group * (query + 2 * HEAD)
                for which, start, count in (("q", 0, query), ("k", query, HEAD), ("v", query + HEAD, HEAD)):
                    block = rows[first + start : first + start + count]
                    yield f"{prefix}self_attn.{which}_proj.weight", group * count, memory(block)
        elif name.endswith("linear_fc1.weight"):
            for which, start in (("gate", 0), ("up", FFN)):
                yield f"{prefix}mlp.{which}_proj.weight", 0, memory(rows[start : start + FFN])
        else:
            yield prefix + PLAIN[".".join(parts[3:]) if prefix else name], 0, memory(rows)


PLAIN = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def places(folder: Path) -> dict[str, tuple[str, int, int]]:
    """By tensor: its file, the offset of its data and the bytes of one row."""
    from megatron_bridge.safetensors_io import SafetensorsFolder

    with SafetensorsFolder(folder) as weights:
        entries = {name: weights.entry(name) for name in weights.names}
    return {name: (entry.path.name, entry.offset, entry.row_bytes) for name, entry in entries.items()}


class RawLoad:
    """The least that loading with packing can be: one ``preadv`` a block."""

    def __init__(self, source: Path, model: nn.Module) -> None:
        where = places(source)
        self._files = {name: os.open(source / name, os.O_RDONLY) for name in {place[0] for place in where.values()}}
        self._reads = []
        for name, row, block in blocks_of(model):
            file, offset, row_bytes = where[name]
            self._reads.append((self._files[file], offset + row * row_bytes, block))

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def run(self) -> None:
        for descriptor, offset, block in self._reads:
            if os.preadv(descriptor, [block], offset) != len(block):
                raise SystemExit("a file ends too early")


class RawSave:
    """The least that saving with unpacking can be: one ``pwrite`` a block, and the headers."""

    def __init__(self, source: Path, model: nn.Module) -> None:
        where = places(source)
        self._headers = {name: header_of(source / name) for name in {place[0] for place in where.values()}}
        self._writes = [
            (where[name][0], where[name][1] + row * where[name][2], block) for name, row, block in blocks_of(model)
        ]

    def run(self, out: Path) -> None:
        out.mkdir()
        files = {name: os.open(out / name, os.O_WRONLY | os.O_CREAT, 0o644) for name in self._headers}
        for name, header in self._headers.items():
            os.pwrite(files[name], header, 0)
        for name, offset, block in self._writes:
            if os.pwrite(files[name], block, offset) != len(block):
                raise SystemExit("the disk is full")
        for descriptor in files.values():
            os.close(descriptor)


def header_of(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.read(8)
        return size + file.read(int.from_bytes(size, "little"))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
