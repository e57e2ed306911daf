"""Bytes of one weight synchronization on every link of the cluster, from the routes that a run plans, and its time.

Built are the parameters of one rank of every pipeline stage, on the meta device; the others hold the same under other
numbers. From there on it is the code of a run: the engines' slices, the buckets, and for every rectangle the rank it
comes from (:mod:`megatron_bridge.reshard`). Every GPU has two links, one to the GPUs of its machine (NVLink, or PCIe)
and one to other machines (its network adapter), each with its own bandwidth in both directions. Buckets follow each
other, and each takes as long as its fullest link.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_bridge.blocks import Split
from megatron_bridge.family import EXPERT
from megatron_bridge.plan import PlannedParameter, attach_hf_config, in_order, plan_rank
from megatron_bridge.reshard import ALIGNMENT, Holders, Routes, Target, bucket_layouts, whole_tensors
from mua.compat.without_cuda import without_cuda
from mua.config.schema import ClusterConfig, ExperimentConfig
from mua.engine.weight_sync import assign_roots, broadcast_roots, engine_target
from mua.launch.plan.layout import layers_by_stage, trainer_gpus_per_node
from mua.megatron.architecture import Architecture
from mua.megatron.model import build_chunks
from mua.megatron.parallel import meta_rank

PCIE_GIGABYTES_PER_SECOND = 55.0
"""One direction of PCIe 5.0 x16: 63 GB/s by its specification, less what its packets' headers take."""
_LINKS = ("gpu_out", "gpu_in", "network_out", "network_in")


@dataclass(frozen=True, slots=True)
class Sync:
    """One weight synchronization."""

    model_bytes: int
    """The whole model once, in the trainer's type."""
    gpu_bytes: int
    """What one engine rank is handed."""
    buckets: int
    fullest: dict[str, int]
    """In one pass, bytes over the fullest link of each kind: out of or into a GPU from or to others of its machine
    (``gpu_out``, ``gpu_in``), or of other machines (``network_out``, ``network_in``)."""
    mean: dict[str, int]
    """The same on average over the GPUs of the trainer."""
    moved_bytes: int
    """Over all links, each byte once."""
    fullest_seconds: float
    """Of the fullest link alone: no order of the buckets is faster."""
    seconds: float
    """The buckets one after the other, each as long as its fullest link."""
    peers: str
    """What joins the GPUs of a machine: ``NVLink`` or ``PCIe``."""
    peer_gigabytes_per_second: float
    """Of one GPU, in one direction."""


def plan_sync(architecture: Architecture, config: ExperimentConfig) -> Sync:
    """Bytes and time of one synchronization with the engines of ``config``."""
    return without_cuda(planned_links, architecture, config).sum_up(config.cluster)


def planned_links(architecture: Architecture, config: ExperimentConfig) -> Links:
    """The bytes of one synchronization on every link."""
    layout = trainer_layout(architecture, config)
    colocated = config.engine.transport != "broadcast"
    parameters, tp = layout.parameters, config.engine.tensor_parallel
    specs = [spec for p in parameters if not p.tied_copy for spec in p.sources()]
    target, slices = whole_tensors(specs), False
    if colocated:
        target, slices = engine_target(parameters, architecture.hf_config, config.engine)
    buckets = bucket_layouts(
        parameters, target, config.engine.bucket_bytes, alignment=ALIGNMENT if colocated else 1, by_turns=colocated
    )
    if colocated:
        per_node = trainer_gpus_per_node(config)
        used = [rank for rank in range(layout.world) if rank % per_node < config.engine.count * tp]
        roots = {rank: rank % per_node % tp if slices else 0 for rank in used}
    else:
        roots = dict.fromkeys(broadcast_roots(config.engine, layout.world), 0)
    handed = sum(bucket.payload_bytes for bucket in buckets)
    links = Links(layout, target, Routes(parameters, target, buckets), len(buckets), roots)
    links.model, links.handed = sum(spec.nbytes for spec in specs), handed
    links.fill(() if colocated else [bucket.nbytes for bucket in buckets])
    if not colocated:
        links.broadcast([bucket.payload_bytes for bucket in buckets])
    return links


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """Who holds what, and where, without a process per rank."""

    parameters: list[PlannedParameter]
    world: int
    nodes: list[int]
    """Machine of every rank."""
    groups: list[list[int]]
    """Ranks that plan and send among themselves; see ``ModelPlan.group``."""
    shards: list[dict[str, int]]
    """Of every rank the shard it holds of each of its parameters."""


def trainer_layout(architecture: Architecture, config: ExperimentConfig) -> TrainerLayout:
    """The layout of ``config``, from one rank of every stage.

    Ranks are numbered tensor, context, data, pipeline parallel, the first fastest; for experts it is expert-tensor,
    expert, data, pipeline parallel.
    """
    layout = config.megatron
    world, stage = layout.world_size, layout.world_size // layout.pipeline_parallel
    tp, ep = layout.tensor_parallel, layout.expert_parallel if architecture.experts else 1
    etp = layout.expert_tensor_parallel or tp
    found: list[PlannedParameter] = []
    shards: list[dict[str, int]] = [{} for _ in range(world)]
    for number, own in enumerate(_parameters_of_stages(architecture, config)):
        first = number * stage
        per_rank = max(1, architecture.experts // ep)
        for part in range(ep):
            for parameter in own:
                expert = EXPERT.search(parameter.name) is not None
                if part and not expert:
                    continue
                lowest = first + (part * etp if expert else 0)
                split = parameter.packing.split is not Split.REPLICATED
                owners = tuple(lowest + n for n in range(len(parameter.owners))) if split else (lowest,)
                renamed = _renamed(parameter, partial(_shift_expert, by=part * per_rank)) if part else parameter
                found.append(replace(renamed, owners=owners))
                for rank in range(first, first + stage):
                    if not expert or (rank - first) // etp % ep == part:
                        of = etp if expert else tp
                        shards[rank][found[-1].name] = (rank - first) % of if len(owners) > 1 else 0
    everyone = bool(architecture.experts) and (ep > 1 or etp != tp)
    replicas: dict[int, list[int]] = defaultdict(list)
    for rank in range(world):
        replicas[0 if everyone else rank % stage // tp].append(rank)
    nodes = [rank // trainer_gpus_per_node(config) for rank in range(world)]
    return TrainerLayout(in_order(found), world, nodes, list(replicas.values()), shards)


def _parameters_of_stages(architecture: Architecture, config: ExperimentConfig) -> Iterator[list[PlannedParameter]]:
    """Of the first rank of every stage, built on the meta device.

    A stage between the ends is the second one under other layer numbers, where it has as many of the same kinds.
    """
    layers, layout = layers_by_stage(architecture, config), config.megatron
    kinds = [[architecture.sparse[layer] for layer in of] for of in layers]
    built: dict[int, list[PlannedParameter]] = {}
    for stage in range(len(layers)):
        alike = 1 if 1 <= stage < len(layers) - 1 and kinds[stage] == kinds[1] else stage
        if alike not in built:
            with meta_rank(layout, alike * layout.world_size // layout.pipeline_parallel):
                chunks = build_chunks(architecture.hf_config, config.model, layout)
                attach_hf_config(chunks, architecture.hf_config)
                built[alike] = plan_rank(chunks).parameters
        number = dict(zip(layers[alike], layers[stage], strict=True)) if alike != stage else {}
        moved = lambda name: re.sub(r"(?<=layers\.)\d+", lambda m: str(number[int(m[0])]), name)  # noqa: B023, E731
        yield [_renamed(parameter, moved) for parameter in built[alike]] if number else built[alike]


def _shift_expert(name: str, by: int) -> str:
    """A name of Megatron's or of the Hugging Face folder with the number of its expert ``by`` further."""
    name = EXPERT.sub(lambda match: match[1] + str(int(match[2]) + by), name)
    return re.sub(r"(?<=\.experts\.)\d+", lambda m: str(int(m[0]) + by), name)


def _renamed(parameter: PlannedParameter, change: Callable[[str], str]) -> PlannedParameter:
    """The same parameter of another layer or expert."""
    packing = replace(parameter.packing, sources=tuple(map(change, parameter.packing.sources)))
    return replace(parameter, name=change(parameter.name), packing=packing)


class Links:
    """Bytes on every link: ``bytes`` is ``[buckets, 4, ranks + 1]``.

    The four are out of and into a GPU, to and from others of its machine, then other machines. The last column is an
    engine rank that has no trainer rank.
    """

    def __init__(
        self, layout: TrainerLayout, target: Target, routes: Routes, buckets: int, roots: Mapping[int, int]
    ) -> None:
        self._layout = layout
        self._routes = routes
        self._roots = roots
        self._variants = len(target.variants)
        self.bytes = np.zeros((buckets, len(_LINKS), layout.world + 1))  # the last: of an engine rank elsewhere
        self._share: list[int] = []
        self.model = self.handed = 0
        """Bytes of the model, and of what one engine rank is handed."""

    def fill(self, share: Sequence[int] = ()) -> None:
        """The routes of every group to its roots; buckets of the sizes ``share`` each to one of them alone."""
        demands = list(self._demands())
        own = {rank: [0] * len(share) for rank in self._roots}
        for group, _, wanted in demands if share else ():
            for (ranks, _), of_bucket in wanted.items():
                for bucket, sizes in of_bucket.items():
                    for rank in group & own.keys() & set(ranks):
                        own[rank][bucket] += int(sizes[0])
        self._share = assign_roots(own, share) if share else []
        nodes = np.array(self._layout.nodes)
        for group, holders, wanted in demands:
            roots = np.array([rank for rank in self._roots if rank in group])
            variants = np.array([self._roots[rank] for rank in roots], dtype=int)
            for (ranks, turn), of_bucket in wanted.items():
                sources = np.array([
                    holders.choose(ranks, int(root), turn + number) for number, root in enumerate(roots)
                ])  # fmt: skip
                for bucket, sizes in of_bucket.items():
                    take = sources != roots
                    if share:
                        take &= roots == self._share[bucket]
                    near = nodes[sources] == nodes[roots]
                    for mask, out in ((take & near, 0), (take & ~near, 2)):
                        np.add.at(self.bytes[bucket, out], sources[mask], sizes[variants[mask]])
                        np.add.at(self.bytes[bucket, out + 1], roots[mask], sizes[variants[mask]])

    def _demands(self) -> Iterator[tuple[set[int], Holders, _Demand]]:
        """Of every group with roots the bytes wanted of each set of holders, by bucket and variant."""
        for ranks in self._layout.groups:
            group = set(ranks)
            if not group & set(self._roots):
                continue
            held = {rank: (self._layout.nodes[rank], self._layout.shards[rank]) for rank in ranks}
            holders = Holders(held)
            wanted: _Demand = defaultdict(lambda: defaultdict(lambda: np.zeros(self._variants)))
            for number, parameter, shard in self._routes.shards():
                owners = holders.of(parameter.name, shard)
                turn = number % holders.period(owners)
                for variant in range(self._variants):
                    for piece in self._routes.pieces(parameter, shard, variant):
                        wanted[owners, turn][piece.bucket][variant] += piece.nbytes
            yield group, holders, wanted

    def broadcast(self, sizes: Sequence[int]) -> None:
        """Every bucket once more out of its root's adapter, and by its own adapter into every engine rank."""
        for bucket, root in enumerate(self._share):
            self.bytes[bucket, 2, root] += sizes[bucket]
            self.bytes[bucket, 3, -1] += sizes[bucket]

    def sum_up(self, cluster: ClusterConfig) -> Sync:
        """What the links of ``cluster`` need for it."""
        nvlink = cluster.nvlink_gigabytes_per_second
        near, far = (nvlink or PCIE_GIGABYTES_PER_SECOND) * 1e9, cluster.network_gigabytes_per_second * 1e9
        speeds = np.array([near, near, far, far])
        whole = self.bytes.sum(axis=0)
        seconds = (self.bytes / speeds[None, :, None]).max(axis=(1, 2)) if self.bytes.size else np.zeros(1)
        return Sync(
            model_bytes=self.model,
            gpu_bytes=self.handed,
            buckets=len(self.bytes),
            fullest={name: int(whole[n].max()) for n, name in enumerate(_LINKS)},
            mean={name: int(whole[n, :-1].mean()) for n, name in enumerate(_LINKS)},
            moved_bytes=int(whole[1].sum() + whole[3].sum()),
            fullest_seconds=float((whole / speeds[:, None]).max()),
            seconds=float(seconds.sum()),
            peers="NVLink" if nvlink else "PCIe",
            peer_gigabytes_per_second=near / 1e9,
        )


_Demand = dict[tuple[tuple[int, ...], int], dict[int, "np.ndarray[tuple[int], np.dtype[np.float64]]"]]
