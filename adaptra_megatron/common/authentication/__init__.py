# SPDX-License-Identifier: Apache-2.0
"""Proof that a connection or an entry of the job's store comes from a rank of this job."""
