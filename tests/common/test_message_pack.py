# SPDX-License-Identifier: Apache-2.0
"""What comes from another process is of its declared types, or ValueError is raised."""

from __future__ import annotations

import msgspec
import pytest
from support.made_up.measured_job import MeasuredJob

from adaptra_megatron.common.typed_messages import Decoder, encoded
from adaptra_megatron.control.decisions import decision_of
from adaptra_megatron.control.measurements import measurement_of


@pytest.mark.parametrize(
    ("field", "value"), [("sends", 1 << 40), ("sends", b"odd"), ("stage", "1"), ("actions", [[0.0]])]
)
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    packet = encoded(MeasuredJob().measure(0.0)[0])
    said = msgspec.msgpack.decode(packet)
    assert measurement_of(encoded(said)).stage == 0
    with pytest.raises(ValueError, match="invalid field"):
        measurement_of(encoded(said | {field: value}))


@pytest.mark.parametrize("column", range(8))
def test_columns_that_do_not_fit_each_other_are_refused(column: int) -> None:
    said = msgspec.msgpack.decode(encoded(MeasuredJob().measure(0.0)[0]))
    for name, place in (("sends", column), ("actions", column % 5)):
        columns = list(said[name])
        columns[place] = columns[place][: len(columns[place]) // 2]
        with pytest.raises(ValueError, match="rows"):
            measurement_of(encoded(said | {name: columns}))


def test_what_is_nested_too_deep_or_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid field"):
        decision_of(b"\x81\xa1a" * 100_000)
    with pytest.raises(ValueError, match="a message of 9 bytes exceeds the limit of 8"):
        Decoder(bytes, 8)(b"123456789")
