# SPDX-License-Identifier: Apache-2.0
"""A pretraining script as far as its command line. Then tells, as JSON, what came of it."""

from __future__ import annotations

import json
import sys

from megatron.training.initialize import initialize_megatron


def main() -> None:
    arguments = initialize_megatron()
    patches = sys.modules.get("adaptra_megatron.patches")
    applied = None if patches is None else patches.in_force()
    reported = {
        "argv": sys.argv,
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "policy": None if applied is None else applied.config.policy,
        "patched": [] if applied is None else list(applied.identities),
        "modules": sorted(name for name in sys.modules if name.partition(".")[0] in ("adaptra_megatron", "torch")),
        "main": sys.modules["__main__"].__file__,
        "path": sys.path[0],
    }
    sys.stdout.write(json.dumps(reported))


if __name__ == "__main__":
    main()
