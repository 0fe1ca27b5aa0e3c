# SPDX-License-Identifier: Apache-2.0
"""The process that serves the job's store asks no name server who its clients are."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import socket
from adaptra_megatron.elastic.launch.endpoint import serve_store

def looked_up():
    try:
        return socket.getnameinfo(("192.0.2.1", 1), socket.NI_NAMEREQD)
    except socket.gaierror as cause:
        return cause.errno == socket.EAI_AGAIN

asked = looked_up()
store = serve_store("127.0.0.1", 0, 5.0)
store.clone().set("key", "value")
print(asked, looked_up(), store.get("key"))
"""


def test_names_of_clients_are_looked_up_in_files_alone() -> None:
    """Without attempts, every name server is one that does not answer: the resolver says to ask again."""
    environment = {**os.environ, "RES_OPTIONS": "attempts:0"}
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False", "b'value'"]
