# SPDX-License-Identifier: Apache-2.0
"""Several pipelines at once: costs, simulation and plans of a whole job."""
