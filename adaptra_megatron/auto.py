# SPDX-License-Identifier: Apache-2.0
"""Turn --adaptra on by an import: `import adaptra_megatron.auto`, before the first iteration of a script.

This is the only module of the package whose import has an effect.
"""

from adaptra_megatron.engine.bootstrap import on_request

on_request()
