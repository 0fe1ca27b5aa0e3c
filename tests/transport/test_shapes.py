# SPDX-License-Identifier: Apache-2.0
"""The shape header is its own inverse, and refuses what no sender writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.transport.message_keys import TransportError
from adaptra_megatron.transport.shapes import HEADER_NUMBERS, decode_shape, encode_shape

CPU = torch.device("cpu")
SIZES = st.integers(min_value=0, max_value=2**62)


@given(st.lists(SIZES, max_size=8).map(tuple))
def test_what_is_encoded_is_decoded(shape: tuple[int, ...]) -> None:
    header = encode_shape(shape, CPU)
    assert header.dtype == torch.int64
    assert header.shape == (HEADER_NUMBERS,)
    assert decode_shape(header) == shape


@given(st.lists(SIZES, min_size=9, max_size=12))
def test_too_many_dimensions_are_refused(shape: list[int]) -> None:
    with pytest.raises(TransportError, match="more than 8 dimensions"):
        encode_shape(shape, CPU)


@given(st.integers(max_value=-1) | st.integers(min_value=9), st.integers(min_value=0, max_value=7))
def test_impossible_headers_are_refused(number: int, position: int) -> None:
    number = max(-(2**63), min(2**63 - 1, number))
    wrong_count = [number, 1, 1, 1, 1, 1, 1, 1, 1]
    with pytest.raises(TransportError, match="impossible shape header"):
        decode_shape(torch.tensor(wrong_count))
    negative_size = [8, 1, 1, 1, 1, 1, 1, 1, 1]
    negative_size[1 + position] = -abs(number)
    with pytest.raises(TransportError, match="impossible shape header"):
        decode_shape(torch.tensor(negative_size))
