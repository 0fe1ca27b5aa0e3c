# SPDX-License-Identifier: Apache-2.0
"""What runs an iteration: pipeline, executor, dispatch, measurement, and the way into Megatron."""
