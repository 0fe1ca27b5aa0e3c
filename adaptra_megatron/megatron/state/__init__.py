# SPDX-License-Identifier: Apache-2.0
"""Save the state that an iteration or a step changes, to repeat it, undo it or send it to another rank."""
