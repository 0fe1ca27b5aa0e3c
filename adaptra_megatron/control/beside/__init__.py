# SPDX-License-Identifier: Apache-2.0
"""Share the parts of the sidecar processes that work for the job's control."""
