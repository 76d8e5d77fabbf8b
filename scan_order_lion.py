"""Token orders for images: the ways in which a recurrence can walk over a grid of patches.

A scan order is a permutation of the tokens of a height × width grid, numbered row by row. A named order may consist of
several permutations: each of them is walked with decays of its own, and the results are averaged.

To add an order, write its permutation as a function of height and width, enter it in `SCAN_ORDERS`, and its name among
the choices of `LionConfig.scan_order`.
"""

from collections.abc import Iterator
from functools import lru_cache
from operator import index
from typing import NamedTuple

import torch


class Scan(NamedTuple):
    """Permutations and their inverses, both int64 `(orders, length)`.

    `order[n, t]` is the token that order n visits at step t; `inverse[n, i]` is the step at which it visits token i.
    """

    order: torch.Tensor
    inverse: torch.Tensor


def raster(height: int, width: int) -> torch.Tensor:
    """Rows from left to right."""
    return torch.arange(height * width)


def serpentine_rows(height: int, width: int) -> torch.Tensor:
    """Rows from left to right and from right to left in turn, so that every step goes to a neighbour."""
    return _every_second_reversed(raster(height, width).view(height, width))


def serpentine_columns(height: int, width: int) -> torch.Tensor:
    """Columns downwards and upwards in turn."""
    return _every_second_reversed(raster(height, width).view(height, width).T)


def hilbert(height: int, width: int) -> torch.Tensor:
    """The Hilbert curve, generalised to rectangles: what is near on the curve is near in the image.

    After J. Červený's description of such a curve, a rectangle is split into two or three that are walked in turn.

    Every step goes to a neighbour, but for at most one diagonal step where the longer side is odd and the other even.
    """
    along, across = (width, 1j * height) if width >= height else (1j * height, width)
    cells = _hilbert_cells(0, along, across)
    return torch.tensor([int(cell.imag) * width + int(cell.real) for cell in cells])


SCAN_ORDERS = {
    "raster": (raster,),
    "serpentine": (serpentine_rows, serpentine_columns),  # LION-D♮ and LION-S♮ of the paper
    "hilbert": (hilbert,),
}


def get_scan(name: str, height: int, width: int, has_cls_token: bool, device: torch.device) -> Scan | None:
    """The permutations of a named order over a grid, made once for each grid and device.

    Args:
        name: a key of `SCAN_ORDERS`.
        height, width: of the grid, in patches.
        has_cls_token: whether a CLS token stands before the patches; it stays first in every order.
        device: where the indices are needed.

    Returns:
        Permutations of `has_cls_token + height * width` tokens; `None` for "raster", in which tokens already are.
    """
    if name == "raster":
        return None
    # A compiled model has a graph for each grid, with its indices as constants.
    return _scan_as_constant(name, index(height), index(width), has_cls_token, device)


@torch.compiler.assume_constant_result
def _scan_as_constant(*key):
    scan = _make_scan(*key)
    if type(scan.order) is not torch.Tensor:
        _make_scan.cache_clear()  # torch.export makes tensors without data, of use while it traces only
    return scan


@lru_cache(maxsize=64)
def _make_scan(name, height, width, has_cls_token, device):
    # Indices made in inference mode could not take part in a later training step.
    with torch.inference_mode(False), torch.device("cpu"):
        order = torch.stack([permutation(height, width) for permutation in SCAN_ORDERS[name]])
        if has_cls_token:
            order = torch.nn.functional.pad(order + 1, (1, 0))
        return Scan(order.to(device), order.argsort(-1).to(device))


def _every_second_reversed(lines):
    lines = lines.clone()
    lines[1::2] = lines[1::2].flip(1)
    return lines.flatten()


def _hilbert_cells(corner: complex, along: complex, across: complex) -> Iterator[complex]:
    """Cells x + iy of the rectangle that `along` and `across` span from `corner`: a walk that ends at the far end of
    `along`."""
    length, width = int(abs(along)), int(abs(across))
    ahead, aside = along / length, across / width
    if width == 1:
        yield from (corner + step * ahead for step in range(length))
    elif length == 1:
        yield from (corner + step * aside for step in range(width))
    elif 2 * length > 3 * width:  # two rectangles, one after the other
        half = _even_half(length) * ahead
        yield from _hilbert_cells(corner, half, across)
        yield from _hilbert_cells(corner + half, along - half, across)
    else:  # aside, along the far side, and back
        half, near = length // 2 * ahead, _even_half(width) * aside
        yield from _hilbert_cells(corner, near, half)
        yield from _hilbert_cells(corner + near, along, across - near)
        yield from _hilbert_cells(corner + along - ahead + near - aside, -near, half - along)


def _even_half(size):
    """Half of `size`, even where possible: rectangles with even sides join without diagonal steps."""
    half = size // 2
    return half + 1 if half % 2 and size > 2 else half
