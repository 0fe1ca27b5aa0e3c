# SPDX-License-Identifier: Apache-2.0
"""Run iterations inside Megatron: pipeline, executor, dispatch and measurement."""
