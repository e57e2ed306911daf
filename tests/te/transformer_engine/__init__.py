"""Transformer Engine 2.20 on the CPU, for tests: its names and its arithmetic in plain torch, no kernel of its own.

A process that has ``tests/te`` in front of its import path (``tests/te_ranks.py`` starts such ones) finds this package
where Megatron-Core looks for Transformer Engine, so that Megatron's own wrappers, specification and optimizer run as on
a GPU: ``HAVE_TE`` is true in all of it. Nothing of mua or Megatron is replaced.

Kept as Transformer Engine has it: modules, functions, their arguments in order, with their defaults (a keyword that
does not exist there is an error here; ``tests/te/signatures.json`` holds those of release 2.20.2), names, shapes and
attributes of parameters, the collectives of both passes, the dtypes that are computed in, and the refusals of wrong
input listed below.

Arithmetic: everything that changes a result beyond rounding. Norms in float32 with the weight applied before the cast;
gather and reduce-scatter of sequence parallelism; packed attention by cumulative lengths, also under context
parallelism in Transformer Engine's order of chunks; rotary by given angles or by cumulative lengths; permutation,
sorting and routing of tokens; accumulation of weight gradients in ``main_grad``; Adam with its groups' step count,
decoupled gradients, main weights and 16-bit remainders; block-scaled fp8 as rounding of both operands.

Ignored, because they only change speed: which attention kernel runs, ``cp_stream`` and ``cp_comm_type`` (checked, then
one way for all), ``is_first_microbatch``, ``ub_name``, ``symmetric_ar_type``, ``fast_zero_fill``, ``num_splits``,
multi-tensor chunk sizes, ``sm_margin``.

Refused as there: lengths that are not int32 or have no padding mask, sequences that context parallelism cannot divide,
missing padded lengths under it, fp8 operands whose sizes the kernels cannot take, parameters and activations of unlike
dtype, overlapped communication without user buffers, tensor-parallel attributes that are set twice. Taken although it
is refused there: attention in float32, which no packed kernel has, because parity is measured in it.

Not here: fp8 recipes other than block scaling, LayerNorm, dropout, CUDA graphs, user buffers, operation fuser.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
