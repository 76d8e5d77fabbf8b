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

from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.function import once_differentiable


ATTENTION_MODES = ("parallel", "chunk", "rnn")
DIRECTIONS = ("both", "forward", "backward")
DIAGONALS = ("balanced", "doubled")

# Longest sequence that "auto" computes in parallel form, from `scripts/benchmark.py forms`: without decays the chunk
# form is two small products and wins almost at once.
PARALLEL_MAX_LENGTH = 256
PARALLEL_MAX_LENGTH_WITHOUT_DECAY = 32

# Decays whose logarithm lies below this are exactly zero. They are far below a rounding error of the diagonal and of
# the epsilon of the division, yet the product of three of them (query, state and key each carry one) is a normal
# number: a CPU computes with denormal numbers tens of times slower.
_NEGLIGIBLE = {torch.float32: -26.0, torch.float64: -52.0}

# Gates stronger than this cannot be told from it, and would only cost digits in the sums of gates. It also closes the
# way where a segment ends.
_CLOSED = {dtype: 1.5 * exponent for dtype, exponent in _NEGLIGIBLE.items()}

# Tokens per block of the parallel form's decay mask.
_MASK_BLOCK = 64

# Blocks whose states meet in one product; longer sequences carry group states between groups of this many blocks.
_CARRY_GROUP = 16

# The recurrence stages this many tokens at a time, so that each step reads contiguous memory.
_RECURRENCE_TILE = 64


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
    normalize: bool = False,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    return_weights: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Bidirectional linear attention with decays, the equation at the head of this module.

    Everything is computed and accumulated in float32, also under autocast and for half-precision inputs; float64
    inputs stay float64 throughout. All three modes have the same values and the same gradients.

    Args:
        q: Queries after feature map and scaling, `(batch, heads, length, head_dim)`.
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
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        log_decay = None if log_decay is None else log_decay.to(dtype)
        if key_mask is not None:
            k, v, log_decay = _drop_masked(k, v, log_decay, key_mask.bool())
        gates = _directional_gates(log_decay, segment_ids, scan, direction, q)

        if mode == "parallel":
            weights = q @ k.mT  # (batch, heads, length, length)
            if gates is not None:
                weights = weights * _mean_decay_mask(gates, scan)
            if diagonal == "doubled":
                weights = weights + weights.diagonal(dim1=-2, dim2=-1).diag_embed()
            row_sums = weights.sum(-1, keepdim=True) if normalize else None
            if return_weights and normalize:
                # The matrix that is returned is the one that is applied: gradients of the output reach it.
                weights, row_sums = weights / (row_sums + eps), None
            values = nn.functional.dropout(weights, dropout_p) @ v
        else:
            if normalize:
                v = nn.functional.pad(v, (0, 1), value=1.0)  # the row sums ride along in the same pass
            values = _linear_form(q, k, v, gates, scan, mode, chunk_size)
            if diagonal == "doubled":
                values = values + (q * k).sum(-1, keepdim=True) * v
            values, row_sums = (values[..., :-1], values[..., -1:]) if normalize else (values, None)

        if row_sums is not None:
            values = values / (row_sums + eps)
        output = values.to(output_dtype)
        return (output, weights.to(weights_dtype)) if return_weights else output


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
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}")
    if eps <= 0:
        raise ValueError(f"`eps` must be greater than 0, got {eps}")
    if mode != "parallel" and (dropout_p > 0 or return_weights):
        name = "return_weights" if return_weights else "dropout_p"
        raise ValueError(f"`{name}` needs the attention matrix: `mode` must be 'parallel', got {mode!r}")


def _check_values(log_decay, key_mask):
    """Checks that read tensors, where that neither stalls a device nor breaks a graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
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


def _full_precision(device_type: str):
    """Autocast off: under it, products of float32 tensors would be rounded to half precision."""
    enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()


def _drop_masked(k, v, log_decay, keep):
    """Zero keys and values, and neutral gates where gates come from content, at masked tokens."""
    masked = ~keep[:, None]  # (batch, 1, length)
    k, v = k.masked_fill(masked[..., None], 0.0), v.masked_fill(masked[..., None], 0.0)
    if log_decay is not None and log_decay.ndim >= 3:
        log_decay = log_decay.masked_fill(masked, 0.0)
    return k, v, log_decay


def _directional_gates(log_decay, segment_ids, scan, direction, q):
    """Gates of the walk to the right and of the walk to the left, `(batch or 1, heads or 1, length)` each.

    The two differ where a walk is closed: at the ends of segments, each in its own direction, and everywhere against
    the only direction. With `scan` they are in the order of each scan, `(batch or 1, orders · heads, length)`. `None`
    where nothing decays and nothing is closed: then the order is of no account either.
    """
    if log_decay is None and segment_ids is None and direction == "both":
        return None
    closed = _CLOSED[q.dtype]
    gates = _gates_in_order(log_decay, scan, q).clamp(min=closed)
    rightward = leftward = gates
    if segment_ids is not None:
        ends = segment_ids[:, 1:] != segment_ids[:, :-1]  # (batch, length - 1)
        rightward = gates.masked_fill(nn.functional.pad(ends, (0, 1))[:, None], closed)  # last of a segment
        leftward = gates.masked_fill(nn.functional.pad(ends, (1, 0))[:, None], closed)  # first of a segment
    if direction == "backward":
        rightward = torch.full_like(leftward, closed)
    elif direction == "forward":
        leftward = torch.full_like(rightward, closed)
    return rightward, leftward


def _gates_in_order(log_decay, scan, q):
    heads, length = q.shape[1:3]
    if scan is None:
        if log_decay is None:
            return q.new_zeros(1, 1, length)
        return log_decay if log_decay.ndim == 3 else log_decay[None, :, None].expand(1, heads, length)
    order, _ = scan
    if log_decay is None:
        return q.new_zeros(1, len(order) * heads, length)
    if log_decay.ndim == 2:
        return log_decay.flatten()[None, :, None].expand(1, -1, length)
    return torch.cat([gates.index_select(-1, o) for gates, o in zip(log_decay, order, strict=True)], 1)


def _exp(log_decay, dtype):
    """Decays from their logarithms; what has decayed below use is exactly zero, not a denormal number."""
    log_decay = log_decay.to(dtype)
    return log_decay.masked_fill(log_decay < _NEGLIGIBLE[dtype], -torch.inf).exp()


def _cumulative(gates):
    """Inclusive and exclusive sums `(…, length)` in float64: differences of long float32 sums have no digits left."""
    inclusive = gates.cumsum(-1, dtype=gates.dtype if gates.device.type == "mps" else torch.float64)
    return inclusive, nn.functional.pad(inclusive[..., :-1], (1, 0))


def _mean_decay_mask(gates, scan):
    """M, `(batch or 1, heads or 1, length, length)`: the mean over the scan orders, each taken back to token order."""
    if scan is None:
        return _decay_mask(*gates)
    _, inverse = scan
    rightward, leftward = (g.unflatten(1, (len(inverse), -1)).unbind(1) for g in gates)
    masks = [
        _decay_mask(right, left).index_select(-2, step).index_select(-1, step)
        for right, left, step in zip(rightward, leftward, inverse, strict=True)
    ]
    return sum(masks) / len(masks)


def _decay_mask(rightward, leftward):
    """M of the module's equation, `(…, length, length)`, from gates `(…, length)`.

    Long sequences by blocks: away from the diagonal M is an outer product of decays from and to the edges of blocks.
    That needs no exponential per pair, and no sum of gates longer than a block.
    """
    length = rightward.shape[-1]
    if length <= _MASK_BLOCK:
        return _decay_mask_of_block(rightward, leftward)
    rightward, leftward = (_split_blocks(g, -(-length // _MASK_BLOCK), _MASK_BLOCK, -1) for g in (rightward, leftward))
    leave, enter, across = _edge_decays(rightward, leftward)
    between = _decays_to_edges(*across)  # (…, 2, blocks + 1, blocks)
    from_left = enter[..., 0, None] * between[..., 0, :-1, None, :]  # (…, blocks, C, blocks)
    from_right = enter[..., 1, None] * between[..., 1, 1:, None, :]
    mask = from_left[..., None] * leave[..., None, None, :, :, 0]  # (…, blocks, C, blocks, C)
    mask = mask.addcmul_(from_right[..., None], leave[..., None, None, :, :, 1])
    mask.diagonal(dim1=-4, dim2=-2).copy_(_decay_mask_of_block(rightward, leftward).movedim(-3, -1))
    return mask.flatten(-2).flatten(-3, -2)[..., :length, :length]


def _decay_mask_of_block(rightward, leftward):
    size, dtype = rightward.shape[-1], rightward.dtype
    to_right, to_left = _cumulative(rightward)[1].to(dtype), _cumulative(leftward)[0].to(dtype)
    from_earlier = to_right[..., :, None] - to_right[..., None, :]  # g_j + … + g_{i-1}, of use for j ≤ i
    from_later = to_left[..., None, :] - to_left[..., :, None]  # g_{i+1} + … + g_j, of use for j ≥ i
    earlier = torch.ones(size, size, dtype=torch.bool, device=rightward.device).tril()
    return _exp(torch.where(earlier, from_earlier, from_later), dtype)


def _split_blocks(x, blocks, size, dim):
    """Dimension `dim` (negative) into `(blocks, size)`; the tail is filled with zeros, which add nothing."""
    missing = blocks * size - x.shape[dim]
    return nn.functional.pad(x, (0, 0) * (-dim - 1) + (0, missing)).unflatten(dim, (blocks, size))


def _edge_decays(rightward, leftward):
    """Decays between tokens and the edges of their block, and across whole blocks, from gates `(…, blocks, C)`.

    Returns `leave` `(…, blocks, C, 2)`, from a token (own gate included) to the right and to the left edge; `enter`
    `(…, blocks, C, 2)`, from the left and from the right edge to a token (own gate not included); and the logarithms
    of the decays across each block, to the right and to the left, `(…, blocks)` each.
    """
    dtype = rightward.dtype
    to_right, before = _cumulative(rightward)
    to_left, _ = _cumulative(leftward)
    leave = torch.stack([_exp(to_right[..., -1:] - before, dtype), _exp(to_left, dtype)], -1)
    enter = torch.stack([_exp(before, dtype), _exp(to_left[..., -1:] - to_left, dtype)], -1)
    across = tuple(total[..., -1].to(dtype).clamp(min=_CLOSED[dtype]) for total in (to_right, to_left))
    return leave, enter, across


def _decays_to_edges(rightward, leftward):
    """Decays from where a block ends to the edges of the others, from the logarithms of the decays across each block.

    Args:
        rightward, leftward: `(…, blocks)`.

    Returns:
        `(…, 2, blocks + 1, blocks)`: from the right end of block b to edge e > b, and from the left end of block b to
        edge e ≤ b, zero elsewhere. Edge e lies to the left of block e.
    """
    blocks, dtype = rightward.shape[-1], rightward.dtype
    to_right, to_left = (nn.functional.pad(_cumulative(g)[0], (1, 0)) for g in (rightward, leftward))
    from_left = to_right[..., :, None] - to_right[..., None, 1:]
    from_right = to_left[..., None, :-1] - to_left[..., :, None]
    is_left = torch.ones(blocks + 1, blocks, dtype=torch.bool, device=rightward.device).tril(-1)
    from_left, from_right = from_left.masked_fill(~is_left, -torch.inf), from_right.masked_fill(is_left, -torch.inf)
    return _exp(torch.stack([from_left, from_right], -3), dtype)


def _linear_form(q, k, v, gates, scan, mode, chunk_size):
    """Σ_j M_ij (q_i·k_j) v_j in chunk or rnn form; several scan orders are computed at once, as if they were heads."""
    form = _chunk_form if mode == "chunk" else _rnn_form
    if scan is None or gates is None:
        return form(q, k, v, gates, chunk_size)
    order, inverse = scan
    q, k, v = (torch.cat([x.index_select(2, o) for o in order], 1) for x in (q, k, v))  # (batch, orders · heads, …)
    sums = form(q, k, v, gates, chunk_size).unflatten(1, (len(order), -1)).unbind(1)
    return sum(x.index_select(2, step) for x, step in zip(sums, inverse, strict=True)) / len(order)


# ---------------------------------------------------------------------------------------------------------------------
# Chunk form
# ---------------------------------------------------------------------------------------------------------------------


def _chunk_form(q, k, v, gates, chunk_size):
    """Σ_j M_ij (q_i·k_j) v_j in O(L) time and memory (LION, section 4, "chunkwise parallel").

    Blocks of C tokens. Every block (1) attends to itself, both triangles in one score block, (2) sums up what it hands
    on to its right and to its left, (3) receives what the other blocks handed on, (4) lets its queries read that.
    """
    if gates is None:
        return q @ (k.mT @ v)  # nothing decays: one state serves every token
    length, head_dim, value_dim = q.shape[2], q.shape[3], v.shape[3]
    if not torch.compiler.is_exporting():  # an exported program serves every length, with blocks of one size
        chunk_size = min(chunk_size, length)
    blocks = _count_blocks(length, chunk_size)
    q, k, v = (_split_blocks(x, blocks, chunk_size, -2) for x in (q, k, v))  # (batch, heads, blocks, C, ·)
    rightward, leftward = (_split_blocks(g, blocks, chunk_size, -1) for g in gates)  # (·, ·, blocks, C)

    inside = (q @ k.mT) * _decay_mask(rightward, leftward)  # (batch, heads, blocks, C, C)
    leave, enter, across = _edge_decays(rightward, leftward)
    k_leaving = (k[..., None, :] * leave[..., None]).flatten(-2)  # (batch, heads, blocks, C, 2 · head_dim)
    handed_on = k_leaving.mT @ v  # (batch, heads, blocks, 2 · head_dim, value_dim)
    handed_on = handed_on.unflatten(-2, (2, head_dim)).flatten(-2)  # (batch, heads, blocks, 2, head_dim · value_dim)
    received = _carry(handed_on, *across)
    received = received.flatten(-2).unflatten(-1, (2 * head_dim, value_dim))
    q_entering = (q[..., None, :] * enter[..., None]).flatten(-2)  # (batch, heads, blocks, C, 2 · head_dim)

    sums = inside @ v + q_entering @ received  # (batch, heads, blocks, C, value_dim)
    return sums.flatten(2, 3)[:, :, :length]


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


def _carry(handed_on, rightward, leftward):
    """What enters each block from its left and from its right: both directions' scans over the blocks at once.

    Products with small matrices of decays over groups of blocks, and the same again over the groups: linear in the
    number of blocks, without a loop, and free of the denormal numbers that a state fading step by step runs through.
    (An exported program stops at groups. Their number is squared, but it is that of the tokens over a thousand.)

    Args:
        handed_on: `(batch, heads, blocks, 2, size)`, states leaving each block to the right and to the left.
        rightward, leftward: `(batch or 1, heads or 1, blocks)`, logarithms of the decays across each block.

    Returns:
        `(batch, heads, blocks, 2, size)`, states entering each block from the left and from the right.
    """
    if torch.compiler.is_exporting():  # a program for every length cannot recurse by it: it forms groups, once
        return _carry_in_groups(handed_on, rightward, leftward, _carry_at_once)
    if handed_on.shape[2] <= _CARRY_GROUP:
        return _carry_at_once(handed_on, rightward, leftward)
    return _carry_in_groups(handed_on, rightward, leftward, _carry)


def _carry_at_once(handed_on, rightward, leftward):
    return _entering(_states_at_edges(handed_on, rightward, leftward))


def _carry_in_groups(handed_on, rightward, leftward, carry):
    """`_carry` within groups of blocks at once, and by the function `carry` between the groups."""
    blocks = handed_on.shape[2]
    groups = _count_blocks(blocks, _CARRY_GROUP)
    handed_on = _split_blocks(handed_on, groups, _CARRY_GROUP, -3)
    rightward, leftward = (_split_blocks(g, groups, _CARRY_GROUP, -1) for g in (rightward, leftward))
    at_edges = _states_at_edges(handed_on, rightward, leftward)
    leaving = torch.stack([at_edges[..., 0, -1, :], at_edges[..., 1, 0, :]], -2)  # (…, groups, 2, size)
    _, reach, across = _edge_decays(rightward, leftward)
    from_groups = carry(leaving, *across)  # (batch, heads, groups, 2, size)
    entering = _entering(at_edges) + reach[..., None] * from_groups[:, :, :, None]
    return entering.flatten(2, 3)[:, :, :blocks]


def _states_at_edges(handed_on, rightward, leftward):
    """States at every edge of blocks, `(…, 2, blocks + 1, size)`: what comes from its left, and from its right."""
    return _decays_to_edges(rightward, leftward) @ handed_on.transpose(-3, -2)


def _entering(at_edges):
    """States entering each block, `(…, blocks, 2, size)`: over its left edge and over its right edge."""
    return torch.stack([at_edges[..., 0, :-1, :], at_edges[..., 1, 1:, :]], -2)


# ---------------------------------------------------------------------------------------------------------------------
# Recurrent form
# ---------------------------------------------------------------------------------------------------------------------


def _rnn_form(q, k, v, gates, chunk_size):
    gates = gates if gates is not None else (None, None)
    return _Recurrence.apply(q, k, v, *gates, chunk_size)


class _Recurrence(torch.autograd.Function):
    """The recurrence forward; its derivative, which is that of the same function, through the chunk form.

    So training in this form stores no state per token either, and its backward pass is no loop over tokens.
    """

    @staticmethod
    def forward(ctx, q, k, v, rightward, leftward, chunk_size):
        ctx.save_for_backward(q, k, v, rightward, leftward)
        ctx.chunk_size = chunk_size
        return _recur(q, k, v, rightward, leftward)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needed = [i for i in range(5) if ctx.needs_input_grad[i]]
        inputs = [x if x is None else x.detach() for x in ctx.saved_tensors]
        for i in needed:
            inputs[i].requires_grad_()
        q, k, v, *gates = inputs
        with torch.enable_grad(), _full_precision(q.device.type):
            sums = _chunk_form(q, k, v, None if gates[0] is None else gates, ctx.chunk_size)
        grads = [None] * 6
        for i, g in zip(needed, torch.autograd.grad(sums, [inputs[i] for i in needed], grad), strict=True):
            grads[i] = g
        return tuple(grads)


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
        decays = None
        if rightward is not None:
            shape = (*q.shape[:2], -1)
            tile = _mirrored_tile(rightward.expand(shape)[..., None], leftward.expand(shape)[..., None], ahead, back)
            decays = _exp(tile, q.dtype)[..., None]  # (T, 2 · batch · heads, 1, 1)
        read = values.new_empty(values.shape)
        for i in range(stop - start):
            torch.bmm(queries[i, :, None], states, out=read[i, :, None])
            states.baddbmm_(keys[i, :, :, None], values[i, :, None])
            if decays is not None:
                states.mul_(decays[i])
        from_left, from_right = read.unflatten(1, (2, *q.shape[:2])).movedim(0, 3)  # (batch, heads, T, value_dim)
        sums[:, :, ahead] += from_left
        sums[:, :, back] += from_right.flip(2)
        # A state fades step by step where nothing is added to it; it must not linger among the denormal numbers.
        states.mul_(states.abs() > smallest)
    return sums


def _mirrored_tile(x, mirror, ahead, back):
    """Tokens `ahead` of `x` and, in reverse order, tokens `back` of `mirror`: `(T, 2 · batch · heads, d)`."""
    tile = torch.stack([x[:, :, ahead], mirror[:, :, back].flip(2)])  # (2, batch, heads, T, d)
    return tile.movedim(3, 0).flatten(1, 3).contiguous()
