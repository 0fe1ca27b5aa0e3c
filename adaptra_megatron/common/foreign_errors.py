# SPDX-License-Identifier: Apache-2.0
"""Recognise errors of other libraries that differ in their messages alone. No other module parses a message.

- torch.distributed.TCPStore.wait, "wait timeout after ...": a lost store raises DistStoreError, too.
- torch.distributed.TCPStore as it listens, "... (errno: 98 - Address already in use). ... EADDRINUSE".
- argparse.ArgumentParser.error, which names the flag: "unrecognized arguments: --adaptra-polcy".
"""

from __future__ import annotations

import errno


def is_store_timeout(error: Exception) -> bool:
    """Return whether a wait for a key of torch's store timed out, as opposed to a lost store."""
    return "timeout" in str(error)


def is_address_in_use(error: Exception) -> bool:
    """Return whether torch's store cannot listen because another process uses the port."""
    return errno.errorcode[errno.EADDRINUSE] in str(error)


def is_about_our_flags(message: str) -> bool:
    """Return whether argparse has refused a flag of this package, or its value."""
    return "--adaptra" in message
