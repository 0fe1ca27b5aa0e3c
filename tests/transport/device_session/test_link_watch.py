# SPDX-License-Identifier: Apache-2.0
"""The last resort of the threads that watch links."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENDS = """
import os, sys
from adaptra_megatron.transport.device_session.link_watch import end_process
os.set_blocking(1, False)
try:
    while True:
        os.write(1, bytes(1 << 16))
except BlockingIOError:
    os.set_blocking(1, True)
sys.stdout.write("pending")
end_process()
"""


@pytest.mark.timeout(300)
def test_a_process_ends_though_nobody_reads_what_it_has_written() -> None:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, env=buffered) as process:
        try:
            assert process.wait(timeout=240.0) == 1
        finally:
            process.kill()
