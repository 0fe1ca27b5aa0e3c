# SPDX-License-Identifier: Apache-2.0
"""What comes from another process is of its declared types, or ValueError is raised."""

from __future__ import annotations

import msgspec
import pytest
from support.made_up.measured_job import MeasuredJob

from adaptra_megatron.control.decisions import decision_of
from adaptra_megatron.control.measurements import measurement_of
from adaptra_megatron.control.wire_format import Decoder, encoded


@pytest.mark.parametrize(
    ("field", "value"), [("sends", 1 << 40), ("sends", b"odd"), ("stage", "1"), ("records", [[0.0]])]
)
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    packet = encoded(MeasuredJob().measure(0.0)[0])
    said = msgspec.msgpack.decode(packet)
    assert measurement_of(encoded(said)).stage == 0
    with pytest.raises(ValueError, match="invalid field"):
        measurement_of(encoded(said | {field: value}))


def test_a_number_that_no_message_has_is_refused() -> None:
    said = msgspec.msgpack.decode(encoded(MeasuredJob().measure(0.0)[0]))
    for place, value in ((1, 1 << 20), (4, -1), (3, 1e300)):
        sends = [list(each) for each in said["sends"]]
        sends[0][place] = value
        with pytest.raises(ValueError, match="a number out of range"):
            measurement_of(encoded(said | {"sends": sends}))


def test_what_is_nested_too_deep_or_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid field"):
        decision_of(b"\x81\xa1a" * 100_000)
    with pytest.raises(ValueError, match="a message of 9 bytes exceeds the limit of 8"):
        Decoder(bytes, 8)(b"123456789")
