# SPDX-License-Identifier: Apache-2.0
"""What an iteration or a step changes, kept so that it can be done again, taken back or given to another worker."""
