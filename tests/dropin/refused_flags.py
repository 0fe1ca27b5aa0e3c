# SPDX-License-Identifier: Apache-2.0
"""Gives Megatron-LM's own parser one command line after the other; tells, as JSON, how it ended each.

python -m testing.megatron.megatron_lm refused_flags.py LINES.json RESULT.json --adaptra
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path


def main() -> None:
    from megatron.training.arguments import parse_args

    lines, result = Path(sys.argv[1]), Path(sys.argv[2])
    reported = []
    for line in json.loads(lines.read_text()):
        sys.argv[1:] = line
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                parse_args()
                status = 0
            except SystemExit as exit_:
                status = int(exit_.code or 0)
        reported.append({"status": status, "said": said.getvalue().strip().rpartition("\n")[2]})
    result.write_text(json.dumps(reported))


if __name__ == "__main__":
    main()
