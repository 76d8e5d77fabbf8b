"""Token orders for images: permutations of every grid, the curves that they claim to be, and their cache."""

import inspect
import itertools

import pytest
import torch

from lion_transformers import SCAN_ORDERS, LionConfig, LionForImageClassification, lion_attention, scan_order_lion
from lion_transformers.scan_order_lion import get_scan, hilbert, raster, serpentine_columns, serpentine_rows


CPU = torch.device("cpu")
SIDES = range(1, 21)
PERMUTATIONS = (raster, serpentine_rows, serpentine_columns, hilbert)

each_name = pytest.mark.parametrize("name", SCAN_ORDERS)
each_height = pytest.mark.parametrize("height", SIDES)


def steps_of(order, width):
    """From each token of a walk to the next, (down, right)."""
    cells = [divmod(token, width) for token in order.tolist()]
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(cells)]


def is_neighbour(step):
    return abs(step[0]) + abs(step[1]) == 1


@pytest.mark.parametrize("permutation", PERMUTATIONS, ids=lambda permutation: permutation.__name__)
@each_height
def test_every_token_of_every_grid_is_visited_once(permutation, height):
    for width in SIDES:
        order = permutation(height, width)
        assert order.dtype == torch.int64 and order.shape == (height * width,)
        assert sorted(order.tolist()) == list(range(height * width))


@pytest.mark.parametrize(
    "permutation, height, width, expected",
    [
        (raster, 2, 3, [0, 1, 2, 3, 4, 5]),
        (serpentine_rows, 3, 4, [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11]),
        (serpentine_columns, 3, 4, [0, 4, 8, 9, 5, 1, 2, 6, 10, 11, 7, 3]),
        (serpentine_rows, 2, 2, [0, 1, 3, 2]),
        (serpentine_columns, 2, 2, [0, 2, 3, 1]),
        (serpentine_rows, 1, 3, [0, 1, 2]),
        (serpentine_columns, 1, 3, [0, 1, 2]),
        (serpentine_rows, 3, 1, [0, 1, 2]),
        (hilbert, 1, 4, [0, 1, 2, 3]),
        (hilbert, 4, 1, [0, 1, 2, 3]),
        (hilbert, 2, 2, [0, 2, 3, 1]),
        # The curve as it is drawn in textbooks, four cells wide: up and down in four U's.
        (hilbert, 4, 4, [0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3]),
    ],
)
def test_small_grids_by_hand(permutation, height, width, expected):
    assert permutation(height, width).tolist() == expected


@pytest.mark.parametrize("permutation", [serpentine_rows, serpentine_columns], ids=["rows", "columns"])
@each_height
def test_serpentine_steps_to_neighbours(permutation, height):
    for width in SIDES:
        assert all(is_neighbour(step) for step in steps_of(permutation(height, width), width))


def test_serpentine_columns_are_rows_of_the_transposed_grid():
    for height, width in itertools.product(SIDES, SIDES):
        rows, columns = serpentine_rows(width, height), serpentine_columns(height, width)
        assert columns.tolist() == [(token % height) * width + token // height for token in rows.tolist()]


@each_height
def test_hilbert_steps_to_neighbours_but_for_at_most_one_diagonal(height):
    for width in SIDES:
        order = hilbert(height, width)
        far = [step for step in steps_of(order, width) if not is_neighbour(step)]
        assert all(max(map(abs, step)) == 1 for step in far)
        longer, shorter = max(height, width), min(height, width)
        assert len(far) <= (longer % 2 == 1 and shorter % 2 == 0)
        assert order[0] == 0


def hilbert_cell(side, distance):
    """Where the classic curve on a square of side 2^n is after so many steps, bit by bit."""
    x = y = 0
    scale = 1
    while scale < side:
        right, up = 1 & (distance // 2), 1 & (distance ^ (distance // 2))
        if up == 0:
            if right == 1:
                x, y = scale - 1 - x, scale - 1 - y
            x, y = y, x
        x, y = x + scale * right, y + scale * up
        distance //= 4
        scale *= 2
    return x, y


@pytest.mark.parametrize("side", [1, 2, 4, 8, 16, 32])
def test_hilbert_is_the_classic_curve_on_squares_of_powers_of_two(side):
    cells = [hilbert_cell(side, distance) for distance in range(side * side)]
    last = side - 1
    symmetries = [
        [(last - a if flip_a else a, last - b if flip_b else b) for a, b in base]
        for base in (cells, [(y, x) for x, y in cells])
        for flip_a in (False, True)
        for flip_b in (False, True)
    ]
    assert [divmod(token, side) for token in hilbert(side, side).tolist()] in symmetries


def test_hilbert_keeps_together_what_is_near():
    """Of a 16 × 16 grid any 16 steps in a row stay inside a window that no row-by-row order keeps."""

    def extent(order):
        windows = order.unfold(0, 16, 1)
        rows, columns = windows // 16, windows % 16
        return max((x.amax(1) - x.amin(1)).max().item() + 1 for x in (rows, columns))

    assert extent(hilbert(16, 16)) < 10
    assert extent(serpentine_rows(16, 16)) == extent(raster(16, 16)) == 16


# ---------------------------------------------------------------------------------------------------------------------
# get_scan
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_cls_token", [False, True])
@each_name
@each_height
def test_scan_holds_permutations_and_their_inverses(name, height, has_cls_token):
    for width in SIDES:
        scan = get_scan(name, height, width, has_cls_token, CPU)
        if name == "raster":
            assert scan is None
            continue
        length = height * width + has_cls_token
        assert scan.order.shape == scan.inverse.shape == (len(SCAN_ORDERS[name]), length)
        assert scan.order.dtype == scan.inverse.dtype == torch.int64
        for order, inverse, permutation in zip(scan.order, scan.inverse, SCAN_ORDERS[name], strict=True):
            assert torch.equal(order[inverse], torch.arange(length))
            assert torch.equal(inverse[order], torch.arange(length))
            patches = order[1:] - 1 if has_cls_token else order
            assert torch.equal(patches, permutation(height, width))
            assert not has_cls_token or order[0] == inverse[0] == 0


def test_serpentine_is_two_orders_and_the_others_one():
    assert {name: len(orders) for name, orders in SCAN_ORDERS.items()} == {"raster": 1, "serpentine": 2, "hilbert": 1}
    scan = get_scan("serpentine", 2, 3, True, CPU)
    assert scan.order.tolist() == [[0, 1, 2, 3, 6, 5, 4], [0, 1, 4, 5, 2, 3, 6]]
    assert scan.inverse.tolist() == [[0, 1, 2, 3, 6, 5, 4], [0, 1, 4, 5, 2, 3, 6]]


@pytest.mark.parametrize("name", ["serpentine", "hilbert"])
def test_permutations_are_made_once_for_each_grid(name):
    scan = get_scan(name, 5, 7, True, CPU)
    assert get_scan(name, 5, 7, True, CPU) is scan
    others = [get_scan(name, 7, 5, True, CPU), get_scan(name, 5, 7, False, CPU)]
    assert all(other is not scan for other in others)
    assert others[0].order.shape == scan.order.shape and not torch.equal(others[0].order, scan.order)


@pytest.mark.parametrize("scan_order", ["serpentine", "hilbert"])
def test_tensors_of_an_export_do_not_stay_in_the_cache(scan_order):
    settings = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    config = LionConfig(modality="image", scan_order=scan_order, image_size=28, patch_size=4, **settings)
    model = LionForImageClassification(config).eval()
    images = torch.randn(2, 3, 28, 44)  # a grid that no other test uses
    exported = torch.export.export(model, (), {"pixel_values": images}, strict=False)
    with torch.no_grad():
        logits = model(pixel_values=images).logits
        assert type(logits) is torch.Tensor and logits.isfinite().all()
        torch.testing.assert_close(exported.module()(pixel_values=images).logits, logits)
        again = torch.export.export(model, (), {"pixel_values": images}, strict=False)
        torch.testing.assert_close(again.module()(pixel_values=images).logits, logits)


def test_cache_does_not_grow_without_bound():
    for width in range(1, 101):
        get_scan("serpentine", 2, width, False, CPU)
    caches = [x for _, x in inspect.getmembers(scan_order_lion) if hasattr(x, "cache_info")]
    assert caches and all(cache.cache_info().maxsize for cache in caches)


@pytest.mark.parametrize("name", ["serpentine", "hilbert"])
def test_indices_are_where_they_are_needed(name):
    assert get_scan(name, 3, 4, True, CPU).order.device == CPU
    meta = get_scan(name, 3, 4, True, torch.device("meta"))
    assert meta.order.device.type == meta.inverse.device.type == "meta"
    with torch.device("meta"):  # models are built under it; the permutations are real all the same
        scan = get_scan(name, 13, 14, True, CPU)
    assert torch.equal(scan.order[0][scan.inverse[0]], torch.arange(13 * 14 + 1))


@pytest.mark.parametrize("mode", ["parallel", "chunk", "rnn"])
@pytest.mark.parametrize("name", ["serpentine", "hilbert"])
def test_indices_made_in_inference_mode_serve_in_training(name, mode):
    height, width = 11, {"parallel": 12, "chunk": 13, "rnn": 14}[mode]  # grids that no other test asks for
    with torch.inference_mode():
        scan = get_scan(name, height, width, False, CPU)
    assert not scan.order.is_inference() and not scan.inverse.is_inference()
    q = torch.rand(1, 1, height * width, 2, requires_grad=True)
    decays = torch.full((len(scan.order), 1), -0.1, requires_grad=True)
    lion_attention(q, q, q, decays, mode=mode, scan=scan).sum().backward()
    assert q.grad.isfinite().all() and decays.grad.ne(0).all()


def test_an_order_is_added_by_its_function_and_an_entry(monkeypatch):
    def backwards(height, width):
        return torch.arange(height * width).flip(0)

    monkeypatch.setitem(SCAN_ORDERS, "there and back", (raster, backwards))
    scan = get_scan("there and back", 2, 2, True, CPU)
    assert scan.order.tolist() == scan.inverse.tolist() == [[0, 1, 2, 3, 4], [0, 4, 3, 2, 1]]
