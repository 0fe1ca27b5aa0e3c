# SPDX-License-Identifier: Apache-2.0
"""`import adaptra_megatron.auto`, before the first iteration, is the flag --adaptra for the script that does it.

This is the one module of the package whose import has an effect: having it is what it is for.
"""

from adaptra_megatron.engine.bootstrap import on_request

on_request()
