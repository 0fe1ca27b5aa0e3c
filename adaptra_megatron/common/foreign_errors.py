# SPDX-License-Identifier: Apache-2.0
"""Errors of other libraries that only their sentences tell apart. Nothing else reads a sentence.

- torch.distributed.TCPStore.wait, "wait timeout after ...": DistStoreError also where the store is lost.
- torch.distributed.TCPStore as it listens, "... (errno: 98 - Address already in use). ... EADDRINUSE".
- argparse.ArgumentParser.error, which names the flag: "unrecognized arguments: --adaptra-polcy".
"""

from __future__ import annotations

import errno


def is_store_timeout(error: Exception) -> bool:
    """Return whether a wait for a key of torch's store has ended with nothing there, and not because it is lost."""
    return "timeout" in str(error)


def is_address_in_use(error: Exception) -> bool:
    """Return whether torch's store cannot listen because another process has the port."""
    return errno.errorcode[errno.EADDRINUSE] in str(error)


def is_about_our_flags(message: str) -> bool:
    """Return whether argparse has refused a flag of this package, or its value."""
    return "--adaptra" in message
