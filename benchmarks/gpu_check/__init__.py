# SPDX-License-Identifier: Apache-2.0
"""What a machine with one GPU can show of the promises that are made of GPUs. Run by scripts/gpu_check.sh."""
