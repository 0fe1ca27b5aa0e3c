# SPDX-License-Identifier: Apache-2.0
"""`adaptra launch`: starts a job's ranks on each host, and keeps the live ones when others fail."""
