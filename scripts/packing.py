"""Packed sequences: whole documents side by side in rows of one length, with as little padding as best fit leaves.

A row carries positions that restart with every document. LION keeps documents apart by them, and each one is computed
as if it were alone.
"""

import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

from datasets import Features, List, Value


PACKED_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "special_tokens_mask": List(Value("int8")),
        "attention_mask": List(Value("int8")),
        "position_ids": List(Value("int32")),
    }
)


def pack_documents(
    input_ids: Sequence[list[int]], special_tokens_mask: Sequence[list[int]], row_size: int, pad_token_id: int
) -> dict[str, list[list[int]]]:
    """Rows of `PACKED_FEATURES`, `row_size` tokens each, from documents of any length.

    A document that is longer than a row is cut into pieces of `row_size` tokens and a rest, which are packed like
    documents of their own; no other is cut. Padding is on the right, masked, and counted as special tokens, so that
    nothing of it is ever predicted. What is packed depends on these documents alone, in their order.

    Args:
        input_ids: documents with their special tokens.
        special_tokens_mask: 1 at special tokens; lengths as those of `input_ids`.
        row_size: tokens in a row.
        pad_token_id: fills the end of a row.
    """
    documents = [
        (ids[start : start + row_size], special[start : start + row_size])
        for ids, special in zip(input_ids, special_tokens_mask, strict=True)
        for start in range(0, len(ids), row_size)
    ]
    rows = best_fit([len(ids) for ids, _ in documents], row_size)
    packed = [_fill_row([documents[number] for number in row], row_size, pad_token_id) for row in rows]
    return {name: [row[name] for row in packed] for name in PACKED_FEATURES}


def best_fit(lengths: Sequence[int], row_size: int) -> list[list[int]]:
    """Numbers of documents in each row: best fit, longest first, which takes at most 11/9 of the rows needed, plus 1.

    Each document goes to the row with the least space that is enough for it. Rows are shuffled, always alike, and
    documents stand in their own order, so that neither order says anything about lengths.

    Args:
        lengths: tokens in each document, from 1 to `row_size`.
        row_size: tokens that a row has space for.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space left, number of the row), sorted
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = bisect_left(spaces, (lengths[document],))
        if at == len(spaces):
            space, row = row_size, len(rows)
            rows.append([])
        else:
            space, row = spaces.pop(at)
        rows[row].append(document)
        if space > lengths[document]:
            insort(spaces, (space - lengths[document], row))
    random.Random(0).shuffle(rows)
    return [sorted(row) for row in rows]


def _fill_row(
    documents: Sequence[tuple[list[int], list[int]]], row_size: int, pad_token_id: int
) -> dict[str, list[Any]]:
    ids, special = (list(itertools.chain.from_iterable(parts)) for parts in zip(*documents, strict=True))
    padding = row_size - len(ids)
    positions = [position for part, _ in documents for position in range(len(part))]
    return {
        "input_ids": ids + [pad_token_id] * padding,
        "special_tokens_mask": special + [1] * padding,
        "attention_mask": [1] * len(ids) + [0] * padding,
        "position_ids": positions + [0] * padding,
    }
