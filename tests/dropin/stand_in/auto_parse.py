# SPDX-License-Identifier: Apache-2.0
"""`parse.py` for users who would rather change a line of their script than their command line."""

import adaptra_megatron.auto  # noqa: F401, I001  # before anything of Megatron

from parse import main

if __name__ == "__main__":
    main()
