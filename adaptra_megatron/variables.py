# SPDX-License-Identifier: Apache-2.0
"""Names of the environment variables that turn us on and off."""

OFF_VARIABLE = "ADAPTRA_DISABLE"
"""Environment variable that turns us off, unless it is empty or 0: flags are read, and Megatron is left as it is."""
ON_VARIABLE = "ADAPTRA"
"""Environment variable that is --adaptra, unless it is empty or 0, for every process that inherits it."""
FLAGS_VARIABLE = "ADAPTRA_ARGS"
"""Environment variable with further --adaptra flags, unless ADAPTRA is 0; the command line's come after them."""
