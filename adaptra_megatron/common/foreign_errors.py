# SPDX-License-Identifier: Apache-2.0
"""Recognise errors of other libraries that differ only in their messages. No other module parses error messages.

- torch.distributed.TCPStore.wait: "wait timeout after ...". An unreachable store also raises DistStoreError.
- torch.distributed.TCPStore as a server: "... (errno: 98 - Address already in use). ... EADDRINUSE".
- torch.AcceleratorError: "CUDA error: device-side assert triggered", "HIP error: out of memory".
- argparse.ArgumentParser.error, which names the flag: "unrecognized arguments: --adaptra-polcy".
"""

from __future__ import annotations

import errno


def is_store_timeout(error: Exception) -> bool:
    """Return whether a wait for a key of torch's store timed out; False if the store cannot be reached."""
    return "timeout" in str(error)


def is_address_in_use(error: Exception) -> bool:
    """Return whether torch's store cannot listen because another process uses the port."""
    return errno.errorcode[errno.EADDRINUSE] in str(error)


def is_device_assertion(error: BaseException) -> bool:
    """Return whether an assertion of a kernel has failed."""
    return "device-side assert" in str(error)


def is_device_out_of_memory(error: BaseException) -> bool:
    """Return whether a device has too little memory."""
    return "out of memory" in str(error)


def is_about_our_flags(message: str) -> bool:
    """Return whether argparse has refused a flag of this package, or its value."""
    return "--adaptra" in message
