# SPDX-License-Identifier: Apache-2.0
"""Run iterations: pipeline, executor, dispatch, measurement, and the way into Megatron."""
