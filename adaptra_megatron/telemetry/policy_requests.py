# SPDX-License-Identifier: Apache-2.0
"""A user asks a running job for another policy by a file in its directory, which the leading rank looks for."""

from __future__ import annotations

from pathlib import Path

from adaptra_megatron.log import logger_of
from adaptra_megatron.telemetry.regular_files import is_no_file

logger = logger_of(__name__)

POLICIES = ("adapt", "observe", "off")
_MOST_NBYTES = 64


def policy_file(trace_directory: Path | str) -> Path:
    """The file that the job looks for: it holds one of POLICIES."""
    return Path(trace_directory) / "policy.request"


def ask_for_policy(trace_directory: Path | str, policy: str) -> Path:
    """Put the request where the job looks; its file, which is gone once it has been read. Raises OSError."""
    file = policy_file(trace_directory)
    written = file.with_suffix(".new")
    written.write_text(f"{policy}\n")
    written.replace(file)  # so that no rank reads half of it
    return file


def take_policy(trace_directory: Path | str) -> str:
    """The policy that is asked for, and none from then on; "": none is. Never raises: what is no policy is logged."""
    file = policy_file(trace_directory)
    try:
        if is_no_file(file):
            return ""
        with file.open("rb") as opened:
            found = opened.read(_MOST_NBYTES).decode(errors="replace").strip()
        file.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        logger.warning("request for a policy: %s", error)
        return ""
    if found in POLICIES:
        return found
    logger.warning("%s asks for the policy %r, which is none of %s", file, found, ", ".join(POLICIES))
    return ""
