"""The definition of the operator, row by row in float64: slow, plain, and independent of the library."""

import torch


def loop_attention(q, k, v, log_decay=None, *, normalize=False, eps=1e-6, **options):
    """Outputs `(batch, heads, length, value_dim)` in float64, differentiable in every argument."""
    weights = loop_weights(q, k, log_decay, **options)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights @ v.double()


def loop_weights(
    q, k, log_decay=None, *, key_mask=None, segment_ids=None, order=None, direction="both", diagonal="balanced"
):
    """M_ij (q_i·k_j) where token i may see token j, else 0: `(batch, heads, length, length)`.

    `order` holds permutations `(orders, length)`, each with decays of its own: M is the mean over them.
    """
    batch, heads, length, _ = q.shape
    if key_mask is None:
        key_mask = torch.ones(batch, length)
    if order is None:
        order, log_decay = torch.arange(length)[None], [log_decay]
    elif log_decay is None:
        log_decay = [None] * len(order)
    total = torch.zeros(batch, heads, length, length, dtype=torch.float64)
    for tokens, decays in zip(order, log_decay, strict=True):
        gates = _gates(decays, key_mask, batch, heads, length)[..., tokens]
        in_order = _decay_rows(gates, direction, 2.0 if diagonal == "doubled" else 1.0)
        in_token_order = torch.zeros_like(total)
        in_token_order[..., tokens[:, None], tokens[None, :]] = in_order
        total = total + in_token_order / len(order)
    allowed = (key_mask != 0)[:, None, None, :] & _same_segment(segment_ids, batch, length)[:, None]
    return total * (q.double() @ k.double().mT) * allowed


def _decay_rows(gates, direction, diagonal):
    """M, row by row, of tokens in the order in which they are visited."""
    rows = []
    for i in range(gates.shape[-1]):
        earlier = gates[..., :i].flip(-1).cumsum(-1).flip(-1).exp()  # g_j + … + g_{i-1}
        later = gates[..., i + 1 :].cumsum(-1).exp()  # g_{i+1} + … + g_j
        if direction == "forward":
            later = torch.zeros_like(later)
        if direction == "backward":
            earlier = torch.zeros_like(earlier)
        rows.append(torch.cat([earlier, torch.full_like(gates[..., :1], diagonal), later], -1))
    return torch.stack(rows, -2)


def _gates(log_decay, key_mask, batch, heads, length):
    if log_decay is None:
        return torch.zeros(batch, heads, length, dtype=torch.float64)
    if log_decay.ndim == 1:
        return log_decay.double()[None, :, None].expand(batch, heads, length)
    return log_decay.double() * (key_mask != 0)[:, None]


def _same_segment(segment_ids, batch, length):
    same = torch.ones(batch, length, length, dtype=torch.bool)
    if segment_ids is not None:
        for b in range(batch):
            for i in range(length):
                for j in range(length):
                    between = segment_ids[b, min(i, j) : max(i, j) + 1]
                    same[b, i, j] = bool((between == segment_ids[b, i]).all())
    return same
