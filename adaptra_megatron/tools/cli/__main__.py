# SPDX-License-Identifier: Apache-2.0
import sys

from adaptra_megatron.tools.cli.main import main

sys.exit(main())
