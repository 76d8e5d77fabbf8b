"""The LION operator: one function of queries, keys, values and decays, in three equal forms.

For log-decays g ≤ 0 (LION, arXiv 2502.16249, sections 3 and 4)

    y_i = Σ_j M_ij (q_i·k_j) v_j   [ / (Σ_j M_ij (q_i·k_j) + eps)  where row-normalised ]

    M_ij = exp(g_j + … + g_{i-1})  for j < i      a token decays as it is left:
         = 1                       for j = i      the key's own gate counts, the query's does not
         = exp(g_{i+1} + … + g_j)  for j > i

- parallel: (q kᵀ ⊙ M) v, O(L²) time; the form that has attention maps.
- chunk: the parallel form inside blocks, states between them; O(L) time and memory.
- rnn: a state from each end, token by token; the least memory at inference.

Masks, segments and directions act on keys, values and gates once, before the forms part. With several scan orders
(images: LION-D♮, LION-S♮) numerators and denominators are averaged over the orders, then divided.
"""

import functools
import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable


ATTENTION_MODES = ("parallel", "chunk", "rnn")
DIRECTIONS = ("both", "forward", "backward")
DIAGONALS = ("balanced", "doubled")

# Longest sequence that "auto" computes in parallel form, by `scripts/benchmark.py forms` and of whole layers, in
# float32 and in bfloat16. Without decays the chunk form is two small products and wins almost at once.
PARALLEL_MAX_LENGTH = 256
PARALLEL_MAX_LENGTH_WITHOUT_DECAY = 32

# Decays whose logarithm lies below this are exactly zero. They are far below a rounding error of the diagonal and of
# the epsilon of the division, yet the product of three of them (query, state and key each carry one) is a normal
# number: a CPU computes with denormal numbers tens of times slower.
_NEGLIGIBLE = {torch.float32: -26.0, torch.float64: -52.0}

# Gates stronger than this cannot be told from it, and would only cost digits in the sums of gates. It also closes the
# way where a segment ends.
_CLOSED = {dtype: 1.5 * exponent for dtype, exponent in _NEGLIGIBLE.items()}

# Most tokens whose decay mask is computed at once, and tokens per block of a larger one.
_SMALL_MASK = 64
_MASK_BLOCK = 32

# Blocks whose states meet in one product; longer sequences carry group states between groups of this many blocks.
_CARRY_GROUP = 32

# A CPU takes this many bytes at a time of what has one number for each token of each head. What it computes on the way
# stays in the cache, and is memory that is used again: pages that are new to the process cost several times what is
# computed in them.
_TILE = 24 * 1024

# Values with ones beside them are this much wider: products are faster in whole vectors than with one column more.
_ONES_WIDTH = 8

# The recurrence stages this many tokens at a time, so that each step reads contiguous memory.
_RECURRENCE_TILE = 64

# Tokens after which the recurrence sets to zero what has faded.
_RECURRENCE_CLEANING = 16


def lion_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    *,
    mode: str = "parallel",
    chunk_size: int = 64,
    key_mask: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    scan: tuple[torch.Tensor, torch.Tensor] | None = None,
    direction: str = "both",
    diagonal: str = "balanced",
    scale: float = 1.0,
    normalize: bool = False,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    return_weights: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Bidirectional linear attention with decays, the equation at the head of this module.

    Everything is computed and accumulated in float32, also under autocast and for half-precision inputs; float64
    inputs stay float64 throughout. The exception is bfloat16, in the parallel and in the chunk form: products sum up
    in float32, while their factors and results, states of blocks and row sums among them, are rounded to bfloat16;
    gates, and states beyond some dozens of blocks, are float32. All three modes have the same values and the same
    gradients. (Only the parallel form can be differentiated twice.)

    Args:
        q: Queries after feature map, `(batch, heads, length, head_dim)`.
        k: Keys after feature map, `(batch, heads, length, head_dim)`.
        v: Values, `(batch, heads, length, value_dim)`.
        log_decay: Logarithms of the decays, all ≤ 0: `None` (LION-LIT), `(heads,)` (LION-D) or
            `(batch, heads, length)` (LION-S). With `scan`, each has one more axis `orders` in front.
        mode: `"parallel"`, `"chunk"` or `"rnn"`.
        chunk_size: Tokens per block of the chunk form (and of the backward pass of the rnn form); any size ≥ 1.
        key_mask: `(batch, length)`, bool, integer or float, non-zero for tokens that take part. A masked token
            contributes nothing and, where decays come from content, is not counted as a step; under a fixed decay
            its position still counts. Its own output is finite.
        segment_ids: `(batch, length)` integers. Neighbours with equal ids form a segment; segments never see each
            other. An id that comes back after another one starts a new segment.
        scan: Permutations of the tokens and their inverses, int64 `(orders, length)` each: order n visits token
            `scan[0][n, t]` at step t. Each order has its own decays; M is the mean over the orders. By default tokens
            are visited as they stand.
        direction: `"both"`, or what the paper's ablation leaves of it: `"forward"` (j ≤ i only) or `"backward"`
            (j ≥ i only), in the sense of each scan order.
        diagonal: `"balanced"` (M_ii = 1) or, as where two directions are simply added, `"doubled"` (M_ii = 2).
        scale: Factor of q·k, before anything else.
        normalize: Whether to divide each row by its sum plus `eps`.
        eps: Added to the row sums, > 0.
        dropout_p: Probability of dropping an attention weight (parallel form only).
        return_weights: Also return the effective attention matrix, before dropout (parallel form only).

    Returns:
        `(batch, heads, length, value_dim)` in the dtype of `v`; with `return_weights` also
        `(batch, heads, length, length)` in the dtype of `q`. Rows in which everything is masked are zero.

    Raises:
        ValueError: for an unknown mode, direction or diagonal, `chunk_size < 1`, `eps <= 0`, shapes that do not match,
            additive masks, positive log-decays (looked at on the CPU and outside of tracing only, where reading them
            is free), weights or dropout asked of another form than the parallel one, or segments together with `scan`.
    """
    _check_shapes(q, k, v, log_decay, key_mask, segment_ids, scan)
    _check_options(mode, direction, diagonal, chunk_size, eps, dropout_p, return_weights)
    _check_values(log_decay, key_mask)

    output_dtype, weights_dtype = v.dtype, q.dtype
    with _full_precision(q.device.type):
        dtype = _product_dtype(q, k, v)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        log_decay = None if log_decay is None else log_decay.to(_sum_dtype(dtype))
        if key_mask is not None:
            k, v, log_decay = _drop_masked(k, v, log_decay, key_mask.bool())
        gates = _directional_gates(log_decay, segment_ids, scan, direction, q)
        eps = eps if normalize else None

        if mode == "parallel":
            output, weights = _parallel_form(q, k, v, gates, scan, scale, diagonal, eps, dropout_p, return_weights)
            if return_weights:
                return output.to(output_dtype), weights.to(weights_dtype)
        elif mode == "chunk" and gates is not None:
            options = _ChunkOptions(chunk_size, scan, scale, diagonal, eps)
            output = _chunk_form(q, k, v, *gates, options)
        elif mode == "chunk":
            output = _undecayed_form(q, k, v, scale, diagonal, eps)
        else:
            output = _rnn_form(q, k, v, gates, scan, scale, diagonal, eps, chunk_size)
        return output.to(output_dtype)


def choose_mode(length: int, has_decay: bool) -> str:
    """The form that "auto" stands for: parallel up to the measured crossover, chunk beyond it."""
    longest = PARALLEL_MAX_LENGTH if has_decay else PARALLEL_MAX_LENGTH_WITHOUT_DECAY
    return "parallel" if length <= longest else "chunk"


# ---------------------------------------------------------------------------------------------------------------------
# What the forms share: checks, masks, gates
# ---------------------------------------------------------------------------------------------------------------------


def _check_shapes(q, k, v, log_decay, key_mask, segment_ids, scan):
    if q.ndim != 4:
        raise ValueError(f"`q` must be (batch, heads, length, head_dim), got shape {tuple(q.shape)}")
    batch, heads, length, _ = q.shape
    if length == 0:
        raise ValueError(f"`q` must hold at least one token, got shape {tuple(q.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"`k` must have the shape of `q`, {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"`v` must be ({batch}, {heads}, {length}, value_dim), got shape {tuple(v.shape)}")
    axis, orders = "", ()
    if scan is not None:
        order, inverse = scan
        if order.ndim != 2 or len(order) == 0 or order.shape[1] != length or inverse.shape != order.shape:
            raise ValueError(
                f"`scan` must be two tensors (orders ≥ 1, length) = (orders, {length}), "
                f"got shapes {tuple(order.shape)} and {tuple(inverse.shape)}"
            )
        if segment_ids is not None:
            raise ValueError("`segment_ids` must be None with `scan`: segments are neighbours in one order only")
        axis, orders = "orders, ", (len(order),)
    # As many axes first: a tracer that compared a batch with the heads would tie it to not being as many.
    by_axes = {len(shape): shape for shape in ((*orders, heads), (*orders, batch, heads, length))}
    if log_decay is not None and log_decay.shape != by_axes.get(log_decay.ndim):
        raise ValueError(
            f"`log_decay` must be None, ({axis}heads) = {(*orders, heads)} or ({axis}batch, heads, length) = "
            f"{(*orders, batch, heads, length)}, got shape {tuple(log_decay.shape)}"
        )
    for name, tensor in (("key_mask", key_mask), ("segment_ids", segment_ids)):
        if tensor is not None and tensor.shape != (batch, length):
            raise ValueError(
                f"`{name}` must be (batch, length) = ({batch}, {length}), got shape {tuple(tensor.shape)}"
            )
    if segment_ids is not None and (segment_ids.is_floating_point() or segment_ids.dtype == torch.bool):
        raise ValueError(f"`segment_ids` must be integers, got {segment_ids.dtype}")


def _check_options(mode, direction, diagonal, chunk_size, eps, dropout_p, return_weights):
    choices = {
        "mode": (mode, ATTENTION_MODES),
        "direction": (direction, DIRECTIONS),
        "diagonal": (diagonal, DIAGONALS),
    }
    for name, (value, accepted) in choices.items():
        if value not in accepted:
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, accepted))}, got {value!r}")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1 and an integer, got {chunk_size!r}")
    if eps <= 0:
        raise ValueError(f"`eps` must be greater than 0, got {eps}")
    if mode != "parallel" and (dropout_p > 0 or return_weights):
        name = "return_weights" if return_weights else "dropout_p"
        raise ValueError(f"`{name}` needs the attention matrix: `mode` must be 'parallel', got {mode!r}")


def _check_values(log_decay, key_mask):
    """Checks that read tensors, where that neither stalls a device nor breaks a graph."""
    if _is_traced():
        return
    if log_decay is not None and log_decay.device.type == "cpu" and (log_decay > 0).any():
        raise ValueError(f"`log_decay` must be ≤ 0 everywhere (decays at most 1), got {log_decay.max().item():.4g}")
    if (
        key_mask is not None
        and key_mask.device.type == "cpu"
        and key_mask.is_floating_point()
        and (key_mask < 0).any()
    ):
        raise ValueError(
            "`key_mask` must be 1 for tokens that take part and 0 for others (bool, integer or float), got negative "
            f"values (least {key_mask.min().item():.4g}): an additive mask is not accepted"
        )


def is_transformed() -> bool:
    """Whether one of the transforms of `torch.func` is at work; asked as autograd's functions ask."""
    return torch._C._are_functorch_transforms_active()


def _is_traced():
    """By a compiler, an exporter or one of the transforms of `torch.func`."""
    return is_transformed() or torch.compiler.is_compiling() or torch.jit.is_tracing()


def _full_precision(device_type: str):
    """Autocast off: under it, products of float32 tensors would be rounded to half precision."""
    enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()


def _product_dtype(q, k, v):
    """The dtype in which q, k and v are multiplied: sums of float16 products can leave its range."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return torch.float32 if dtype == torch.float16 else dtype


def _sum_dtype(dtype):
    """The dtype of gates, of states and of divisors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _drop_masked(k, v, log_decay, keep):
    """Zero keys and values, and neutral gates where gates come from content, at masked tokens."""
    masked = ~keep[:, None]  # (batch, 1, length)
    k, v = k.masked_fill(masked[..., None], 0.0), v.masked_fill(masked[..., None], 0.0)
    if log_decay is not None and log_decay.ndim >= 3:
        log_decay = log_decay.masked_fill(masked, 0.0)
    return k, v, log_decay


def _directional_gates(log_decay, segment_ids, scan, direction, q):
    """Gates of the walks to the right and to the left, `(orders, batch or 1, heads or 1, length or 1)` each.

    The two differ where a walk is closed: at the ends of segments, each in its own direction, and everywhere against
    the only direction. With `scan` they are in the order of each scan, else there is one order. One gate stands for
    all tokens where they have the same. `None` where nothing decays and nothing is closed: then the order is of no
    account either.
    """
    if log_decay is None and segment_ids is None and direction == "both":
        return None
    dtype = _sum_dtype(q.dtype)
    closed = _CLOSED[dtype]
    if log_decay is None:
        log_decay = q.new_zeros(1, dtype=dtype) if scan is None else q.new_zeros(len(scan[0]), 1, dtype=dtype)
    gates = _gates_in_order(log_decay, scan).clamp(min=closed)
    rightward = leftward = gates
    if segment_ids is not None:
        ends = segment_ids[:, 1:] != segment_ids[:, :-1]  # (batch, length - 1)
        gates = gates.expand(-1, -1, -1, segment_ids.shape[1])
        rightward = gates.masked_fill(nn.functional.pad(ends, (0, 1))[:, None], closed)  # last of a segment
        leftward = gates.masked_fill(nn.functional.pad(ends, (1, 0))[:, None], closed)  # first of a segment
    if direction == "backward":
        rightward = torch.full_like(leftward, closed)
    elif direction == "forward":
        leftward = torch.full_like(rightward, closed)
    return rightward, leftward


def _gates_in_order(log_decay, scan):
    if scan is None:
        return log_decay[None, None, :, None] if log_decay.ndim == 1 else log_decay[None]
    if log_decay.ndim == 2:
        return log_decay[:, None, :, None]
    return torch.stack([gates.index_select(-1, order) for gates, order in zip(log_decay, scan[0], strict=True)])


def _tiles(q):
    """Slices of the batch and of the heads that make tiles of about `_TILE` bytes."""
    batch, heads, length, _ = q.shape
    if q.device.type != "cpu":
        return [(slice(None), slice(None))]
    most = _TILE // q.element_size()  # tokens times heads
    some_heads = min(heads, max(1, most // length))
    rows = max(1, most // (length * heads))
    return [
        (slice(i, i + rows), slice(j, j + some_heads))
        for i in range(0, batch, rows)
        for j in range(0, heads, some_heads)
    ]


def _cut(gates, rows, heads):
    """A tile of gates, whose axes of batch and heads may have one entry for all."""
    return gates[:, rows if gates.shape[1] > 1 else slice(None), heads if gates.shape[2] > 1 else slice(None)]


def _empty_output(q, v):
    """`(batch, heads, length, value_dim)`, in memory with a token's heads side by side, as they are used.

    No view: what a function of autograd gives could not be changed in place if it was one.
    """
    (batch, heads, length, _), width = q.shape, v.shape[3]
    return v.new_empty_strided((batch, heads, length, width), (length * heads * width, width, heads * width, 1))


def _exp(log_decay, dtype):
    """Decays from their logarithms; what has decayed below use is exactly zero, not a denormal number.

    The argument is bounded first: exponentials of infinities and of what underflows are slow as well.
    """
    return _exp_(log_decay.to(dtype, copy=True))


def _exp_(log_decay):
    return _drop_negligible(log_decay.clamp_(min=_NEGLIGIBLE[log_decay.dtype] - 1).exp_())


def _drop_negligible(decays):
    bound = _NEGLIGIBLE[_sum_dtype(decays.dtype)]
    return nn.functional.threshold(decays, math.exp(bound), 0.0, inplace=not torch.is_grad_enabled())


def _cumulative(gates):
    """Inclusive and exclusive sums `(…, length)` in float64: differences of long float32 sums have no digits left."""
    inclusive = gates.cumsum(-1, dtype=gates.dtype if gates.device.type == "mps" else torch.float64)
    return inclusive, nn.functional.pad(inclusive[..., :-1], (1, 0))


def _split_blocks(x, blocks, size, dim):
    """Dimension `dim` (negative) into `(blocks, size)`; the tail is filled with zeros, which add nothing."""
    missing = blocks * size - x.shape[dim]
    if _is_traced() or missing > 0:  # a tracer that asked would serve whole blocks only; padding by nothing is a copy
        x = nn.functional.pad(x, (0, 0) * (-dim - 1) + (0, missing))
    return x.unflatten(dim, (blocks, size))


class _Walk(NamedTuple):
    """Decays on a walk through blocks of C tokens to one side; `(…)` are the axes of batch and heads.

    Attributes:
        leave: `(…, blocks, C)`, from a token (own gate included) to the edge at which the walk leaves its block.
        enter: `(…, blocks, C)`, from the edge at which it enters to a token (own gate not included).
        across: logarithms of the decays across each block, `(…, blocks)`.
        leftwards: whether the walk goes to the left.
    """

    leave: torch.Tensor
    enter: torch.Tensor
    across: torch.Tensor
    leftwards: bool


def _walks(rightward, leftward):
    """The walks to the right and to the left through blocks with gates `(…, blocks, C)`."""
    dtype = rightward.dtype
    to_right, before = _cumulative(rightward)
    to_left, _ = _cumulative(leftward)
    across = (sums[..., -1].to(dtype).clamp(min=_CLOSED[dtype]) for sums in (to_right, to_left))
    edges = (to_right[..., -1:] - before, before), (to_left, to_left[..., -1:] - to_left)
    edges = ((_exp(leave, dtype), _exp(enter, dtype)) for leave, enter in edges)
    return [_Walk(*decays, *rest) for decays, *rest in zip(edges, across, (False, True), strict=True)]


class _MaskFactors(NamedTuple):
    """What the mask of a long sequence is made of: away from its diagonal M is an outer product of decays from and to
    the edges of blocks of C tokens. That needs no exponential per pair, and no sum of gates longer than a block.

    Attributes:
        enter: `(…, blocks, C, blocks)`, from where the other block ends to a token.
        leave: `(…, blocks, blocks, C)`, from a token of the other block (own gate included) to where it ends.
        within: `(…, blocks, C, C)`, M of each block.
    """

    enter: torch.Tensor
    leave: torch.Tensor
    within: torch.Tensor


def _mask_factors(rightward, leftward, dtype):
    """`_MaskFactors` of gates `(…, length)`, in the dtype of the mask."""
    blocks = -(-rightward.shape[-1] // _MASK_BLOCK)
    rightward, leftward = (_split_blocks(g, blocks, _MASK_BLOCK, -1) for g in (rightward, leftward))
    right, left = _walks(rightward, leftward)
    from_left, from_right = _decays_between(right.across)[0], _decays_between(left.across)[0].mT  # (…, blocks, blocks)
    # Of two blocks one is the earlier: one of the two ways is zero.
    enter = right.enter[..., None] * from_left[..., None, :] + left.enter[..., None] * from_right[..., None, :]
    is_earlier = torch.ones(from_left.shape[-2:], dtype=torch.bool, device=enter.device).tril_()[..., None]
    leave = torch.where(is_earlier, right.leave[..., None, :, :], left.leave[..., None, :, :])
    return _MaskFactors(*(x.to(dtype) for x in (enter, leave, _decay_mask_of_block(rightward, leftward))))


def _join_mask(enter, leave, within, length):
    """M, `(…, length, length)`, of `_MaskFactors`: products of up to three decays, some below the negligible."""
    mask = enter[..., None] * leave[..., :, None, :, :]  # (…, blocks, C, blocks, C)
    mask.diagonal(dim1=-4, dim2=-2).copy_(within.movedim(-3, -1))
    return mask.flatten(-2).flatten(-3, -2)[..., :length, :length]


def _decay_mask(rightward, leftward, dtype):
    """M of the module's equation, `(…, length, length)`, from gates `(…, length)`."""
    length = rightward.shape[-1]
    if length <= _SMALL_MASK:
        return _decay_mask_of_block(rightward, leftward).to(dtype)
    return _drop_negligible(_join_mask(*_mask_factors(rightward, leftward, dtype), length))


class _DecayMask(torch.autograd.Function):
    """`_decay_mask`, with a derivative that sums up pairs of tokens instead of going back through blocks."""

    @staticmethod
    def forward(ctx, rightward, leftward, dtype):
        mask = _decay_mask(rightward, leftward, dtype)
        ctx.save_for_backward(mask)
        return mask

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        to_right, to_left = _across_tokens(grad * mask)
        dtype = _sum_dtype(mask.dtype)
        return _cumulative(to_right)[0].to(dtype), _cumulative(-to_left)[1].to(dtype), None


def _across_tokens(grad):
    """Of gradients `(…, C, C)` by logarithms of decays between tokens: sums whose sums are gradients by gates.

    A gate is in the decay of each pair of tokens on both sides of it. The gradients are not to be used again: what is
    summed up is cut out of them.

    Returns:
        `(…, C)`, to be summed up to and with a gate to the right, and, negative, before a gate to the left.
    """
    grad = grad.to(_sum_dtype(grad.dtype))
    both = grad.sum(-2) - grad.sum(-1)
    earlier = grad.tril_(-1)
    to_right = earlier.sum(-2) - earlier.sum(-1)
    return to_right, both - to_right


def _decay_mask_of_block(rightward, leftward):
    dtype = rightward.dtype
    to_right, to_left = _cumulative(rightward)[1].to(dtype), _cumulative(leftward)[0].to(dtype)
    from_earlier = to_right[..., :, None] - to_right[..., None, :]  # g_j + … + g_{i-1}, of use for j ≤ i
    from_later = to_left[..., None, :] - to_left[..., :, None]  # g_{i+1} + … + g_j, of use for j ≥ i
    if torch.is_grad_enabled() or _is_traced():  # of two that are equal, the least hands on half a gradient to each
        from_earlier = from_earlier.tril_().add_(from_later.triu_(1))
    else:  # where the one is of use, the other is not negative
        torch.minimum(from_earlier, from_later, out=from_earlier)
    return _exp_(from_earlier)


def _decays_between(across):
    """Decays between blocks on a walk to the right, from the logarithms of the decays across each, `(…, blocks)`.

    On a walk to the left they are the same, transposed: what leaves there is what enters here.

    Returns:
        `between` `(…, blocks, blocks)`, from where block j ends to where block i > j begins, zero elsewhere; `enter`
        and `leave` `(…, blocks)`, from the left edge of all blocks to each, and from each to the right edge of all.
    """
    dtype = across.dtype
    until, before = _cumulative(across)
    between = _exp((before[..., :, None] - until[..., None, :]).tril_(-1), dtype).tril(-1)
    return between, _exp(before, dtype), _exp(until[..., -1:] - until, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Parallel form
# ---------------------------------------------------------------------------------------------------------------------


def _parallel_form(q, k, v, gates, scan, scale, diagonal, eps, dropout_p, return_weights):
    options = (scale, diagonal, eps, dropout_p, return_weights)
    if gates is None:
        return _weigh(q, k, v, None, *options)
    length = q.shape[2]
    of_orders = list(zip(*(g.expand(-1, -1, -1, length) for g in gates), strict=True))
    # Whoever needs the matrix, to look at it or for gradients, needs all of it at once; tiles are for a CPU's cache.
    if return_weights or torch.is_grad_enabled() or q.device.type != "cpu" or _is_traced():
        build = _decay_mask if _is_traced() else _DecayMask.apply
        masks = [build(right, left, q.dtype) for right, left in of_orders]
        return _weigh(q, k, v, _mean_in_token_order(masks, scan), *options)
    return _weigh_by_tiles(q, k, v, of_orders, scan, *options), None


def _weigh_by_tiles(q, k, v, of_orders, scan, *options):
    output, mask = _empty_output(q, v), None
    factors = [_mask_factors(right, left, q.dtype) for right, left in of_orders]
    varies = len(factors[0].within) > 1  # within the batch
    for rows in _rows(q):
        if mask is None or varies:
            masks = [_join_mask(*(x[rows] if varies else x for x in of_order), q.shape[2]) for of_order in factors]
            mask = _mean_in_token_order(masks, scan)
        output[rows], _ = _weigh(*(x[rows].contiguous() for x in (q, k, v)), mask, *options)
    return output


def _rows(q):
    """Slices of the batch whose matrices of all pairs of tokens make tiles like those of `_tiles`."""
    batch, heads, length, width = q.shape
    rows = max(1, _TILE // q.element_size() * width // (heads * length * length))
    return [slice(i, i + rows) for i in range(0, batch, rows)]


def _weigh(q, k, v, mask, scale, diagonal, eps, dropout_p, return_weights):
    """Output, and with `return_weights` the matrix, of all queries at once."""
    weights = (q if scale == 1.0 else q * scale) @ k.mT  # (batch, heads, length, length)
    if mask is not None:
        weights = weights * mask
    if diagonal == "doubled":
        weights = weights + weights.diagonal(dim1=-2, dim2=-1).diag_embed()
    if eps is None:
        return nn.functional.dropout(weights, dropout_p) @ v, weights
    if dropout_p == 0 and not return_weights:  # the row sums ride along in the product
        sums = weights @ _with_ones(v)
        return sums[..., : v.shape[3]] / _row_sums(sums, v.shape[3], eps), None
    # The matrix that is returned is the one that is applied: gradients of the output reach it.
    weights = (weights / (weights.sum(-1, keepdim=True, dtype=_sum_dtype(weights.dtype)) + eps)).to(v.dtype)
    return nn.functional.dropout(weights, dropout_p) @ v, weights


def _mean_in_token_order(masks, scan):
    """M, `(batch or 1, heads or 1, length, length)`: the mean over the scan orders, each taken back to token order."""
    if scan is None:
        return masks[0]
    masks = [
        mask.index_select(-2, inverse).index_select(-1, inverse) for mask, inverse in zip(masks, scan[1], strict=True)
    ]
    return sum(masks) / len(masks)


# ---------------------------------------------------------------------------------------------------------------------
# Chunk form
# ---------------------------------------------------------------------------------------------------------------------


class _ChunkOptions(NamedTuple):
    """Arguments of `lion_attention`; `eps` is None where rows are not normalised."""

    chunk_size: int
    scan: tuple[torch.Tensor, torch.Tensor] | None
    scale: float
    diagonal: str
    eps: float | None

    def orders(self):
        """(order, inverse) of each scan, (None, None) for the order in which tokens stand."""
        return [(None, None)] if self.scan is None else list(zip(*self.scan, strict=True))


def _chunk_form(q, k, v, rightward, leftward, options):
    """Σ_j M_ij (q_i·k_j) v_j, divided where rows are normalised, in O(L) time and memory (LION, section 4)."""
    inputs = (q, k, v, rightward, leftward)
    if _is_traced():  # whoever traces differentiates and fuses on his own
        return _attend(*inputs, options)[0]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _ChunkForm.apply(*inputs, options)
    return _attend_by_tiles(*inputs, options)[0]


class _ChunkForm(torch.autograd.Function):
    """The chunk form with its derivative by hand: scores and states are computed again, none are stored."""

    @staticmethod
    def forward(ctx, q, k, v, rightward, leftward, options):
        output, row_sums = _attend_by_tiles(q, k, v, rightward, leftward, options)
        ctx.save_for_backward(q, k, v, rightward, leftward, None if row_sums is None else output, row_sums)
        ctx.options = options
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *inputs, output, row_sums = ctx.saved_tensors
        with _full_precision(grad.device.type):
            return *_backward_by_tiles(*inputs, output, row_sums, grad, ctx.options), None


def _attend_by_tiles(q, k, v, rightward, leftward, options):
    batch, heads, length, _ = q.shape
    output = _empty_output(q, v)
    row_sums = None if options.eps is None else v.new_empty(batch, heads, length, 1, dtype=_sum_dtype(v.dtype))
    for tile in _tiles(q):
        gates = (_cut(g, *tile) for g in (rightward, leftward))
        values, sums = _attend(*(x[tile].contiguous() for x in (q, k, v)), *gates, options)
        output[tile] = values
        if row_sums is not None:
            row_sums[tile] = sums
    return output, row_sums


def _attend(q, k, v, rightward, leftward, options):
    """Output `(batch, heads, length, value_dim)` and row sums plus eps `(batch, heads, length, 1)`, or None."""
    width, orders = v.shape[3], options.orders()
    if options.eps is not None:
        v = _with_ones(v)  # the row sums ride along in the same pass
    sums = None
    for (order, inverse), right, left in zip(orders, rightward, leftward, strict=True):
        sums_n = _attend_blocks(*_make_blocks(q, k, v, right, left, order, options))
        sums_n = _in_order(sums_n.flatten(2, 3)[:, :, : q.shape[2]], inverse)
        sums = sums_n if sums is None else sums + sums_n
    if options.eps is None:
        return sums, None
    row_sums = _row_sums(sums, width, options.eps)
    return (sums[..., :width] / row_sums).to(v.dtype), row_sums


def _with_ones(v):
    v = nn.functional.pad(v, (0, _ONES_WIDTH))
    v[..., -_ONES_WIDTH] = 1.0
    return v


def _row_sums(sums, width, eps):
    """What the first `width` columns are divided by, of sums over values with ones beside them."""
    return sums[..., width : width + 1].to(_sum_dtype(sums.dtype)) + eps


def _in_order(x, order):
    return x if order is None else x.index_select(2, order)


def _make_blocks(q, k, v, rightward, leftward, order, options):
    """Queries, keys and values of blocks, `(batch, heads, blocks, C, ·)`, the walks through them and their mask."""
    length, size = q.shape[2], options.chunk_size
    if not torch.compiler.is_exporting():  # an exported program serves every length, with blocks of one size
        size = min(size, length)
    blocks = _count_blocks(length, size)
    q, k, v = (_split_blocks(_in_order(x, order), blocks, size, -2) for x in (q, k, v))
    rightward, leftward = (_split_gates(g, blocks, size) for g in (rightward, leftward))
    mask = _decay_mask(rightward, leftward, rightward.dtype)  # (batch or 1, heads or 1, blocks or 1, C, C)
    if options.diagonal == "doubled":
        mask = mask + torch.eye(size, dtype=mask.dtype, device=mask.device)
    walks = _walks(rightward, leftward)
    factor = options.scale / len(options.orders())
    if factor != 1.0:  # every way from a query to a key goes once through one of these
        mask, walks = mask.mul_(factor), [walk._replace(enter=walk.enter * factor) for walk in walks]
    return q, k, v, walks, mask.to(q.dtype)


def _split_gates(gates, blocks, size):
    """Gates `(…, length)` into `(…, blocks, size)`; one that stands for all tokens into `(…, 1, size)`."""
    if gates.shape[-1] == 1:
        return gates[..., None].expand(*gates.shape, size)
    return _split_blocks(gates, blocks, size, -1)


def _attend_blocks(q, k, v, walks, mask):
    """Σ_j M_ij (q_i·k_j) v_j of blocks, `(batch, heads, blocks, C, value_dim)`.

    Every block (1) attends to itself, both triangles in one score block, (2) sums up what it hands on to its right and
    to its left, (3) receives what the other blocks handed on, (4) lets its queries read that.
    """
    sums = ((q @ k.mT) * mask) @ v
    if not torch.compiler.is_exporting() and q.shape[2] == 1:
        return sums
    for walk in walks:
        handed_on = _scale_rows(k, walk.leave).mT @ v  # (batch, heads, blocks, head_dim, value_dim)
        received = _carry_states(handed_on, walk)
        sums.flatten(0, 2).baddbmm_(_scale_rows(q, walk.enter).flatten(0, 2), received.flatten(0, 2))
    return sums


def _scale_rows(x, decays):
    """Keys, queries or gradients `(…, C, d)` times a decay of each, `(…, C)`."""
    return x * decays[..., None].to(x.dtype)


def _count_blocks(length, size):
    """How many blocks of `size` it takes.

    A program that is exported for any length gets the number at run time: a tracer that knew it to follow from the
    length would make cases of whether there is one block only, and of whether the last is full.
    """
    blocks = (length + size - 1) // size  # ONNX divides towards zero: all has to be positive
    if torch.compiler.is_exporting():
        blocks = torch.scalar_tensor(blocks, dtype=torch.int64).item()
        torch._check(blocks >= 1)
    return blocks


def _carry_states(states, walk, transposed=False):
    """What enters each block on a walk, of what leaves it, `(batch, heads, blocks, head_dim, value_dim)` both.

    `transposed` carries gradients back, from what enters to what leaves.
    """
    across = walk.across.expand(*walk.across.shape[:-1], states.shape[2])
    return _carry(states.flatten(3), across, walk.leftwards != transposed).unflatten(3, states.shape[3:])


def _carry(states, across, leftwards):
    """What enters each block on a walk to one side: a scan over the blocks.

    Products with small matrices of decays over groups of blocks, and the same again over the groups: linear in the
    number of blocks, without a loop, and free of the denormal numbers that a state fading step by step runs through.
    (An exported program stops at groups. Their number is squared, but it is that of the tokens over a thousand.)

    Args:
        states: `(batch, heads, blocks, size)`, what leaves each block.
        across: `(batch or 1, heads or 1, blocks)`, logarithms of the decays across each block.
        leftwards: Whether the walk goes to the left.

    Returns:
        `(batch, heads, blocks, size)`
    """
    if torch.compiler.is_exporting():  # a program for every length cannot recurse by it: it forms groups, once
        return _carry_in_groups(states, across, leftwards, _carry_at_once)
    if states.shape[2] <= _CARRY_GROUP:
        return _carry_at_once(states, across, leftwards)
    return _carry_in_groups(states, across, leftwards, _carry)


def _carry_at_once(states, across, leftwards):
    between = _decays_between(across)[0].to(states.dtype)
    return (between.mT if leftwards else between) @ states


def _carry_in_groups(states, across, leftwards, carry):
    """`_carry` within groups of blocks at once, and by the function `carry` between the groups."""
    blocks = states.shape[2]
    groups = _count_blocks(blocks, _CARRY_GROUP)
    states, across = _split_blocks(states, groups, _CARRY_GROUP, -2), _split_blocks(across, groups, _CARRY_GROUP, -1)
    between, enter, leave = (decays.to(states.dtype) for decays in _decays_between(across))
    if leftwards:
        between, enter, leave = between.mT, leave, enter
    leaving = (leave[..., None, :] @ states).squeeze(-2).to(across.dtype)  # (batch, heads, groups, size)
    from_groups = carry(leaving, across.sum(-1).clamp(min=_CLOSED[across.dtype]), leftwards).to(states.dtype)
    entering = (between @ states).addcmul_(enter[..., None], from_groups[..., None, :])
    return entering.flatten(2, 3).narrow(2, 0, blocks)  # a slice has a size that tracers do not know to be this


def _backward_by_tiles(q, k, v, rightward, leftward, output, row_sums, grad, options):
    """Gradients of all inputs of `_chunk_form`, of those that it has saved and of the gradient of its output."""
    batch, heads, length, _ = q.shape
    # Made from the gradient: under vmap it has the axis that is mapped over, the inputs may not.
    grads = [grad.new_empty(batch, length, heads, x.shape[3], dtype=x.dtype).transpose(1, 2) for x in (q, k, v)]
    grad_gates = [grad.new_zeros(g.shape, dtype=g.dtype) for g in (rightward, leftward)]
    for tile in _tiles(q):
        gates = [_cut(g, *tile) for g in (rightward, leftward)]
        division = None if row_sums is None else (output[tile], row_sums[tile])
        of_tile = _backward(*(x[tile].contiguous() for x in (q, k, v)), *gates, division, grad[tile], options)
        for whole, part in zip(grads, of_tile[:3], strict=True):
            whole[tile] = part
        for whole, part in zip(grad_gates, of_tile[3:], strict=True):
            whole = _cut(whole, *tile)
            whole += part.sum_to_size(whole.shape)
    return *grads, *grad_gates


def _backward(q, k, v, rightward, leftward, division, grad, options):
    length, width, orders = q.shape[2], v.shape[3], options.orders()
    if options.eps is not None:
        v, grad = _with_ones(v), _grad_of_sums(grad, *division)
    grad = grad.contiguous()
    grads, grad_gates = [], []
    for (order, inverse), right, left in zip(orders, rightward, leftward, strict=True):
        blocks = _make_blocks(q, k, v, right, left, order, options)
        grad_n = _split_blocks(_in_order(grad, order), *blocks[0].shape[2:4], -2)
        *of_blocks, to_right, to_left = _backward_blocks(*blocks, grad_n)
        grads.append([_in_order(x.flatten(2, 3)[:, :, :length], inverse) for x in of_blocks])
        grad_gates.append([x.flatten(2)[..., :length] for x in (to_right, to_left)])
    grad_q, grad_k, grad_v = (functools.reduce(torch.add, of_orders) for of_orders in zip(*grads, strict=True))
    return (
        grad_q,
        grad_k,
        grad_v[..., :width],
        *(torch.stack(of_orders) for of_orders in zip(*grad_gates, strict=True)),
    )


def _grad_of_sums(grad, output, row_sums):
    """Gradient of values and, in the column of ones, of row sums, before the division of the one by the other."""
    of_row_sums = -(grad * output).sum(-1, dtype=row_sums.dtype) / row_sums[..., 0]
    of_values = nn.functional.pad((grad / row_sums).to(grad.dtype), (0, _ONES_WIDTH))
    of_values[..., -_ONES_WIDTH] = of_row_sums
    return of_values


def _backward_blocks(q, k, v, walks, mask, grad):
    """Gradients of `_attend_blocks` by q, k and v, and by the gates to the right and to the left `(…, blocks, C)`."""
    weights = (q @ k.mT) * mask
    grad_v = weights.mT @ grad
    grad_scores = grad @ v.mT
    weights = weights * grad_scores  # gradient by the logarithms of the decays in the mask
    grad_scores = grad_scores * mask
    grad_q, grad_k = grad_scores @ k, grad_scores.mT @ q
    grads = [_backward_walk(q, k, v, walk, grad, grad_q, grad_k, grad_v) for walk in walks]
    return grad_q, grad_k, grad_v, *_grad_gates(weights, *grads)


def _backward_walk(q, k, v, walk, grad, grad_q, grad_k, grad_v):
    """Adds to the gradients by q, k and v what comes by one walk; returns those by its decays, as a `_Walk`."""
    k_leaving, q_entering = _scale_rows(k, walk.leave), _scale_rows(q, walk.enter)
    received = _carry_states(k_leaving.mT @ v, walk)
    grad_handed_on = _carry_states(q_entering.mT @ grad, walk, transposed=True)
    grad_v.flatten(0, 2).baddbmm_(k_leaving.flatten(0, 2), grad_handed_on.flatten(0, 2))
    # Whatever crosses a block is what it would receive; what becomes of it beyond is what it could hand on.
    crossing = (received * grad_handed_on).sum((-2, -1), dtype=walk.across.dtype)
    return walk._replace(
        leave=_backward_scale_rows(k, walk.leave, v @ grad_handed_on.mT, grad_k),
        enter=_backward_scale_rows(q, walk.enter, grad @ received.mT, grad_q),
        across=crossing * _exp(walk.across, walk.across.dtype),
    )


def _backward_scale_rows(x, decays, grad, grad_x):
    """Derivative of `_scale_rows`: adds that by x to `grad_x`, returns that by the logarithms of the decays."""
    grad_x.addcmul_(grad, decays[..., None].to(x.dtype))
    return (grad * x).sum(-1, dtype=decays.dtype) * decays


def _grad_gates(mask, right, left):
    """Gradients by gates, `(…, blocks, C)` to the right and to the left: each is in the sums of all that cross it.

    Args:
        mask: gradient by the logarithms of the decays in the mask, `(…, blocks, C, C)`.
        right, left: gradients by the logarithms of the decays of the walks.
    """
    to_right, to_left = _across_tokens(mask)
    until, _ = _cumulative(to_right + right.leave)
    entered, _ = _cumulative(right.enter)
    of_right = until + (entered[..., -1:] - entered)
    _, before = _cumulative(left.enter - to_left)
    left_by, left_before = _cumulative(left.leave)
    of_left = before + (left_by[..., -1:] - left_before)
    return [(x + walk.across[..., None]).to(walk.leave.dtype) for x, walk in ((of_right, right), (of_left, left))]


# ---------------------------------------------------------------------------------------------------------------------
# Without decays, and recurrent form
# ---------------------------------------------------------------------------------------------------------------------


def _undecayed_form(q, k, v, scale, diagonal, eps):
    """The chunk form of what nothing decays in: one state serves every token."""
    width = v.shape[3]
    if eps is not None:
        v = _with_ones(v)
    return _divide(q @ ((k.mT @ v) * scale), q, k, v, width, scale, diagonal, eps)


def _rnn_form(q, k, v, gates, scan, scale, diagonal, eps, chunk_size):
    """Σ_j M_ij (q_i·k_j) v_j by recurrences; several scan orders are walked at once, as if they were heads."""
    q, k, v = (x.to(_sum_dtype(x.dtype)) for x in (q, k, v))
    width = v.shape[3]
    if eps is not None:
        v = _with_ones(v)
    q_n, k_n, v_n, rightward, leftward = q, k, v, None, None
    if gates is not None:
        heads = q.shape[1]
        rightward, leftward = (g.expand(-1, -1, heads, -1).movedim(0, 1).flatten(1, 2) for g in gates)
        if scan is not None:
            q_n, k_n, v_n = (torch.cat([_in_order(x, order) for order in scan[0]], 1) for x in (q_n, k_n, v_n))
    sums = _Recurrence.apply(q_n, k_n, v_n, rightward, leftward, chunk_size)
    if gates is not None and scan is not None:
        sums = zip(sums.unflatten(1, (len(scan[0]), -1)).unbind(1), scan[1], strict=True)
        sums = sum(_in_order(x, inverse) for x, inverse in sums) / len(scan[0])
    return _divide(sums if scale == 1.0 else sums * scale, q, k, v, width, scale, diagonal, eps)


def _divide(sums, q, k, v, width, scale, diagonal, eps):
    if diagonal == "doubled":
        sums = sums + (q * k).sum(-1, keepdim=True) * scale * v
    return sums if eps is None else sums[..., :width] / _row_sums(sums, width, eps)


class _Recurrence(torch.autograd.Function):
    """The recurrence forward; its derivative, which is that of the same function, through the chunk form.

    So training in this form stores no state per token either, and its backward pass is no loop over tokens.
    """

    @staticmethod
    def forward(q, k, v, rightward, leftward, chunk_size):
        return _recur(q, k, v, rightward, leftward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.chunk_size = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        """The new axis goes in front of the batch's, where gates may be one for all."""
        *tensors, chunk_size = inputs
        unfolded = [
            x if x is None else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[:-1], strict=True)
        ]
        batch = unfolded[0].shape[1]
        folded = (x if x is None else x.expand(-1, batch, *x.shape[2:]).flatten(0, 1) for x in unfolded)
        return _Recurrence.apply(*folded, chunk_size).unflatten(0, (-1, batch)), 0

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        inputs = [x if x is None else x.detach() for x in ctx.saved_tensors]
        with _full_precision(grad.device.type):
            if inputs[3] is not None:
                q, k, v, *gates = inputs
                options = _ChunkOptions(ctx.chunk_size, None, 1.0, "balanced", None)
                grads = _backward_by_tiles(q, k, v, *(g[None] for g in gates), None, None, grad, options)
                return *grads[:3], *(g[0] for g in grads[3:]), None
            q, k, v = inputs[:3]
            grad_state = q.mT @ grad
            return grad @ (k.mT @ v).mT, v @ grad_state.mT, k @ grad_state, None, None, None


def _recur(q, k, v, rightward, leftward):
    """Both recurrences in one loop, S ← e^g (S + k vᵀ), from both ends towards the other.

    A token is read before it is added, and the diagonal is counted once and apart: nothing has to be subtracted.
    """
    length = q.shape[2]
    sums = (q * k).sum(-1, keepdim=True) * v  # (batch, heads, length, value_dim)
    states = q.new_zeros(2 * q.shape[0] * q.shape[1], q.shape[3], v.shape[3])  # both directions' of every head
    smallest = torch.finfo(q.dtype).tiny ** 0.5
    for start in range(0, length, _RECURRENCE_TILE):
        stop = min(start + _RECURRENCE_TILE, length)
        ahead, back = slice(start, stop), slice(length - stop, length - start)
        queries, keys, values = (_mirrored_tile(x, x, ahead, back) for x in (q, k, v))  # (T, 2 · batch · heads, ·)
        decays = [None] * (stop - start)
        if rightward is not None:
            gates = (g.expand(q.shape[:3])[..., None] for g in (rightward, leftward))
            decays = _exp(_mirrored_tile(*gates, ahead, back), q.dtype)[..., None].unbind()
        read = values.new_empty(values.shape)
        steps = zip(queries[:, :, None], keys[..., None], values[:, :, None], decays, read[:, :, None], strict=True)
        for i, (query, key, value, decay, sums_of_step) in enumerate(steps, start=1):
            torch.bmm(query, states, out=sums_of_step)
            states.addcmul_(key, value)
            if decay is not None:
                states.mul_(decay)
            if i % _RECURRENCE_CLEANING == 0:
                # A state fades step by step where nothing is added to it; it must not come to the denormal numbers.
                states = nn.functional.hardshrink(states, smallest)
        from_left, from_right = read.unflatten(1, (2, *q.shape[:2])).movedim(0, 3)  # (batch, heads, T, value_dim)
        sums[:, :, ahead] += from_left
        sums[:, :, back] += from_right.flip(2)
    return sums


def _mirrored_tile(x, mirror, ahead, back):
    """Tokens `ahead` of `x` and, in reverse order, tokens `back` of `mirror`: `(T, 2 · batch · heads, d)`."""
    tile = torch.stack([x[:, :, ahead], mirror[:, :, back].flip(2)])  # (2, batch, heads, T, d)
    return tile.movedim(3, 0).flatten(1, 3).contiguous()
