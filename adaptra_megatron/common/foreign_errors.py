# SPDX-License-Identifier: Apache-2.0
"""Recognise errors of other libraries that differ only in their messages. No other module parses error messages.

- torch.distributed.TCPStore.wait: "wait timeout after ...". An unreachable store also raises DistStoreError.
- torch.distributed.TCPStore as a server: "... (errno: 98 - Address already in use). ... EADDRINUSE".
- torch.AcceleratorError: "CUDA error: device-side assert triggered", "HIP error: out of memory".
- argparse.ArgumentParser.error, which names the flag: "unrecognized arguments: --adaptra-polcy".
"""

from __future__ import annotations

import errno

import torch


def is_store_timeout(error: Exception) -> bool:
    """Return whether a wait for a key of torch's store timed out; False if the store cannot be reached."""
    return "timeout" in str(error)


def is_address_in_use(error: Exception) -> bool:
    """Return whether torch's store cannot listen because another process uses the port."""
    return errno.errorcode[errno.EADDRINUSE] in str(error)


_REFUSALS = ("out of memory", "invalid argument", "invalid configuration argument", "no kernel image", "captur")
"""Errors of calls, after which the device works as before (cudaError_t: 1, 2, 9, 209, 900 to 908)."""


def is_of_device(error: BaseException, *, ended: bool = False) -> bool:
    """Return whether this rank's accelerator has failed: the rank must end, and others can go on without it.

    An assertion on the device, or a call that it refused, is the script's error. But where the generation has `ended`,
    assertions may have been of outputs that aborted operations left undefined.
    """
    text = str(error)
    of_script = any(refusal in text for refusal in _REFUSALS) or ("device-side assert" in text and not ended)
    # NVIDIA's first builds of torch 2.8 may lack the type.
    return isinstance(error, getattr(torch, "AcceleratorError", ())) and not of_script


def is_about_our_flags(message: str) -> bool:
    """Return whether argparse has refused a flag of this package, or its value."""
    return "--adaptra" in message
