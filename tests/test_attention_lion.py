import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import loop_attention, loop_weights
from torch.utils._python_dispatch import TorchDispatchMode

from lion_transformers import attention_lion, lion_attention
from lion_transformers.attention_lion import (
    PARALLEL_MAX_LENGTH,
    PARALLEL_MAX_LENGTH_WITHOUT_DECAY,
    choose_mode,
)


MODES = ("parallel", "chunk", "rnn")
DECAYS = ("none", "fixed", "selective")


def make_inputs(
    decay, *, batch=2, heads=3, length=20, head_dim=5, value_dim=4, seed=0, dtype=torch.float64, orders=None
):
    """Positive queries and keys, so that rows can be normalised; a strong and a weak head among the decays.

    Decays are those of each of `orders`, where it is a number.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.rand, generator=generator, dtype=torch.float64)
    q, k = draw(batch, heads, length, head_dim) + 0.1, draw(batch, heads, length, head_dim) + 0.1
    v = draw(batch, heads, length, value_dim) - 0.5
    scale = torch.tensor([0.02, 1.0, 4.0], dtype=torch.float64)[:heads]
    several = () if orders is None else (orders,)
    log_decay = {
        "none": lambda: None,
        "fixed": lambda: -scale * draw(*several, heads),
        "selective": lambda: -scale[:, None] * draw(*several, batch, heads, length),
    }[decay]()
    return [x if x is None else x.to(dtype) for x in (q, k, v, log_decay)]


def with_gradients(function, inputs):
    """Output of `function(*inputs)` and the gradients of a fixed random projection of it."""
    inputs = [x if x is None else x.detach().clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (output * weights.to(output.dtype)).sum().backward()
    return [output.detach(), *(x.grad for x in inputs if x is not None)]


@functools.cache
def expected_with_gradients(decay, length, masked, segmented, normalize):
    inputs = make_inputs(decay, length=length)
    mask, segments = make_mask(length) if masked else None, make_segments(length) if segmented else None
    return with_gradients(
        lambda *x: loop_attention(*x, key_mask=mask, segment_ids=segments, normalize=normalize), inputs
    )


def make_mask(length, batch=2):
    """Masked on the left, inside and on the right, differently in each row."""
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, : length // 5] = False
    mask[0, length // 2] = False
    mask[1, length - length // 3 :] = False
    return mask


def make_segments(length, batch=2):
    """A few segments; the second row comes back to an id it had left."""
    segments = torch.zeros(batch, length, dtype=torch.long)
    segments[0, length // 3 :] = 1
    segments[0, length // 2 :] = 2
    segments[1, length // 4 : length // 2] = 7
    return segments


def make_scan(orders, length, seed=5):
    """Random permutations and their inverses; `None` of them: tokens as they stand."""
    if orders is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(length, generator=generator) for _ in range(orders)])
    inverse = torch.empty_like(order).scatter_(1, order, torch.arange(length).expand(orders, length))
    return order, inverse


def order_of(scan):
    return None if scan is None else scan[0]


def relative_rms(actual, expected):
    return ((actual.double() - expected.double()).pow(2).mean() / expected.double().pow(2).mean()).sqrt().item()


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients against the loop
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("length", [1, 63, 65, 257])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_match_the_loop(mode, decay, length, normalize, dtype, tolerance):
    expected = expected_with_gradients(decay, length, False, False, normalize)
    actual = with_gradients(
        lambda *x: lion_attention(*x, mode=mode, chunk_size=16, normalize=normalize),
        make_inputs(decay, length=length, dtype=dtype),
    )
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == dtype
        scale = max(1.0, y.abs().max().item())
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance / 10 * scale)


@pytest.mark.parametrize("kind", ["plain", "segments", "forward", "one order", "two orders"])
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("decay", ["fixed", "selective"])
@pytest.mark.parametrize("mode", ["parallel", "chunk"])
def test_tiles_match_the_loop(mode, decay, normalize, kind, monkeypatch):
    """At inference the batch, and in the chunk form the heads too, are taken some at a time."""
    monkeypatch.setattr(attention_lion, "_TILE", 2 * 20)  # two heads of twenty tokens, or less than one row
    orders = {"one order": 1, "two orders": 2}.get(kind)
    inputs, scan = make_inputs(decay, batch=4, orders=orders), make_scan(orders, 20)
    mask, segments = make_mask(20, batch=4), make_segments(20, batch=4) if kind == "segments" else None
    options = {"key_mask": mask, "segment_ids": segments, "normalize": normalize}
    options["direction"] = "forward" if kind == "forward" else "both"
    with torch.no_grad():
        actual = lion_attention(*inputs, mode=mode, chunk_size=8, scan=scan, **options)
    torch.testing.assert_close(actual, loop_attention(*inputs, order=order_of(scan), **options), rtol=0, atol=1e-10)


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("masked, segmented", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_masks_and_segments_match_the_loop(mode, decay, chunk_size, masked, segmented, normalize):
    length = 61
    expected = expected_with_gradients(decay, length, masked, segmented, normalize)
    mask, segments = make_mask(length) if masked else None, make_segments(length) if segmented else None
    actual = with_gradients(
        lambda *x: lion_attention(
            *x, mode=mode, chunk_size=chunk_size, key_mask=mask, segment_ids=segments, normalize=normalize
        ),
        make_inputs(decay, length=length),
    )
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [130, 1100])
@pytest.mark.parametrize("decay", ["fixed", "selective"])
def test_states_carried_over_several_levels_of_groups_match_the_loop(decay, length):
    inputs = make_inputs(decay, batch=1, heads=2, length=length, head_dim=3, value_dim=2)
    segments = (torch.arange(length) > length // 3).long()[None]
    with torch.no_grad():
        actual = lion_attention(*inputs, mode="chunk", chunk_size=2)
        torch.testing.assert_close(actual, loop_attention(*inputs), rtol=1e-10, atol=1e-12)
        separate = [
            lion_attention(*(x if x.ndim == 1 else x[:, :, part] for x in inputs), mode="chunk", chunk_size=2)
            for part in (segments[0] == 0, segments[0] == 1)
        ]
        joint = lion_attention(*inputs, mode="chunk", chunk_size=2, segment_ids=segments)
    torch.testing.assert_close(joint, torch.cat(separate, 2), rtol=1e-10, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_mask_and_chunk_size_matches_the_loop(data):
    batch, heads = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(1, 3), "heads")
    length, head_dim = data.draw(st.integers(1, 24), "length"), data.draw(st.integers(1, 4), "head_dim")
    value_dim, chunk_size = data.draw(st.integers(1, 4), "value_dim"), data.draw(st.integers(1, 30), "chunk_size")
    mode, decay = data.draw(st.sampled_from(MODES), "mode"), data.draw(st.sampled_from(DECAYS), "decay")
    rows = st.lists(st.lists(st.integers(0, 2), min_size=length, max_size=length), min_size=batch, max_size=batch)
    mask = torch.tensor(data.draw(rows, "mask")) if data.draw(st.booleans()) else None
    segments = torch.tensor(data.draw(rows, "segments")) if data.draw(st.booleans()) else None
    options = {"key_mask": mask, "segment_ids": segments, "normalize": data.draw(st.booleans(), "normalize")}
    inputs = make_inputs(
        decay, batch=batch, heads=heads, length=length, head_dim=head_dim, value_dim=value_dim, seed=length
    )
    actual = lion_attention(*inputs, mode=mode, chunk_size=chunk_size, **options)
    torch.testing.assert_close(actual, loop_attention(*inputs, **options), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode, decay):
    inputs = make_inputs(decay, batch=1, heads=2, length=7, head_dim=2, value_dim=2)
    inputs = tuple(x if x is None else x.requires_grad_() for x in inputs)
    for normalize in (False, True):
        assert torch.autograd.gradcheck(
            lambda *x, normalize=normalize: lion_attention(*x, mode=mode, chunk_size=3, normalize=normalize), inputs
        )


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_output_can_be_changed_in_place(mode, decay):
    inputs = make_inputs(decay)
    changed = with_gradients(lambda *x: lion_attention(*x, mode=mode).transpose(1, 2).mul_(2.0), inputs)
    expected = with_gradients(lambda *x: loop_attention(*x).transpose(1, 2) * 2.0, inputs)
    for ours, theirs in zip(changed, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("normalize", [False, True])
def test_parallel_form_can_be_differentiated_twice(decay, normalize):
    inputs = [
        x.requires_grad_() for x in make_inputs(decay, batch=1, length=5, head_dim=2, value_dim=2) if x is not None
    ]
    assert torch.autograd.gradgradcheck(lambda *x: lion_attention(*x, normalize=normalize), inputs)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (0, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_some_arguments_only(mode, needed):
    inputs = make_inputs("selective", length=9)
    expected = with_gradients(loop_attention, inputs)[1:]
    leaves = [x.clone().requires_grad_(i in needed) for i, x in enumerate(inputs)]
    weights = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (lion_attention(*leaves, mode=mode) * weights).sum().backward()
    for i, x in enumerate(leaves):
        if i in needed:
            torch.testing.assert_close(x.grad, expected[i], rtol=1e-10, atol=1e-12)
        else:
            assert x.grad is None


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_reversing_the_sequence_reverses_the_output(mode, decay):
    inputs = make_inputs(decay, length=37)
    mask = make_mask(37)
    backwards = [x if x is None or x.ndim == 1 else x.flip(2) for x in inputs]
    forward = lion_attention(*inputs, mode=mode, chunk_size=8, key_mask=mask)
    reverse = lion_attention(*backwards, mode=mode, chunk_size=8, key_mask=mask.flip(1))
    torch.testing.assert_close(reverse.flip(2), forward, rtol=1e-13, atol=1e-13)


# ---------------------------------------------------------------------------------------------------------------------
# Scan orders, directions, the diagonal
# ---------------------------------------------------------------------------------------------------------------------

ORDERS = (None, 1, 2, 3)
DIRECTIONS = ("both", "forward", "backward")
DIAGONALS = ("balanced", "doubled")

each_orders = pytest.mark.parametrize("orders", ORDERS, ids=lambda orders: f"{orders} orders")


@functools.cache
def expected_in_order(decay, orders, length, masked, normalize, direction="both", diagonal="balanced"):
    mask = make_mask(length) if masked else None
    options = {"normalize": normalize, "direction": direction, "diagonal": diagonal, "key_mask": mask}
    order = order_of(make_scan(orders, length))
    return with_gradients(
        lambda *x: loop_attention(*x, order=order, **options), make_inputs(decay, length=length, orders=orders)
    )


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("length", [1, 15, 63, 65, 197])
@pytest.mark.parametrize("orders", [1, 2], ids=["one order", "two orders"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_over_scan_orders_match_the_loop(
    mode, decay, orders, length, normalize, dtype, tolerance
):
    expected = expected_in_order(decay, orders, length, False, normalize)
    scan = make_scan(orders, length)
    actual = with_gradients(
        lambda *x: lion_attention(*x, mode=mode, chunk_size=16, normalize=normalize, scan=scan),
        make_inputs(decay, length=length, orders=orders, dtype=dtype),
    )
    assert len(actual) == len(expected) == (4 if decay == "none" else 5)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == dtype and x.shape == y.shape
        scale = max(1.0, y.abs().max().item())
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance / 10 * scale)


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@each_orders
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_directions_and_diagonals_match_the_loop(mode, decay, orders, direction, diagonal):
    length = 61
    scan = make_scan(orders, length)
    for masked, normalize in ((False, False), (False, True), (True, False), (True, True)):
        expected = expected_in_order(decay, orders, length, masked, normalize, direction, diagonal)
        mask = make_mask(length) if masked else None
        options = {"normalize": normalize, "direction": direction, "diagonal": diagonal, "key_mask": mask}
        actual = with_gradients(
            lambda *x, options=options: lion_attention(*x, mode=mode, chunk_size=7, scan=scan, **options),
            make_inputs(decay, length=length, orders=orders),
        )
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_directions_inside_segments_match_the_loop(mode, decay, direction):
    options = {"segment_ids": make_segments(61), "key_mask": make_mask(61), "direction": direction}
    inputs = make_inputs(decay, length=61)
    expected = with_gradients(lambda *x: loop_attention(*x, **options), inputs)
    actual = with_gradients(lambda *x: lion_attention(*x, mode=mode, chunk_size=7, **options), inputs)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_scan_direction_and_diagonal_matches_the_loop(data):
    batch, heads = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(1, 3), "heads")
    length, chunk_size = data.draw(st.integers(1, 24), "length"), data.draw(st.integers(1, 30), "chunk_size")
    mode, decay = data.draw(st.sampled_from(MODES), "mode"), data.draw(st.sampled_from(DECAYS), "decay")
    orders = data.draw(st.sampled_from([None, 1, 2, 3]), "orders")
    rows = st.lists(st.lists(st.integers(0, 2), min_size=length, max_size=length), min_size=batch, max_size=batch)
    options = {
        "key_mask": torch.tensor(data.draw(rows, "mask")) if data.draw(st.booleans()) else None,
        "normalize": data.draw(st.booleans(), "normalize"),
        "direction": data.draw(st.sampled_from(DIRECTIONS), "direction"),
        "diagonal": data.draw(st.sampled_from(DIAGONALS), "diagonal"),
    }
    if orders is None and data.draw(st.booleans()):
        options["segment_ids"] = torch.tensor(data.draw(rows, "segments"))
    inputs = make_inputs(decay, batch=batch, heads=heads, length=length, seed=length, orders=orders)
    scan = make_scan(orders, length, seed=data.draw(st.integers(0, 99), "permutation"))
    expected = with_gradients(lambda *x: loop_attention(*x, order=order_of(scan), **options), inputs)
    actual = with_gradients(
        lambda *x: lion_attention(*x, mode=mode, chunk_size=chunk_size, scan=scan, **options), inputs
    )
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck_over_scan_orders(mode, decay, direction):
    inputs = make_inputs(decay, batch=1, heads=2, length=6, head_dim=2, value_dim=2, orders=2)
    inputs = tuple(x if x is None else x.requires_grad_() for x in inputs)
    options = {"mode": mode, "chunk_size": 4, "scan": make_scan(2, 6), "direction": direction}
    assert torch.autograd.gradcheck(
        lambda *x: lion_attention(*x, normalize=True, diagonal="doubled", **options), inputs
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_one_order_is_permuting_the_tokens_and_the_output_back(mode, decay, direction):
    order, inverse = make_scan(1, 70)
    q, k, v, log_decay = make_inputs(decay, length=70, orders=1)
    options = {"mode": mode, "chunk_size": 16, "direction": direction, "normalize": True}
    actual = lion_attention(q, k, v, log_decay, scan=(order, inverse), **options)
    decays = None if decay == "none" else log_decay[0] if decay == "fixed" else log_decay[0][..., order[0]]
    permuted = lion_attention(*(x[:, :, order[0]] for x in (q, k, v)), decays, **options)
    torch.testing.assert_close(actual, permuted[:, :, inverse[0]], rtol=1e-12, atol=1e-12)
    if decay != "none" or direction != "both":  # otherwise the order is of no account
        assert (
            relative_rms(lion_attention(q, k, v, None if decays is None else log_decay[0], **options), actual) > 0.01
        )


@pytest.mark.parametrize("decay", ["fixed", "selective"])
@pytest.mark.parametrize("mode", MODES)
def test_walking_an_order_from_its_other_end_exchanges_the_directions(mode, decay):
    order, inverse = make_scan(2, 37)
    backwards = order.flip(1), 36 - inverse
    inputs = make_inputs(decay, length=37, orders=2)
    for direction, other in (("both", "both"), ("forward", "backward"), ("backward", "forward")):
        expected = lion_attention(*inputs, mode=mode, scan=(order, inverse), direction=direction, normalize=True)
        actual = lion_attention(*inputs, mode=mode, scan=backwards, direction=other, normalize=True)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_orders_are_averaged_before_rows_are_divided(mode):
    """Two tokens: under the first order's decay of ½ they see each other by half, under the second's of 1 in full."""
    q = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    scan = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1], [1, 0]])
    log_decay = torch.tensor([[0.5], [1.0]], dtype=torch.float64).log()
    v = torch.eye(2, dtype=torch.float64)[None, None]
    output = lion_attention(q, q, v, log_decay, mode=mode, scan=scan)
    torch.testing.assert_close(output[0, 0], torch.tensor([[1, 0.75], [0.75, 1]], dtype=torch.float64))
    output = lion_attention(q, q, v, log_decay, mode=mode, scan=scan, normalize=True, eps=1e-12)
    torch.testing.assert_close(output[0, 0], torch.tensor([[4 / 7, 3 / 7], [3 / 7, 4 / 7]], dtype=torch.float64))


@pytest.mark.parametrize(
    "direction, diagonal, expected",
    [
        ("forward", "balanced", [[1, 0, 0], [0.5, 1, 0], [0.125, 0.25, 1]]),
        ("backward", "balanced", [[1, 0.25, 0.03125], [0, 1, 0.125], [0, 0, 1]]),
        ("both", "doubled", [[2, 0.25, 0.03125], [0.5, 2, 0.125], [0.125, 0.25, 2]]),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_direction_and_diagonal_by_hand(mode, direction, diagonal, expected):
    """Three tokens with decays ½, ¼ and ⅛."""
    q, v = torch.ones(1, 1, 3, 1, dtype=torch.float64), torch.eye(3, dtype=torch.float64)[None, None]
    log_decay = torch.tensor([[[0.5, 0.25, 0.125]]], dtype=torch.float64).log()
    options = {"mode": mode, "chunk_size": 2, "direction": direction, "diagonal": diagonal}
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(lion_attention(q, q, v, log_decay, **options)[0, 0], expected)
    scan = torch.tensor([[2, 1, 0]]), torch.tensor([[2, 1, 0]])
    flipped = lion_attention(q, q, v, log_decay.flip(-1)[None], scan=scan, **options)
    torch.testing.assert_close(flipped[0, 0], expected.flip(0, 1))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@each_orders
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_comes_against_the_only_direction(mode, decay, orders, direction):
    """Not even from a value beyond all bounds: what lies ahead is not multiplied by something small, it is absent."""
    length = 70
    q, k, v, log_decay = make_inputs(decay, length=length, orders=orders, dtype=torch.float32)
    orders = orders and 1  # the mean over several orders sees all
    log_decay = log_decay if orders is None or decay == "none" else log_decay[:1]
    scan = make_scan(orders, length)
    tokens = torch.arange(length) if scan is None else scan[0][0]
    seen, unseen = (tokens[:40], tokens[40:]) if direction == "forward" else (tokens[40:], tokens[:40])
    options = {"mode": mode, "chunk_size": 16, "scan": scan, "direction": direction, "normalize": True}
    expected = lion_attention(q, k, v, log_decay, **options)[:, :, seen]
    k[:, :, unseen], v[:, :, unseen] = 1e6, -1e30
    torch.testing.assert_close(lion_attention(q, k, v, log_decay, **options)[:, :, seen], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decay", DECAYS)
def test_nothing_of_a_masked_token_leaks_over_scan_orders(mode, decay):
    mask, scan = make_mask(20), make_scan(2, 20)
    q, k, v, log_decay = make_inputs(decay, orders=2)
    expected = lion_attention(q, k, v, log_decay, mode=mode, key_mask=mask, scan=scan)
    masked = ~mask[:, None].expand(2, 3, 20)
    k[masked], v[masked] = torch.nan, torch.inf
    if decay == "selective":
        log_decay[:, masked] = torch.nan
    assert torch.equal(lion_attention(q, k, v, log_decay, mode=mode, key_mask=mask, scan=scan), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Cases from the field
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["fixed", "selective"])
@pytest.mark.parametrize("mode", MODES)
def test_f1_strong_decays_do_not_overflow(mode, decay):
    q, k, v, _ = make_inputs("none", length=256)
    log_decay = torch.full((3,) if decay == "fixed" else (2, 3, 256), -5.0)
    actual = lion_attention(q.float(), k.float(), v.float(), log_decay, mode=mode)
    torch.testing.assert_close(actual.double(), loop_attention(q, k, v, log_decay), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_size", [1, 16, 64, 83, 4096])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1334])
def test_f2_ragged_tails(length, chunk_size, poisoned_memory):
    inputs = make_inputs("selective", batch=1, length=length, dtype=torch.float32)
    chunk = lion_attention(*inputs, mode="chunk", chunk_size=chunk_size)
    torch.testing.assert_close(chunk, lion_attention(*inputs, mode="parallel"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("log_decay", [None, torch.zeros(1), torch.zeros(1, 1, 70_000)], ids=DECAYS)
def test_f3_sums_over_long_sequences_keep_their_digits(log_decay, dtype):
    ones = torch.ones(1, 1, 70_000, 4, dtype=dtype)
    output = lion_attention(ones, ones, ones, log_decay, mode="chunk", normalize=True)
    assert output.dtype == dtype
    assert (output.float() - 1).abs().max() <= 0.01


@pytest.mark.parametrize("factor", [1e-7, 1e4])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_f4_the_forms_share_scale_and_epsilon(decay, normalize, factor):
    q, k, v, log_decay = make_inputs(decay, length=70)
    expected = loop_attention(q * factor, k, v, log_decay, normalize=normalize)
    for mode in MODES:
        inputs = [x if x is None else x.float() for x in (q * factor, k, v, log_decay)]
        actual = lion_attention(*inputs, mode=mode, chunk_size=16, normalize=normalize)
        assert relative_rms(actual, expected) < 1e-4
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("padding", [3, 70])
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_f6_padding_on_the_left_changes_no_real_token(mode, decay, heads, length, padding):
    inputs = make_inputs(decay, batch=1, heads=heads, length=length, dtype=torch.float32)
    padded = [x if x is None or x.ndim == 1 else torch.cat([garbage(x, padding), x], 2) for x in inputs]
    mask = torch.cat([torch.zeros(1, padding), torch.ones(1, length)], 1)
    expected = lion_attention(*inputs, mode=mode, normalize=True)
    actual = lion_attention(*padded, mode=mode, normalize=True, key_mask=mask)[:, :, padding:]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def garbage(like, length):
    """What may lie in padding: large numbers; negative, so that it can be log-decays too."""
    return torch.full((*like.shape[:2], length, *like.shape[3:]), -1e4, dtype=like.dtype)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_f7_an_all_masked_row_is_zero_and_harms_no_other(mode, decay, normalize):
    inputs = make_inputs(decay, length=12)
    mask = torch.tensor([[1] * 12, [0] * 12])

    def three_layers(q, k, v, log_decay=None, key_mask=mask):
        for _ in range(3):
            v = lion_attention(q, k, v, log_decay, mode=mode, normalize=normalize, key_mask=key_mask)
        return v

    alone = [x if x is None or x.ndim == 1 else x[:1] for x in inputs]
    results = with_gradients(three_layers, inputs)
    assert all(torch.isfinite(x).all() for x in results)
    assert (results[0][1] == 0).all()
    torch.testing.assert_close(results[0][:1], three_layers(*alone, key_mask=None), rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------------------------------------------------------
# Masks and segments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float16])
def test_masks_of_any_dtype_mean_the_same(dtype):
    inputs, mask = make_inputs("selective"), make_mask(20)
    for mode in MODES:
        expected = lion_attention(*inputs, mode=mode, key_mask=mask)
        assert torch.equal(lion_attention(*inputs, mode=mode, key_mask=mask.to(dtype)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_masked_token_leaks_not_even_nan(mode):
    inputs, mask = make_inputs("selective"), make_mask(20)
    expected = lion_attention(*inputs, mode=mode, key_mask=mask)
    q, k, v, log_decay = (x.clone() for x in inputs)
    masked = ~mask[:, None].expand(2, 3, 20)
    k[masked], v[masked], log_decay[masked] = torch.nan, torch.inf, torch.nan
    assert torch.equal(lion_attention(q, k, v, log_decay, mode=mode, key_mask=mask), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_masked_token_counts_as_a_step_under_fixed_decay_only(mode):
    """Two tokens with a masked one between: they are two steps apart where decays are fixed, one where selective."""
    ones, mask = torch.ones(1, 1, 3, 1, dtype=torch.float64), torch.tensor([[1, 0, 1]])
    v = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).view(1, 1, 3, 1)
    half = torch.tensor(0.5, dtype=torch.float64).log()
    fixed = lion_attention(ones, ones, v, half.view(1), mode=mode, key_mask=mask)
    selective = lion_attention(ones, ones, v, half.expand(1, 1, 3), mode=mode, key_mask=mask)
    assert fixed[0, 0, 0, 0].item() == pytest.approx(0.25)
    assert selective[0, 0, 0, 0].item() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", MODES)
def test_the_keys_own_gate_counts_and_the_querys_does_not(mode):
    """Three tokens with gates a, b, c, worked by hand: rows (1, b, bc), (a, 1, c), (ab, b, 1)."""
    a, b, c = 0.5, 0.25, 0.125
    q = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    log_decay = torch.tensor([[[a, b, c]]], dtype=torch.float64).log()
    output = lion_attention(q, q, torch.eye(3, dtype=torch.float64)[None, None], log_decay, mode=mode, chunk_size=2)
    expected = torch.tensor([[1, b, b * c], [a, 1, c], [a * b, b, 1]], dtype=torch.float64)
    torch.testing.assert_close(output[0, 0], expected)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_segments_are_as_if_run_alone(mode, decay):
    inputs = make_inputs(decay, batch=1, length=150, dtype=torch.float32)
    lengths = [1, 70, 64, 15]
    segments = torch.repeat_interleave(torch.tensor([4, 2, 9, 4]), torch.tensor(lengths))[None]
    joint = lion_attention(*inputs, mode=mode, segment_ids=segments, normalize=True)
    parts = [x if x is None or x.ndim == 1 else x.split(lengths, 2) for x in inputs]
    for i, expected_part in enumerate(joint.split(lengths, 2)):
        alone = [x if x is None or torch.is_tensor(x) else x[i] for x in parts]
        torch.testing.assert_close(
            lion_attention(*alone, mode=mode, normalize=True), expected_part, rtol=1e-5, atol=1e-5
        )


# ---------------------------------------------------------------------------------------------------------------------
# Precision
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_half_precision(mode, decay, dtype, normalize):
    inputs = make_inputs(decay, length=257)
    output = lion_attention(*(x if x is None else x.to(dtype) for x in inputs), mode=mode, normalize=normalize)
    assert output.dtype == dtype
    assert relative_rms(output, loop_attention(*inputs, normalize=normalize)) <= 1e-2


@functools.cache
def make_half_inputs(decay, length, normalize):
    """Inputs that float16 and bfloat16 both hold exactly, and their output in float64."""
    q, k, v, log_decay = make_inputs("fixed" if decay == "slow" else decay, batch=1, length=length, head_dim=16)
    if decay == "slow":
        log_decay = torch.full_like(log_decay, -1e-3)
    q, k, v = (x.bfloat16().double() for x in (q, k, v))
    return q, k, v, log_decay, recurrent_attention(q, k, v, log_decay, normalize)


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize(
    "mode, length",
    [(mode, length) for length in (512, 4096, 65536) for mode in MODES if (mode, length) != ("parallel", 65536)],
)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", [*DECAYS, "slow"])
def test_half_precision_over_lengths(mode, length, decay, dtype, most, normalize):
    *inputs, log_decay, expected = make_half_inputs(decay, length, normalize)
    output = lion_attention(*(x.to(dtype) for x in inputs), log_decay, mode=mode, normalize=normalize)
    assert relative_rms(output, expected) <= most


def recurrent_attention(q, k, v, log_decay, normalize, eps=1e-6):
    """The definition in O(length): a loop over the tokens from each end."""
    gates = torch.zeros(q.shape[:3], dtype=q.dtype) if log_decay is None else log_decay
    decays = (gates if gates.ndim == 3 else gates[None, :, None].expand(q.shape[:3])).exp()
    if normalize:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    sums = (q * k).sum(-1, keepdim=True) * v
    for tokens in (range(q.shape[2]), reversed(range(q.shape[2]))):
        state = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype)
        for i in tokens:
            sums[:, :, i] += (q[:, :, i, None] @ state)[:, :, 0]
            state = (state + k[:, :, i, :, None] * v[:, :, i, None]) * decays[:, :, i, None, None]
    return sums[..., :-1] / (sums[..., -1:] + eps) if normalize else sums


@pytest.mark.parametrize("direction, diagonal", [("both", "balanced"), ("forward", "doubled")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_over_scan_orders(mode, decay, dtype, direction, diagonal):
    inputs, scan = make_inputs(decay, length=197, orders=2), make_scan(2, 197)
    options = {"normalize": True, "direction": direction, "diagonal": diagonal}
    output = lion_attention(*(x if x is None else x.to(dtype) for x in inputs), mode=mode, scan=scan, **options)
    assert output.dtype == dtype
    assert relative_rms(output, loop_attention(*inputs, order=scan[0], **options)) <= 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_autocast_changes_nothing(mode):
    inputs = make_inputs("selective", length=70, dtype=torch.float32)
    expected = with_gradients(lambda *x: lion_attention(*x, mode=mode), inputs)

    def under_autocast(*x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return lion_attention(*x, mode=mode)

    actual = with_gradients(under_autocast, inputs)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("mode", ["parallel", "chunk"])
@pytest.mark.parametrize("chunk_size", [64, 2048])
def test_weak_gates_after_strong_ones_keep_their_digits(mode, chunk_size):
    """A cumulative sum over the strong half would leave the weak half without digits in float32."""
    q, k, v, log_decay = make_inputs("selective", batch=1, heads=1, length=3000, head_dim=3)
    log_decay = torch.where(torch.arange(3000) < 1500, -8 - log_decay.abs(), log_decay * 0.05)
    actual = lion_attention(*(x.float() for x in (q, k, v, log_decay)), mode=mode, chunk_size=chunk_size)
    assert relative_rms(actual, loop_attention(q, k, v, log_decay)) < 1e-5


PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.bmm.out, torch.ops.aten.baddbmm_.default)


class Recorder(TorchDispatchMode):
    """Sizes of all results, products counted, and denormal numbers among results that are not views or unwritten."""

    def __init__(self):
        super().__init__()
        self.largest, self.elements, self.denormal, self.products = 0, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.products += function in PRODUCTS
        if not function.is_view and "empty" not in str(function):
            for x in torch.utils._pytree.tree_leaves(result):
                if torch.is_tensor(x) and x.is_floating_point():
                    self.largest, self.elements = max(self.largest, x.numel()), self.elements + x.numel()
                    self.denormal += ((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum().item()
        return result


def record(function):
    with Recorder() as recorder:
        function()
    return recorder


@pytest.mark.parametrize("decay", ["fixed", "selective"])
@pytest.mark.parametrize("strength", [-0.3, -1.4, -5.0])
@pytest.mark.parametrize("padding", [0, 600])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_passes_through_denormal_numbers(mode, padding, strength, decay):
    """Forward and backward, with a tail of padding in which a state could fade away step by step."""
    length = 700
    q, k, v, _ = make_inputs("none", batch=1, heads=1, length=length, dtype=torch.float32)
    log_decay = torch.full((1,) if decay == "fixed" else (1, 1, length), strength)
    mask = (torch.arange(length) < length - padding)[None] if padding else None
    seen = record(
        lambda: with_gradients(lambda *x: lion_attention(*x, mode=mode, key_mask=mask), (q, k, v, log_decay))
    )
    # The recurrence cleans its states once a tile of tokens: what fades in between may pass through, once.
    assert seen.denormal <= (1e-3 * seen.elements if mode == "rnn" else 0)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("strength", [-0.3, -1.4, -5.0])
@pytest.mark.parametrize("decay", ["fixed", "selective"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_passes_through_denormal_numbers_over_scan_orders(mode, decay, strength, direction):
    length = 500
    q, k, v, _ = make_inputs("none", batch=1, heads=1, length=length, dtype=torch.float32)
    log_decay = torch.full((2, 1) if decay == "fixed" else (2, 1, 1, length), strength)
    options = {"mode": mode, "scan": make_scan(2, length), "direction": direction, "normalize": True}
    options["key_mask"] = (torch.arange(length) < 100)[None]
    seen = record(lambda: with_gradients(lambda *x: lion_attention(*x, **options), (q, k, v, log_decay)))
    assert seen.denormal <= (1e-3 * seen.elements if mode == "rnn" else 0)


@pytest.mark.parametrize("strength", [-0.8, -5.0])
@pytest.mark.parametrize("mode", ["parallel", "chunk"])
def test_small_gradients_are_no_denormal_numbers(mode, strength):
    """Those of a loss that is the mean over many tokens are; each decay they meet makes them smaller."""
    q, k, v, _ = make_inputs("none", batch=1, heads=1, length=200, dtype=torch.float32)
    inputs = [q, k, v, torch.full((1, 1, 200), strength)]
    seen = record(lambda: with_gradients(lambda *x: 1e-9 * lion_attention(*x, mode=mode), inputs))
    assert seen.denormal == 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_one_direction_passes_through_no_denormal_numbers(mode, decay, direction):
    inputs = make_inputs(decay, batch=1, heads=3, length=300, dtype=torch.float32)
    seen = record(lambda: with_gradients(lambda *x: lion_attention(*x, mode=mode, direction=direction), inputs))
    assert seen.denormal <= (1e-3 * seen.elements if mode == "rnn" else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Cost
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", ["chunk", "rnn"])
def test_memory_and_work_are_linear_in_length(mode, decay, training):
    def run(length):
        inputs = make_inputs(decay, batch=1, heads=2, length=length, head_dim=4)
        function = functools.partial(lion_attention, mode=mode, chunk_size=16)
        return record(lambda: with_gradients(function, inputs) if training else function(*inputs))

    short, long = run(1024), run(4096)
    assert long.largest <= 4.1 * short.largest
    assert long.elements <= 4.2 * short.elements


@pytest.mark.parametrize("direction", ["both", "backward"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", ["chunk", "rnn"])
def test_memory_and_work_are_linear_in_length_over_scan_orders(mode, decay, training, direction):
    def run(length):
        inputs = make_inputs(decay, batch=1, heads=1, length=length, head_dim=4, orders=2)
        options = {"mode": mode, "chunk_size": 16, "scan": make_scan(2, length), "direction": direction}
        function = functools.partial(lion_attention, normalize=True, **options)
        return record(lambda: with_gradients(function, inputs) if training else function(*inputs))

    short, long = run(1280), run(5120)  # several groups of blocks both
    assert long.largest <= 4.1 * short.largest
    assert long.elements <= 4.2 * short.elements


@each_orders
@pytest.mark.parametrize("length", [50, 150])
@pytest.mark.parametrize("decay", DECAYS)
def test_parallel_form_computes_scores_once_for_all_orders(decay, length, orders):
    inputs, scan = make_inputs(decay, length=length, orders=orders), make_scan(orders, length)
    seen = record(lambda: lion_attention(*inputs, mode="parallel", scan=scan, normalize=True))
    assert seen.products == 2  # scores, and scores × values


def test_recurrence_walks_all_orders_at_once():
    inputs, scan = make_inputs("selective", length=64, orders=3), make_scan(3, 64)
    seen = record(lambda: lion_attention(*inputs, mode="rnn", scan=scan))
    assert seen.products == 64  # one read a step


def test_recurrence_keeps_no_state_per_token_and_walks_once():
    length, head_dim, value_dim = 512, 8, 8
    inputs = make_inputs("selective", batch=1, heads=2, length=length, head_dim=head_dim, value_dim=value_dim)
    seen = record(lambda: lion_attention(*inputs, mode="rnn"))
    assert seen.products == length  # one read a step, for both directions and all heads together
    assert seen.largest == 2 * length * max(
        head_dim, value_dim
    )  # an input, and far from length × head_dim × value_dim
    del inputs[3]
    training = record(lambda: with_gradients(lambda *x: lion_attention(*x, mode="rnn"), inputs))
    assert training.largest < length * head_dim * value_dim


def test_chunk_form_shares_scores_between_directions():
    inputs = make_inputs("selective", length=64)
    seen = record(lambda: lion_attention(*inputs, mode="chunk", chunk_size=16))
    # For both directions: scores, scores × values. For each: states handed on, received and read.
    assert seen.products == 2 + 2 * 3


@pytest.mark.parametrize(
    "has_decay, longest", [(True, PARALLEL_MAX_LENGTH), (False, PARALLEL_MAX_LENGTH_WITHOUT_DECAY)]
)
def test_auto_is_parallel_up_to_the_crossover(has_decay, longest):
    assert choose_mode(1, has_decay) == choose_mode(longest, has_decay) == "parallel"
    assert choose_mode(longest + 1, has_decay) == "chunk"


# ---------------------------------------------------------------------------------------------------------------------
# Transforms of torch.func
# ---------------------------------------------------------------------------------------------------------------------

# Of operations for which torch has no rule of its own.
slowly = pytest.mark.filterwarnings("ignore:There is a performance drop")


@slowly
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("mode", MODES)
def test_vmap_is_a_loop_over_calls_in_values_and_gradients(mode, decay, normalize):
    calls = [make_inputs(decay, length=70, seed=seed) for seed in range(3)]
    inputs = [None if xs[0] is None else torch.stack(xs) for xs in zip(*calls, strict=True)]
    masks, segments = (torch.stack([x, x.flip(0), x.flip(1)]) for x in (make_mask(70).double(), make_segments(70)))

    def attend(mask, segments, *inputs):
        options = {"key_mask": mask, "segment_ids": segments, "normalize": normalize}
        return lion_attention(*inputs, mode=mode, chunk_size=16, **options)

    def vmapped(*inputs):
        return torch.vmap(attend)(masks, segments, *(x for x in inputs if x is not None))

    def looped(*inputs):
        outputs = []
        for i in range(3):
            options = {"key_mask": masks[i].bool(), "segment_ids": segments[i], "normalize": normalize}
            outputs.append(loop_attention(*(x if x is None else x[i] for x in inputs), **options))
        return torch.stack(outputs)

    for ours, expected in zip(with_gradients(vmapped, inputs), with_gradients(looped, inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@slowly
@pytest.mark.parametrize("mode", MODES)
def test_vmap_over_decays_alone(mode):
    q, k, v, log_decay = make_inputs("fixed", length=70)
    several = torch.stack([log_decay, 3 * log_decay])
    actual = torch.vmap(lambda g: lion_attention(q, k, v, g, mode=mode, chunk_size=16))(several)
    for output, one in zip(actual, several, strict=True):
        torch.testing.assert_close(output, loop_attention(q, k, v, one), rtol=1e-10, atol=1e-10)


@slowly
@pytest.mark.parametrize("mapped", [(0, 1, 2, 3), (0, 1, 2), (0,), (1,), (2,), (3,)])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_for_each_example(mode, mapped):
    """As `torch.func.vmap(grad(…))` takes them, of examples that differ in some arguments, in gates or not."""
    examples = [make_inputs("selective", batch=1, length=40, seed=seed) for seed in (0, 1)]
    inputs = [torch.stack(pair) if i in mapped else pair[0] for i, pair in enumerate(zip(*examples, strict=True))]

    def loss(*inputs):
        return lion_attention(*inputs, mode=mode, chunk_size=16).square().sum()

    in_dims = tuple(0 if i in mapped else None for i in range(4))
    actual = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims)(*inputs)
    for example in range(2):
        leaves = [x[example] if i in mapped else x for i, x in enumerate(inputs)]
        leaves = [x.clone().requires_grad_() for x in leaves]
        loop_attention(*leaves).square().sum().backward()
        for ours, x in zip(actual, leaves, strict=True):
            torch.testing.assert_close(ours[example], x.grad, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# Attention matrix, errors
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_weights_are_the_effective_matrix(decay, normalize):
    inputs, mask, segments = make_inputs(decay), make_mask(20), make_segments(20)
    output, weights = lion_attention(
        *inputs, key_mask=mask, segment_ids=segments, normalize=normalize, return_weights=True
    )
    expected = loop_weights(inputs[0], inputs[1], inputs[3], key_mask=mask, segment_ids=segments)
    if normalize:
        expected = expected / (expected.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(weights @ inputs[2], output)


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_weights_are_the_effective_matrix_over_scan_orders(decay, direction, diagonal):
    inputs, mask, scan = make_inputs(decay, orders=2), make_mask(20), make_scan(2, 20)
    options = {"key_mask": mask, "direction": direction, "diagonal": diagonal}
    output, weights = lion_attention(*inputs, scan=scan, normalize=True, return_weights=True, **options)
    expected = loop_weights(inputs[0], inputs[1], inputs[3], order=scan[0], **options)
    torch.testing.assert_close(weights, expected / (expected.sum(-1, keepdim=True) + 1e-6))
    torch.testing.assert_close(weights @ inputs[2], output)


@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_of_the_output_reach_the_weights(normalize):
    q, k, v, log_decay = make_inputs("selective")
    output, weights = lion_attention(q.requires_grad_(), k, v, log_decay, normalize=normalize, return_weights=True)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=output.dtype)
    (gradient,) = torch.autograd.grad(output, weights, upstream)
    torch.testing.assert_close(gradient, upstream @ v.mT)


def test_dropout_drops_weights_after_normalisation():
    inputs = make_inputs("selective", length=40)
    _, weights = lion_attention(*inputs, normalize=True, return_weights=True)
    torch.manual_seed(3)
    output = lion_attention(*inputs, normalize=True, dropout_p=0.4)
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(weights, 0.4) @ inputs[2]
    torch.testing.assert_close(output, expected)
    assert not torch.allclose(output, weights @ inputs[2])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"mode": "fast"}, ["`mode`", "'fast'", "'parallel'", "'chunk'", "'rnn'"]),
        ({"chunk_size": 0}, ["`chunk_size`", "at least 1", "0"]),
        ({"chunk_size": 2.5}, ["`chunk_size`", "an integer", "2.5"]),
        ({"eps": 0.0}, ["`eps`", "greater than 0", "0.0"]),
        ({"log_decay": torch.full((3,), 0.5)}, ["`log_decay`", "≤ 0", "0.5"]),
        ({"log_decay": torch.full((2, 3, 20), 1e-3)}, ["`log_decay`", "≤ 0", "0.001"]),
        ({"log_decay": torch.zeros(2)}, ["`log_decay`", "(3,)", "(2, 3, 20)", "(2,)"]),
        ({"log_decay": torch.zeros(2, 3, 19)}, ["`log_decay`", "(2, 3, 20)", "(2, 3, 19)"]),
        ({"q": torch.zeros(3, 20, 5)}, ["`q`", "(batch, heads, length, head_dim)", "(3, 20, 5)"]),
        ({"q": torch.zeros(2, 3, 0, 5)}, ["`q`", "at least one token", "(2, 3, 0, 5)"]),
        ({"k": torch.zeros(2, 3, 20, 6)}, ["`k`", "(2, 3, 20, 5)", "(2, 3, 20, 6)"]),
        ({"v": torch.zeros(2, 3, 21, 4)}, ["`v`", "(2, 3, 20, value_dim)", "(2, 3, 21, 4)"]),
        ({"key_mask": torch.ones(2, 19)}, ["`key_mask`", "(2, 20)", "(2, 19)"]),
        ({"key_mask": torch.zeros(2, 1, 20, 20)}, ["`key_mask`", "(2, 20)", "(2, 1, 20, 20)"]),
        ({"key_mask": torch.full((2, 20), -1e9)}, ["`key_mask`", "additive", "-1e+09"]),
        ({"segment_ids": torch.zeros(2, 19, dtype=torch.long)}, ["`segment_ids`", "(2, 20)", "(2, 19)"]),
        ({"segment_ids": torch.zeros(2, 20)}, ["`segment_ids`", "integers", "torch.float32"]),
        ({"direction": "left"}, ["`direction`", "'left'", "'both'", "'forward'", "'backward'"]),
        ({"direction": "alternate"}, ["`direction`", "'alternate'", "'both'", "'forward'", "'backward'"]),
        ({"diagonal": "once"}, ["`diagonal`", "'once'", "'balanced'", "'doubled'"]),
        ({"scan": make_scan(2, 19)}, ["`scan`", "(orders, 20)", "(2, 19)"]),
        ({"scan": (torch.arange(20), torch.arange(20))}, ["`scan`", "(orders, 20)", "(20,)"]),
        ({"scan": (make_scan(2, 20)[0], make_scan(1, 20)[1])}, ["`scan`", "(orders, 20)", "(2, 20)", "(1, 20)"]),
        ({"scan": make_scan(2, 20)}, ["`log_decay`", "(2, 3)", "(2, 2, 3, 20)", "got shape (2, 3, 20)"]),
        (
            {"scan": make_scan(2, 20), "log_decay": torch.zeros(3, 3)},
            ["`log_decay`", "(2, 3)", "(2, 2, 3, 20)", "got shape (3, 3)"],
        ),
        (
            {"scan": make_scan(1, 20), "log_decay": None, "segment_ids": torch.zeros(2, 20, dtype=torch.long)},
            ["`segment_ids`", "None", "`scan`"],
        ),
        ({"mode": "chunk", "return_weights": True}, ["`return_weights`", "'parallel'", "'chunk'"]),
        ({"mode": "rnn", "dropout_p": 0.1}, ["`dropout_p`", "'parallel'", "'rnn'"]),
    ],
)
def test_errors_name_the_argument_what_was_given_and_what_is_accepted(change, words):
    q, k, v, log_decay = make_inputs("selective", dtype=torch.float32)
    with pytest.raises(ValueError) as error:
        lion_attention(**{"q": q, "k": k, "v": v, "log_decay": log_decay, "mode": "parallel", **change})
    for word in words:
        assert word in str(error.value)
