# SPDX-License-Identifier: Apache-2.0
"""A script whose processes come by spawn and by fork, and run its functions; prints what of ours they have."""

from __future__ import annotations

import json
import multiprocessing
import sys


def ours() -> list[str]:
    return sorted(name for name in sys.modules if name.startswith("adaptra_megatron"))


def main() -> None:
    found = {"own": ours()}
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.apply(ours)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
