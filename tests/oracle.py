"""The definition of the operator, row by row in float64: slow, plain, and independent of the library."""

import torch


def loop_attention(q, k, v, log_decay=None, *, key_mask=None, segment_ids=None, normalize=False, eps=1e-6):
    """Outputs `(batch, heads, length, value_dim)` in float64, differentiable in every argument."""
    weights = loop_weights(q, k, log_decay, key_mask=key_mask, segment_ids=segment_ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights @ v.double()


def loop_weights(q, k, log_decay=None, *, key_mask=None, segment_ids=None):
    """M_ij (q_i·k_j) where token i may see token j, else 0: `(batch, heads, length, length)`."""
    batch, heads, length, _ = q.shape
    if key_mask is None:
        key_mask = torch.ones(batch, length)
    gates = _gates(log_decay, key_mask, batch, heads, length)
    rows = []
    for i in range(length):
        earlier = gates[..., :i].flip(-1).cumsum(-1).flip(-1)  # g_j + … + g_{i-1}
        later = gates[..., i + 1 :].cumsum(-1)  # g_{i+1} + … + g_j
        rows.append(torch.cat([earlier, torch.zeros(batch, heads, 1, dtype=torch.float64), later], -1).exp())
    allowed = (key_mask != 0)[:, None, None, :] & _same_segment(segment_ids, batch, length)[:, None]
    return torch.stack(rows, -2) * (q.double() @ k.double().mT) * allowed


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
